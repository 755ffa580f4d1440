"""ReceiveMessage, AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue: POP.

Receipt handles are those of the brokers, so a message that one proxy handed out is acknowledged
through any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

import trio
from google.protobuf.duration_pb2 import Duration

from dledger.client.consumer.ack_lines import AckLines
from dledger.client.consumer.pop_calls import PopCalls, ReceivedMessage
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ReceiptStaleError, RequestTimedOutError, refusal
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import (
    MAX_MESSAGE_BYTES,
    group_of,
    milliseconds,
    received_message,
    timestamp,
    topic_of,
)
from dledger.proxy.renewals import RenewalTable
from dledger.proxy.routes import BrokerConfigs
from dledger.proxy.status import OK, RefusedError, overall, status_of
from dledger.remoting.errors import BadRequestError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import ConsumerSendMsgBackHeader
from dledger.remoting.protocol.pop_requests import ReceiptHandle

INVISIBLE_MS: Final = 60_000
"""For how long a message is a client's that names no time; RocketMQ's."""

INVISIBLE_MS_MAX: Final = 12 * 3_600_000
"""What brokers grant at most."""

GIVEN_BACK_MS: Final = 1
"""What reached no client comes again at once; brokers take no shorter time."""

GIVE_BACK_S: Final = 60.0
"""How long brokers are asked to take back what one receive got: longer than an election takes."""

GIVE_BACK_AT_ONCE_MAX: Final = 8
"""Of its messages at a time: a broker writes them in one entry, and each asks for a leader."""

REFUSED_MS: Final = 1_000
"""For how long a message is kept that a client wants to have for no time: a listener that fails at
once must not use up all its attempts in a moment."""

LONG_POLLING_MS: Final = 20_000
"""How long a receive of a client waits that names no time."""

LONG_POLLING_MS_MAX: Final = 60_000

BATCH_SIZE: Final = 32
"""Messages of one receive that names no number."""

BATCH_SIZE_MAX: Final = 1_024

ACKS_MAX: Final = 1_024
"""Entries of one AckMessage."""

LINES_MAX: Final = 1_000
"""Consumer groups whose lines of acknowledgements are kept while none is under way."""

BODIES_BYTES_MAX: Final = MAX_MESSAGE_BYTES
"""Of the bodies of one receive or pull, decompressed, but one message in any case: what a broker
answers may be a thousand times as large then."""

QUEUE_ID_MAX: Final = (1 << 31) - 1
OFFSET_MAX: Final = (1 << 63) - 1
"""Of a receipt; brokers' requests hold no greater ones."""

READER_GROUP: Final = "DLEDGER_PROXY"
"""Reads messages that are to become dead letters: pulls of a group that pops are refused."""

TO_DEAD_LETTERS: Final = -1
"""The delay level that makes a message a dead letter at once."""

_log = get_logger(__name__)


def wanted_by(expression: pb.FilterExpression) -> SubscriptionExpression:
    """Return *expression* for brokers.

    Raises:
        SubscriptionIllegalError: It is none.
        RefusedError: Its type is not known.
    """
    if expression.type == pb.SQL:
        return SubscriptionExpression.by_sql(expression.expression)
    if expression.type not in (pb.TAG, pb.FILTER_TYPE_UNSPECIFIED):
        raise RefusedError(pb.BAD_REQUEST, f"no filter has the type {expression.type}")
    return SubscriptionExpression.by_tag(expression.expression)


def batch_size_of(asked: int, default: int, most: int) -> int:
    """Return how many messages a client gets at most.

    Raises RefusedError: it asks for fewer than none.
    """
    if asked < 0:
        raise RefusedError(pb.BAD_REQUEST, f"a batch size of {asked}")
    return min(asked or default, most)


def kept_ms_of(length: Duration) -> int:
    """Return for how long a message is kept that is given another time.

    Raises RefusedError: it is no time that brokers grant.
    """
    return _granted_ms(length, 0) or REFUSED_MS


def invisible_ms_of(request: pb.ReceiveMessageRequest) -> int:
    """Return for how long the messages are the client's.

    Raises RefusedError: it is no time that brokers grant.
    """
    if request.auto_renew or not request.HasField("invisible_duration"):
        return INVISIBLE_MS
    return _granted_ms(request.invisible_duration, 1)


