"""Messages looked up by position, id and key; dead letters read and given back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dledger.client.admin.daemons import LeaderAsks, checked
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.errors import DamagedAnswerError, MessageIllegalError, OffsetIllegalError
from dledger.client.core.message import MAX_ID_CHARS, Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.client.trace import TraceContext, decode
from dledger.commitlog.errors import CorruptRecordError, LocalProtocolError
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.commitlog.properties import (
    KEY_SEPARATOR,
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_KEYS,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_MSG_REGION,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRACE_ON,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
)
from dledger.remoting.addresses import join_address
from dledger.remoting.protocol.bodies import QueryConsumeQueueResponseBody
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import (
    QueryConsumeQueueHeader,
    QueryMessageHeader,
    ViewMessageHeader,
)
from dledger.remoting.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX, TRACE_TOPIC

MAX_QUERY_MESSAGES: Final = 64
"""More messages with one key no broker gives at once."""
ALWAYS_MS: Final = (1 << 63) - 1
"""A time that never comes."""
READING_GROUP: Final = "TOOLS_CONSUMER"
"""RocketMQ's group of tools: every broker knows it, and it commits no offset."""


class MessageQueries(LeaderAsks):
    """Finds messages through a client instance."""

    async def view_message(self, offset_message_id: str) -> MessageExt:
        """Return the message an offset message id names, from the broker it names.

        Raises:
            MessageIllegalError: Not an offset message id.
            RequestFailedError: The broker has no message there.
            BrokerUnreachableError: It cannot be asked.
        """
        try:
            host, port, phy_offset = decode_offset_message_id(offset_message_id)
        except LocalProtocolError as error:
            raise MessageIllegalError(str(error)) from error
        return await self.view_message_at(join_address(host, port), phy_offset)

    async def view_message_at(self, address: str, phy_offset: int) -> MessageExt:
        """Return the message at a byte position of the log of the broker at *address*.

        Raises:
            RequestFailedError: There is none.
            BrokerUnreachableError: It cannot be asked.
        """
        header = dict(ViewMessageHeader(phy_offset).encode())
        answer = await self._instance.ask(address, RequestCode.VIEW_MESSAGE_BY_ID, header)
        checked(answer, f"message at {phy_offset} of {address}")
        return MessageExt(memoryview(answer.body), 0)

    async def query_messages(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = ALWAYS_MS,
        max_messages: int = MAX_QUERY_MESSAGES,
    ) -> list[MessageExt]:
        """Return the newest messages of *topic* with *key* among their index keys, oldest first.

        Args:
            key: One key as the producer gave it.
            begin_ms: Stored at or after this time, ms since the epoch,
            end_ms: and at or before this one.
            max_messages: At most this many; brokers have a limit of 64 each.
        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        found = await self._query(topic, key, begin_ms, end_ms, max_messages, is_unique=False)
        found = [each for each in found if key in each.keys.split(KEY_SEPARATOR)]
        return found[-max_messages:]

    async def query_unique_key(
        self, topic: str, message_id: str, *, begin_ms: int = 0, end_ms: int = ALWAYS_MS
    ) -> list[MessageExt]:
        """Return the messages of *topic* whose id, given by their producer, is *message_id*.

        One, unless a send with an unknown outcome was repeated. Arguments and errors as
        `query_messages`.
        """
        found = await self._query(
            topic, message_id, begin_ms, end_ms, MAX_QUERY_MESSAGES, is_unique=True
        )
        return [message for message in found if message.message_id == message_id]

    async def _query(
        self, topic: str, key: str, begin_ms: int, end_ms: int, most: int, *, is_unique: bool
    ) -> list[MessageExt]:
        header = QueryMessageHeader(topic, key, most, begin_ms, end_ms, is_unique)
        route = await self._instance.routes.refresh(topic)
        found: list[MessageExt] = []
        for name in sorted({queue.broker_name for queue in route.subscribe_queues}):
            none = ResponseCode.QUERY_NOT_FOUND
            answer = await self._ask_leader(
                name,
                RequestCode.QUERY_MESSAGE,
                header.encode(),
                topic=topic,
                also=(none,),
                what=f"messages of {topic} with key {key}",
            )
            if answer.code != none:
                found += _records(answer.body, name)
        return sorted(found, key=lambda message: message.store_timestamp_ms)

    async def query_consume_queue(
        self, queue: MessageQueue, first: int, count: int, *, group: str | None = None
    ) -> QueryConsumeQueueResponseBody:
        """Return units of a consume queue from offset *first* on, as the leader has them.

        Args:
            group: An online consumer group: each unit then has whether its filter lets it pass.
        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        header = QueryConsumeQueueHeader(queue.topic, queue.queue_id, first, count, group)
        answer = await self._ask_leader(
            queue.broker_name, RequestCode.QUERY_CONSUME_QUEUE, header.encode(), topic=queue.topic
        )
        return QueryConsumeQueueResponseBody.decode(answer.body)

    async def read_queue(
        self, queue: MessageQueue, first_offset: int, limit: int
    ) -> list[MessageExt]:
        """Return up to *limit* messages of one queue from *first_offset* on, as far as it has any.

        No group moves by it. Offsets that are no longer kept are passed over.

        Raises:
            RequestFailedError, BrokerUnreachableError: No leader answers, or it refuses.
        """
        # Not opened: what only reads is no member of the group, and brokers keep nothing of it.
        consumer = PullConsumer(self._instance, READING_GROUP)
        end = await consumer.max_offset(queue)
        begin = max(first_offset, await consumer.min_offset(queue))
        return [
            message async for message in _between(consumer, queue, begin, min(end, begin + limit))
        ]

    async def messages_by_time(
        self, topic: str, begin_ms: int, end_ms: int, limit: int, *, queue_id: int | None = None
    ) -> list[MessageExt]:
        """Return the first messages of *topic* stored in a span of time, oldest first.

        Args:
            begin_ms: Stored at or after this time, ms since the epoch,
            end_ms: and before this one.
            limit: At most this many.
            queue_id: Of the queues with this id only.
        Raises:
            NoRouteError, NoNameServerError: No NameServer knows the topic, or none answers.
            RequestFailedError, BrokerUnreachableError: A leader gives no answer, or refuses.
        """
        found: list[MessageExt] = []
        consumer = PullConsumer(self._instance, READING_GROUP)
        for queue in await consumer.fetch_message_queues(topic):
            if queue_id not in (None, queue.queue_id):
                continue
            begin = await consumer.search_offset(queue, begin_ms)
            end = min(await consumer.max_offset(queue), begin + limit)
            async for message in _between(consumer, queue, begin, end):
                if begin_ms <= message.store_timestamp_ms < end_ms:
                    found.append(message)
        return sorted(found, key=lambda message: message.store_timestamp_ms)[:limit]

    async def message_trace(
        self, wanted: str, *, trace_topic: str = TRACE_TOPIC
    ) -> list[TraceContext]:
        """Return what clients with message trace reported of a message; empty: none did.

        Args:
            wanted: Its id, or one of its keys.
            trace_topic: Where clients send their traces.
        Raises:
            NoRouteError, NoNameServerError: There is no such topic, or no NameServer answers.
            RequestFailedError, BrokerUnreachableError: A leader gives no answer, or refuses.
        """
        return [
            step
            for message in await self.query_messages(trace_topic, wanted)
            for step in decode(message.body_bytes.decode(errors="replace"))
            if any(wanted in (bean.msg_id, *bean.keys.split(KEY_SEPARATOR)) for bean in step.beans)
        ]


