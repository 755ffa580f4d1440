"""What consumer groups gave up: looked at, and given to their group again.

A dead letter stays in its topic until retention takes it. What was given back is remembered as the
offset of a consumer group of its own, so that giving back again begins behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import OffsetIllegalError
from client.core.message import Message, MessageExt
from client.core.route import MessageQueue
from client.producer.producer import Producer
from commitlog.properties import (
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

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"

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


def resend_copy(letter: MessageExt, group: str) -> Message:
    """Return the message that gives *letter* back to its group: to its retry topic, at once. Pure.

    Body, tags, keys and the user's properties are kept; it is counted from zero again. The
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
    )


class DeadLetters:
    """Dead letters through a client instance; `Admin` has the same as methods."""

    def __init__(self, instance: ClientInstance) -> None:
        """Use *instance*, which must be open."""
        self._instance = instance

    async def of_group(self, group: str) -> DeadLetterGroup:
        """Return how many dead letters a group has, and how many were given back.

        Raises:
            NoRouteError: It never had one.
        """
        topic = DEAD_LETTER_PREFIX + group
        kept = resent = 0
        async with PullConsumer(self._instance, RESEND_GROUP_PREFIX + group) as consumer:
            for queue in await consumer.fetch_message_queues(topic):
                low, high = await consumer.min_offset(queue), await consumer.max_offset(queue)
                kept += high - low
                resent += max((await consumer.committed_offset(queue) or 0) - low, 0)
        return DeadLetterGroup(group, topic, kept, min(resent, kept))

    async def read(
        self, group: str, *, first_offset: int = 0, limit: int | None = None
    ) -> AsyncIterator[tuple[MessageQueue, MessageExt]]:
        """Yield a group's dead letters, oldest first in each queue, as far as there are any now.

        Args:
            first_offset: No dead letter before this offset of its queue.
            limit: At most so many; None: all.
        Raises:
            NoRouteError: It never had one.
        """
        async with PullConsumer(self._instance, RESEND_GROUP_PREFIX + group) as consumer:
            left = limit
            for queue in await consumer.fetch_message_queues(DEAD_LETTER_PREFIX + group):
                end = await consumer.max_offset(queue)
                begin = max(first_offset, await consumer.min_offset(queue))
                async for letter in _between(consumer, queue, begin, end):
                    if left is not None and left <= 0:
                        return
                    yield queue, letter
                    left = None if left is None else left - 1

    async def resend(
        self, group: str, *, offset: int | None = None, limit: int | None = None
    ) -> int:
        """Give dead letters back to their group; return how many.

        Without *offset* those that were not given back yet, and this is remembered after each:
        one may be given back twice if this is interrupted, none is left out.

        Args:
            offset: This one only, whether it was given back before or not.
            limit: At most so many; None: all.
        Raises:
            NoRouteError: It never had one.
            ClientError: As `Producer.send` and `PullConsumer.commit_offset`; those before were
                given back.
        """
        done = 0
        async with (
            PullConsumer(self._instance, RESEND_GROUP_PREFIX + group) as consumer,
            Producer(self._instance, RESEND_GROUP_PREFIX + group) as producer,
        ):
            for queue in await consumer.fetch_message_queues(DEAD_LETTER_PREFIX + group):
                end = await consumer.max_offset(queue)
                begin = max(
                    await consumer.min_offset(queue),
                    await consumer.committed_offset(queue) or 0,
                )
                if offset is not None:
                    begin, end = offset, min(end, offset + 1)
                async for letter in _between(consumer, queue, begin, end):
                    if limit is not None and done >= limit:
                        return done
                    await producer.send(resend_copy(letter, group))
                    done += 1
                    if offset is None:
                        await consumer.commit_offset(queue, letter.queue_offset + 1)
        return done


async def _between(
    consumer: PullConsumer, queue: MessageQueue, begin: int, end: int
) -> AsyncIterator[MessageExt]:
    while begin < end:
        try:
            result = await consumer.pull(queue, begin, max_messages=PULL_MESSAGES, timeout_s=0.0)
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