def _granted_ms(length: Duration, least_ms: int) -> int:
    asked = milliseconds(length)
    if not least_ms <= asked <= INVISIBLE_MS_MAX:
        raise RefusedError(
            pb.ILLEGAL_INVISIBLE_TIME, f"an invisible time of {asked} ms; at most 12 hours"
        )
    return asked


def hold_s_of(request: pb.ReceiveMessageRequest, caller: Caller) -> float:
    """Return how long a receive waits for messages."""
    asked_ms = LONG_POLLING_MS
    if request.HasField("long_polling_timeout"):
        asked_ms = max(0, min(milliseconds(request.long_polling_timeout), LONG_POLLING_MS_MAX))
    return caller.timeout_s(asked_ms / 1000)


def receipt_of(text: str) -> ReceiptHandle:
    """Return the receipt a client shows. Raises RefusedError: it is none."""
    try:
        receipt = ReceiptHandle.decode(text)
    except BadRequestError as error:
        raise RefusedError(pb.INVALID_RECEIPT_HANDLE, str(error)) from error
    if not (0 <= receipt.queue_id <= QUEUE_ID_MAX and 0 <= receipt.offset <= OFFSET_MAX):
        raise RefusedError(pb.INVALID_RECEIPT_HANDLE, "the receipt is of no place in a queue")
    return receipt


def _nothing() -> list[pb.ReceiveMessageResponse]:
    status = pb.Status(code=pb.MESSAGE_NOT_FOUND, message="no new message")
    return [pb.ReceiveMessageResponse(status=status)]


class Returned(NamedTuple):
    """A message that goes back, in how many seconds it comes again, and whether no client got it.

    What was written to a client may have been seen, even if the call ended badly.
    """

    message: ReceivedMessage
    after_s: float
    is_unseen: bool = True