def _records(body: Buffer, broker_name: str) -> Iterator[MessageExt]:
    """Yield the messages whose records stand back to back in *body*."""
    view, at = memoryview(body), 0
    try:
        while at < view.nbytes:
            message = MessageExt(view, at, broker_name)
            at += message.record.size
            yield message
    except CorruptRecordError as error:
        raise DamagedAnswerError(
            f"messages of {broker_name} are damaged there, or on the way: {error}",
            code=ResponseCode.SERVICE_NOT_AVAILABLE,
        ) from error


RESEND_GROUP_PREFIX: Final = "DLQ_RESEND_"
"""Its consumer offsets in a dead letter topic say what was given back."""

PULL_MESSAGES: Final = 32

_LEFT_BEHIND: Final = frozenset(
    {
        PROPERTY_CLUSTER,
        PROPERTY_DELAY,
        PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
        PROPERTY_DLQ_ORIGIN_TOPIC,
        PROPERTY_KEYS,
        PROPERTY_MAX_RECONSUME_TIMES,
        PROPERTY_MSG_REGION,
        PROPERTY_RECONSUME_TIME,
        PROPERTY_TAGS,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELIVER_MS,
        PROPERTY_TIMER_OUT_MS,
        PROPERTY_TRACE_ON,
        PROPERTY_UNIQ_KEY,
        PROPERTY_WAIT,
    }
)
"""What belongs to the way the message came, or has a field of its own on `Message`."""


