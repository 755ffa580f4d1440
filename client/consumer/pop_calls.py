"""Requests of POP: receive from one broker group, acknowledge, change the invisible time.

What `SimpleConsumer` and a proxy are made of: nothing is kept here between two calls.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from client.consumer.pull_consumer import SUSPEND_MARGIN_S
from client.consumer.subscriptions import SubscriptionExpression
from client.core.client_instance import ClientInstance
from client.core.errors import (
    ClientError,
    DamagedAnswerError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
)
from client.core.links import Link
from client.core.message_ext import MessageExt
from client.core.route import MessageQueue
from commitlog.errors import CorruptRecordError, MQError
from commitlog.record import decode_record
from remoting.errors import BadRequestError
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand
from remoting.protocol.pop_requests import (
    INIT_MAX,
    INIT_MIN,
    MAX_BITS,
    MAX_REQUEST_BITS,
    AckMessageHeader,
    BatchAck,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    decode_start_offsets,
)
from remoting.protocol.receipt_handle import NORMAL_TOPIC, ReceiptHandle

ANY_QUEUE: Final = -1

ACK_MESSAGES_MAX: Final = 4_096
"""Messages that one request acknowledges: brokers refuse more."""

_NOTHING: Final = frozenset(
    {ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_FULL, ResponseCode.POLLING_TIMEOUT}
)


class ReceivedMessage(MessageExt):
    """A message that this consumer has for a time.

    Attributes:
        message_queue: Where it stands.
        receipt: What it is acknowledged with; `SimpleConsumer.change_invisible` puts a new one.
    """

    __slots__ = ("message_queue", "receipt")

    def __init__(
        self, view: memoryview, start: int, queue: MessageQueue, receipt: ReceiptHandle
    ) -> None:
        """Look at the record at byte *start* of *view*."""
        super().__init__(view, start, queue.broker_name)
        self.message_queue = queue
        self.receipt = receipt

    @property
    def delivery_attempt(self) -> int:
        """How often it was handed out, this time included."""
        return self.record.reconsume_times + 1


class PopCalls:
    """Requests of one consumer group."""

    def __init__(self, instance: ClientInstance, group: str) -> None:
        """Ask over the connections of *instance*."""
        self._instance = instance
        self._group = group

    async def pop(
        self,
        topic: str,
        broker_name: str,
        expression: SubscriptionExpression,
        *,
        max_messages: int,
        invisible_s: float,
        hold_s: float,
        from_end: bool = False,
        in_order: bool = False,
        attempt_id: str | None = None,
    ) -> list[ReceivedMessage]:
        """Return messages of *topic* from one broker group; an empty list after *hold_s*.

        Raises:
            RequestFailedError: Refused; see its code and remark.
            RequestTimedOutError, BrokerUnreachableError: No answer in time. Messages may be out
                and in no hands: they come again when their time is over.
        Cancellation: As a time-out.
        """
        header = PopMessageHeader(
            self._group,
            topic,
            ANY_QUEUE,
            max_messages,
            _ms(invisible_s),
            _ms(hold_s),
            self._instance.clock.wall_ms(),
            INIT_MAX if from_end else INIT_MIN,
            expression.kind,
            expression.text,
            in_order,
            attempt_id,
        )
        answer = await self._ask(
            RequestCode.POP_MESSAGE, dict(header.encode()), topic, broker_name, hold_s
        )
        if answer.code in _NOTHING:
            return []
        messages = _messages(_successful(answer), topic, broker_name)
        if not expression.tags:
            return messages
        # A broker compares hashes of tags: one of another tag is done with here.
        try:
            wanted = [message for message in messages if expression.admits(message)]
        except CorruptRecordError as error:
            raise DamagedAnswerError(f"messages of {topic} from {broker_name}: {error}") from error
        if len(wanted) < len(messages):
            # When that fails they come again, and are acknowledged then.
            with suppress(MQError):
                await self.ack_all([each for each in messages if not expression.admits(each)])
        return wanted

    async def has_messages(
        self,
        topic: str,
        broker_name: str,
        expression: SubscriptionExpression,
        *,
        hold_s: float,
        in_order: bool = False,
    ) -> bool:
        """Return whether a broker group has messages of *topic*, waiting up to *hold_s* for one."""
        header = NotificationHeader(
            self._group,
            topic,
            ANY_QUEUE,
            _ms(hold_s),
            self._instance.clock.wall_ms(),
            in_order,
            None,
            expression.kind,
            expression.text,
        )
        try:
            answer = await self._ask(
                RequestCode.NOTIFICATION, dict(header.encode()), topic, broker_name, hold_s
            )
        except (ClientError, MQError):
            return False  # the receive that follows shows it
        return str(answer.ext.get("hasMsg")).lower() == "true"

    async def ack(
        self, queue: MessageQueue, receipt: ReceiptHandle, *, timeout_s: float = 10.0
    ) -> None:
        """Acknowledge one message; returns when that is stored.

        Raises:
            ReceiptStaleError: It is not this consumer's any more; another one may have it, and it
                may have been acknowledged.
            RequestTimedOutError: It may be acknowledged or not, and comes again if not.
            RequestFailedError: Refused; not acknowledged.
        """
        header = AckMessageHeader(
            self._group, queue.topic, queue.queue_id, receipt.encode(), receipt.offset
        )
        await self._settle(RequestCode.ACK_MESSAGE, dict(header.encode()), queue, timeout_s)

    async def ack_all(
        self, messages: Sequence[ReceivedMessage], *, timeout_s: float = 10.0
    ) -> None:
        """Acknowledge *messages*, as many with one request as a broker takes.

        Raises:
            ReceiptStaleError: Some are not this consumer's any more; the others are acknowledged.
            RequestTimedOutError, RequestFailedError: As `ack`, for some of them; what was
                acknowledged before stays so.
        """
        stale: ReceiptStaleError | None = None
        for broker_name in {message.broker_name: None for message in messages}:
            mine = [message for message in messages if message.broker_name == broker_name]
            for acks in _ack_requests(self._group, mine):
                body = BatchAckMessageRequestBody(broker_name=broker_name, acks=acks).encode()
                queue = mine[0].message_queue
                try:
                    await self._settle(RequestCode.BATCH_ACK_MESSAGE, {}, queue, timeout_s, body)
                except ReceiptStaleError as error:
                    stale = stale or error
        if stale is not None:
            raise stale

    async def change_invisible(
        self,
        queue: MessageQueue,
        old: ReceiptHandle,
        invisible_s: float,
        *,
        timeout_s: float = 10.0,
    ) -> ReceiptHandle:
        """Keep a message for *invisible_s* from now on; return its receipt from then on.

        Raises:
            ReceiptStaleError, RequestTimedOutError, RequestFailedError: As `ack`.
        """
        header = ChangeInvisibleTimeHeader(
            self._group, queue.topic, queue.queue_id, old.encode(), old.offset, _ms(invisible_s)
        )
        answer = await self._settle(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME, dict(header.encode()), queue, timeout_s
        )
        new = ChangeInvisibleTimeResponseHeader.decode(answer.ext)
        return ReceiptHandle(
            old.offset,
            new.pop_time,
            new.invisible_time,
            new.revive_qid,
            queue.broker_name,
            queue.queue_id,
            old.offset,
            old.topic_flag,
        )

    async def _settle(
        self,
        code: RequestCode,
        ext: dict[str, str],
        queue: MessageQueue,
        timeout_s: float,
        body: bytes = b"",
    ) -> RemotingCommand:
        attempts = 0

        def count(_link: Link) -> int:
            nonlocal attempts
            attempts += 1
            return code

        answer = await self._instance.ask_leader(
            queue.broker_name,
            code,
            dict(ext),
            body,
            topic=queue.topic,
            timeout_s=timeout_s,
            adapt=count,
        )
        if answer.code == ResponseCode.NO_MESSAGE:
            remark = answer.remark or ""
            if attempts > 1:
                raise RequestTimedOutError(
                    f"an attempt before, whose answer is lost, may have done it: {remark}",
                    code=answer.code,
                    remark=remark,
                )
            raise ReceiptStaleError(remark or "the receipt is old", code=answer.code, remark=remark)
        return _successful(answer)

    async def _ask(
        self, code: RequestCode, ext: dict[str, str], topic: str, broker_name: str, hold_s: float
    ) -> RemotingCommand:
        return await self._instance.ask_leader(
            broker_name,
            code,
            dict(ext),
            topic=topic,
            timeout_s=hold_s + SUSPEND_MARGIN_S,
            attempt_timeout_s=hold_s + SUSPEND_MARGIN_S,
        )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _successful(answer: RemotingCommand) -> RemotingCommand:
    if answer.code != ResponseCode.SUCCESS:
        raise RequestFailedError(
            f"code {answer.code} {answer.remark or ''}",
            code=answer.code,
            remark=answer.remark or "",
        )
    return answer


def _messages(answer: RemotingCommand, topic: str, broker_name: str) -> list[ReceivedMessage]:
    """Return the messages of an answer, each with its receipt.

    Raises:
        DamagedAnswerError: They cannot be what was stored.
    """
    view = memoryview(answer.body)
    messages: list[ReceivedMessage] = []
    try:
        header = PopMessageResponseHeader.decode(answer.ext)
        starts = decode_start_offsets(header.start_offset_info or "")
        start = 0
        while start < view.nbytes:
            record = decode_record(view, start)
            queue = MessageQueue(topic, broker_name, record.queue_id)
            receipt = ReceiptHandle(
                starts.get((NORMAL_TOPIC, record.queue_id), record.queue_offset),
                header.pop_time,
                header.invisible_time,
                header.revive_qid,
                broker_name,
                record.queue_id,
                record.queue_offset,
            )
            messages.append(ReceivedMessage(view, start, queue, receipt))
            start += record.size
    except (CorruptRecordError, BadRequestError) as error:
        raise DamagedAnswerError(f"messages of {topic} from {broker_name}: {error}") from error
    return messages


def _ack_requests(group: str, messages: Sequence[ReceivedMessage]) -> Iterator[list[BatchAck]]:
    """Yield the items of one request after the other. Pure."""
    for first in range(0, len(messages), ACK_MESSAGES_MAX):
        request, bits = list[BatchAck](), 0
        for item in _batches(group, messages[first : first + ACK_MESSAGES_MAX]):
            if request and bits + item.bits > MAX_REQUEST_BITS:
                yield request
                request, bits = [], 0
            request.append(item)
            bits += item.bits
        yield request


def _batches(group: str, messages: Sequence[ReceivedMessage]) -> list[BatchAck]:
    grants: dict[tuple[str, int, int, int, int], list[int]] = {}
    for message in messages:
        receipt = message.receipt
        # With a filter the messages of one grant may stand far apart: one item spans few of them.
        distance = receipt.offset - receipt.start_offset
        key = (
            message.message_queue.topic,
            receipt.queue_id,
            receipt.revive_queue_id,
            receipt.pop_time_ms,
            receipt.start_offset + distance - distance % MAX_BITS,
        )
        grants.setdefault(key, []).append(receipt.offset)
    return [
        BatchAck(
            c=group,
            t=topic,
            so=start,
            q=queue_id,
            rq=revive,
            pt=popped,
            b=BatchAck.encode_offsets(start, offsets),
        )
        for (topic, queue_id, revive, popped, start), offsets in grants.items()
    ]