class Receives:
    """Receives and acknowledges for all consumers of a proxy."""

    def __init__(
        self, instance: ClientInstance, configs: BrokerConfigs, renewals: RenewalTable
    ) -> None:
        """Ask over the connections of *instance*."""
        self._instance = instance
        self._configs = configs
        self._renewals = renewals
        self._ack_lines: dict[str, AckLines] = {}

    # ------------------------------------------------------------------------------ receive

    async def receive(
        self,
        request: pb.ReceiveMessageRequest,
        caller: Caller,
        note: Callable[[ReceivedMessage], None] | None = None,
        unseen: list[Returned] | None = None,
    ) -> list[pb.ReceiveMessageResponse]:
        """Return the answers of one receive: a status, messages, the time of delivery.

        A message that cannot be read, or carried, is left out: it comes again in its time, and
        becomes a dead letter after its attempts as any other. When it is all there is, the status
        states it. *note* is called with each message that the client gets; to *unseen* come those
        behind `BODIES_BYTES_MAX`, to be given back.

        Raises ClientError: as `PopCalls.pop`. Messages may be out and in no hands: they come again.
        """
        topic, group = topic_of(request.message_queue.topic), group_of(request.group)
        invisible_ms = invisible_ms_of(request)
        expression = wanted_by(request.filter_expression)
        batch_size = batch_size_of(request.batch_size, BATCH_SIZE, BATCH_SIZE_MAX)
        config = await self._configs.group(group, topic)
        broker_name = request.message_queue.broker.name
        if not broker_name:
            queues = (await self._configs.route(topic)).subscribe_queues
            if not queues:
                raise RefusedError(pb.FORBIDDEN, f"no queue of {topic} is readable")
            broker_name = queues[0].broker_name
        else:
            await self._configs.find_broker(topic, broker_name, pb.BAD_REQUEST)
        found = await PopCalls(self._instance, group).pop(
            topic,
            broker_name,
            expression,
            max_messages=batch_size,
            invisible_s=invisible_ms / 1000,
            hold_s=hold_s_of(request, caller),
            in_order=config.consume_message_orderly,
            attempt_id=request.attempt_id or None,
        )
        if not found:
            return _nothing()
        answers = [pb.ReceiveMessageResponse(status=OK)]
        unreadable: MQError | None = None
        bodies_bytes = 0
        for place, message in enumerate(found):
            try:
                wire = received_message(
                    message,
                    request.message_queue.topic,
                    receipt=message.receipt.encode(),
                    invisible_ms=invisible_ms,
                )
            except CorruptRecordError as error:
                _log.warning(
                    "message_unreadable",
                    queue=str(message.message_queue),
                    offset=message.queue_offset,
                    group=group,
                    error=str(error),
                )
                unreadable = error
                continue
            bodies_bytes += len(wire.body)
            if bodies_bytes > BODIES_BYTES_MAX and len(answers) > 1:
                if unseen is not None:
                    unseen.extend(Returned(each, 0.0) for each in found[place:])
                break
            answers.append(pb.ReceiveMessageResponse(message=wire))
            if request.auto_renew:
                self._renewals.add(
                    caller.name,
                    group,
                    message.message_queue,
                    message.receipt,
                    self._instance.clock.monotonic(),
                )
            if note is not None:
                note(message)
        if len(answers) == 1 and unreadable is not None:
            return [pb.ReceiveMessageResponse(status=status_of(unreadable))]
        now = timestamp(self._instance.clock.wall_ms())
        answers.append(pb.ReceiveMessageResponse(delivery_timestamp=now))
        return answers

    async def give_back(self, group: str, messages: list[Returned]) -> None:
        """Let messages that reached no client come again; at the latest in their time.

        *messages* is emptied, so that what is held meanwhile are receipts, and no bodies.
        """
        receipts: list[tuple[MessageQueue, ReceiptHandle, float, bool]] = []
        for message, after_s, is_unseen in messages:
            # All of them now: a renewal that comes between would make a receipt another one.
            shown = message.receipt.encode()
            renewal = self._renewals.get(group, shown)
            self._renewals.remove(group, shown)
            newest = message.receipt if renewal is None else renewal.receipt
            receipts.append((message.message_queue, newest, after_s, is_unseen))
        messages.clear()
        calls, waiting = PopCalls(self._instance, group), iter(receipts)

        async def give_some_back() -> None:
            for queue, receipt, after_s, is_unseen in waiting:
                with suppress(MQError):
                    await calls.change_invisible(
                        queue,
                        receipt,
                        max(GIVEN_BACK_MS / 1000, after_s),
                        timeout_s=GIVE_BACK_S,
                        is_unseen=is_unseen,
                    )

        with self._instance.clock.time_out(GIVE_BACK_S):
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(receipts), GIVE_BACK_AT_ONCE_MAX)):
                    nursery.start_soon(give_some_back)

    # ------------------------------------------------------------------------------ acknowledge

    async def ack(self, request: pb.AckMessageRequest, caller: Caller) -> pb.AckMessageResponse:
        """Acknowledge each entry; each has a status of its own.

        Raises RefusedError: there is no entry, or too many.
        """
        topic, group = topic_of(request.topic), group_of(request.group)
        if not 0 < len(request.entries) <= ACKS_MAX:
            raise RefusedError(pb.BAD_REQUEST, f"from 1 to {ACKS_MAX} entries")
        await self._instance.route(topic)
        lines = self._lines_of(group)
        statuses = [OK for _ in request.entries]

        async def ack(place: int) -> None:
            try:
                async with self._shown(topic, group, request.entries[place].receipt_handle) as it:
                    await lines.ack(*it, timeout_s=caller.timeout_s())
            except MQError as error:
                statuses[place] = status_of(error)

        if len(statuses) == 1:
            await ack(0)
        else:
            async with trio.open_nursery() as nursery:
                for place in range(len(statuses)):
                    nursery.start_soon(ack, place)
        entries = [
            pb.AckMessageResultEntry(
                message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status
            )
            for entry, status in zip(request.entries, statuses, strict=True)
        ]
        return pb.AckMessageResponse(status=overall(statuses), entries=entries)

    def _lines_of(self, group: str) -> AckLines:
        """Return the line in which acknowledgements of all clients of *group* share requests."""
        lines = self._ack_lines.get(group)
        if lines is None:
            if len(self._ack_lines) >= LINES_MAX:
                kept = {name: each for name, each in self._ack_lines.items() if not each.is_idle}
                self._ack_lines = kept
            calls = PopCalls(self._instance, group)
            lines = self._ack_lines[group] = AckLines(self._instance, calls)
        return lines

    async def change_invisible(
        self, request: pb.ChangeInvisibleDurationRequest, caller: Caller
    ) -> pb.ChangeInvisibleDurationResponse:
        """Change for how long a message is the client's; its receipt is another one then.

        Raises RefusedError, ClientError: it is as it was, or that is unknown.
        """
        topic, group = topic_of(request.topic), group_of(request.group)
        kept_s = kept_ms_of(request.invisible_duration) / 1000
        await self._instance.route(topic)
        async with self._shown(topic, group, request.receipt_handle) as (queue, receipt):
            new = await PopCalls(self._instance, group).change_invisible(
                queue, receipt, kept_s, timeout_s=caller.timeout_s()
            )
        return pb.ChangeInvisibleDurationResponse(status=OK, receipt_handle=new.encode())

    @asynccontextmanager
    async def _shown(
        self, topic: str, group: str, shown: str
    ) -> AsyncIterator[tuple[MessageQueue, ReceiptHandle]]:
        """Yield queue and newest receipt of the message that a client shows the receipt of.

        When the block ends without an error the message is renewed no more.

        Raises RefusedError: it is no receipt, is of another topic, or names no broker group.
        """
        renewal = self._renewals.get(group, shown)
        if renewal is None:
            receipt = receipt_of(shown)
            await self._configs.find_broker(topic, receipt.broker_name, pb.INVALID_RECEIPT_HANDLE)
            yield MessageQueue(topic, receipt.broker_name, receipt.queue_id), receipt
            return
        if renewal.queue.topic != topic:
            # The account of the call was checked for the topic that the call names.
            raise RefusedError(
                pb.INVALID_RECEIPT_HANDLE, f"the receipt is of no message of {topic}"
            )
        async with renewal.lock:
            yield renewal.queue, renewal.receipt
            self._renewals.remove(group, shown)

    # ------------------------------------------------------------------------------ dead letters

    async def forward_to_dead_letters(
        self, request: pb.ForwardMessageToDeadLetterQueueRequest, caller: Caller
    ) -> pb.ForwardMessageToDeadLetterQueueResponse:
        """Store a copy as a dead letter, then acknowledge the message.

        First the message is made sure to be the client's still. When the last step fails the
        message comes again, and its copy is there already: no error states that there is none then.

        Raises:
            RequestTimedOutError: A copy may be stored.
            RefusedError, ClientError: No copy is stored.
        """
        topic, group = topic_of(request.topic), group_of(request.group)
        await self._instance.route(topic)
        async with self._shown(topic, group, request.receipt_handle) as (queue, receipt):
            calls = PopCalls(self._instance, group)
            newest = await calls.change_invisible(
                queue, receipt, INVISIBLE_MS / 1000, timeout_s=caller.timeout_s()
            )
            renewal = self._renewals.get(group, request.receipt_handle)
            if renewal is not None:
                # Should a later step fail, the client tries again with the receipt it has.
                renewal.receipt = newest
            await self._store_dead_letter(request, caller, queue, newest)
            try:
                await calls.ack(queue, newest, timeout_s=caller.timeout_s())
            except MQError as error:
                raise RequestTimedOutError(
                    f"a dead letter, and not acknowledged: {error}"
                ) from error
        return pb.ForwardMessageToDeadLetterQueueResponse(status=OK)

    async def _store_dead_letter(
        self,
        request: pb.ForwardMessageToDeadLetterQueueRequest,
        caller: Caller,
        queue: MessageQueue,
        receipt: ReceiptHandle,
    ) -> None:
        group = group_of(request.group)
        message = await self._stored(group, queue, receipt.offset)
        header = ConsumerSendMsgBackHeader(
            offset=message.phy_offset,
            group=group,
            delay_level=TO_DEAD_LETTERS,
            origin_msg_id=message.message_id,
            origin_topic=queue.topic,
            unit_mode=False,
            max_reconsume_times=max(0, request.max_delivery_attempts - 1),
        )
        answer = await self._instance.ask_leader(
            queue.broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            dict(header.encode()),
            topic=queue.topic,
            timeout_s=caller.timeout_s(),
            changes=True,
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refusal("the dead letter is refused", answer)

    async def _stored(self, group: str, queue: MessageQueue, offset: int) -> MessageExt:
        """Return the message at *offset*, whichever consumer has it.

        Raises ReceiptStaleError: it is not there any more.
        """
        reader = PullConsumer(self._instance, READER_GROUP)
        found = await reader.pull(queue, offset, max_messages=1, timeout_s=0)
        for message in found.messages:
            if message.queue_offset == offset:
                return message
        raise ReceiptStaleError(f"{queue} has no message at {offset} for {group}")