@dataclass(frozen=True, slots=True)
class DeadLetterGroup:
    """The dead letters of one consumer group.

    Attributes:
        group: The consumer group.
        topic: Its dead letter topic.
        messages: Dead letters kept now.
        resent: How many of them were given back.
    """

    group: str
    topic: str
    messages: int
    resent: int


def times_given_back(retried: Iterable[MessageExt]) -> int:
    """Return how often a dead letter was given back, of its copies in the retry topic. Pure."""
    return sum(not copy.reconsume_times for copy in retried)


def resend_copy(letter: MessageExt, group: str) -> Message:
    """Return the message that gives *letter* back to its group: to its retry topic, at once. Pure.

    Id, body, tags, keys and the user's properties are kept; it is counted from zero again. The
    consumer sees the topic it was first sent to.
    """
    found: Mapping[str, str] = letter.properties
    properties = {name: value for name, value in found.items() if name not in _LEFT_BEHIND}
    origin = found.get(PROPERTY_DLQ_ORIGIN_TOPIC) or found.get(PROPERTY_RETRY_TOPIC)
    if origin:
        properties[PROPERTY_RETRY_TOPIC] = origin
    return Message(
        RETRY_PREFIX + group,
        letter.body_bytes,
        tags=letter.tags,
        keys=letter.keys,
        properties=properties,
        flag=letter.flag,
        message_id=letter.message_id if len(letter.message_id) <= MAX_ID_CHARS else "",
    )


class DeadLetters(LeaderAsks):
    """Counts dead letters, reads them and gives them back."""

    async def dead_letter_groups(self) -> list[DeadLetterGroup]:
        """Return the consumer groups that have a dead letter topic, by name.

        Raises:
            NoNameServerError: None answers.
            RequestFailedError, BrokerUnreachableError: A leader does not say.
        """
        return [
            await self.dead_letter_group(topic.removeprefix(DLQ_PREFIX))
            for topic in await self.topic_list()
            if topic.startswith(DLQ_PREFIX)
        ]

    async def dead_letter_group(self, group: str) -> DeadLetterGroup:
        """Return how many dead letters a group has, and how many were given back.

        Raises:
            NoRouteError: It never had one.
        """
        topic = DLQ_PREFIX + group
        kept = resent = 0
        # Not opened: two may read the same letters at once, and neither is a member of the group.
        consumer = PullConsumer(self._instance, RESEND_GROUP_PREFIX + group)
        for queue in await consumer.fetch_message_queues(topic):
            low, high = await consumer.min_offset(queue), await consumer.max_offset(queue)
            kept += high - low
            resent += max((await consumer.committed_offset(queue) or 0) - low, 0)
        return DeadLetterGroup(group, topic, kept, min(resent, kept))

    async def dead_letters(
        self,
        group: str,
        *,
        first_offset: int = 0,
        limit: int | None = None,
        begin: tuple[MessageQueue, int] | None = None,
    ) -> AsyncIterator[tuple[MessageQueue, MessageExt]]:
        """Yield a group's dead letters, oldest first in each queue, as far as there are any now.

        Queues come in their order: that of their broker groups' names and their numbers.

        Args:
            first_offset: No dead letter before this offset of its queue.
            begin: No dead letter before this place; of a caller that goes on where it ended.
            limit: At most this many; None: all.
        Raises:
            NoRouteError: It never had one.
        """
        consumer = PullConsumer(self._instance, READING_GROUP)
        left = limit
        for queue in sorted(await consumer.fetch_message_queues(DLQ_PREFIX + group)):
            if begin is not None and queue < begin[0]:
                continue
            end = await consumer.max_offset(queue)
            low = max(first_offset, await consumer.min_offset(queue))
            if begin is not None and queue == begin[0]:
                low = max(low, begin[1])
            async with aclosing(_between(consumer, queue, low, end)) as letters:
                async for letter in letters:
                    if left is not None and left <= 0:
                        return
                    yield queue, letter
                    left = None if left is None else left - 1

    async def resend_dead_letters(
        self,
        group: str,
        *,
        offset: int | None = None,
        limit: int | None = None,
        queue: MessageQueue | None = None,
    ) -> int:
        """Give dead letters back to their group; return how many.

        Without *offset* those that were not given back yet, and this is remembered after each:
        one may be given back twice if this is interrupted, none is left out.

        Args:
            offset: This one only, whether it was given back before or not.
            limit: At most this many; None: all.
            queue: Of this queue only; each broker group has queues, with offsets of their own.
        Raises:
            NoRouteError: It never had one.
            MessageIllegalError: Some cannot be sent, as a body that is larger than a message may
                be; the first is named. All others were given back.
            ClientError: As `Producer.send` and `PullConsumer.commit_offset`; those before were
                given back.
        """
        done, illegal = 0, list[str]()
        async with (
            PullConsumer(self._instance, RESEND_GROUP_PREFIX + group) as consumer,
            Producer(self._instance, RESEND_GROUP_PREFIX + group) as producer,
        ):
            for each in await consumer.fetch_message_queues(DLQ_PREFIX + group):
                if queue is not None and each != queue:
                    continue
                end = await consumer.max_offset(each)
                begin = max(
                    await consumer.min_offset(each), await consumer.committed_offset(each) or 0
                )
                if offset is not None:
                    begin, end = offset, min(end, offset + 1)
                async with aclosing(_between(consumer, each, begin, end)) as letters:
                    async for letter in letters:
                        if limit is not None and done >= limit:
                            return done
                        try:
                            await producer.send(resend_copy(letter, group))
                            done += 1
                        except (MessageIllegalError, CorruptRecordError) as error:
                            illegal.append(f"offset {letter.queue_offset} of {each}: {error}")
                        if offset is None:
                            await consumer.commit_offset(each, letter.queue_offset + 1)
        if illegal:
            raise MessageIllegalError(
                f"{len(illegal)} dead letters cannot be sent and stay where they are, {done} were"
                f" given back; the first: {illegal[0]}"
            )
        return done


async def _between(
    consumer: PullConsumer, queue: MessageQueue, begin: int, end: int
) -> AsyncGenerator[MessageExt, None]:
    while begin < end:
        try:
            result = await consumer.pull(
                queue, begin, max_messages=PULL_MESSAGES, timeout_s=0.0, with_expired=True
            )
        except OffsetIllegalError as error:
            if error.next_begin_offset <= begin:
                return
            begin = error.next_begin_offset  # retention took some meanwhile
            continue
        for message in result.messages:
            if message.queue_offset < end:
                yield message
        if result.next_begin_offset <= begin:
            return
        begin = result.next_begin_offset
