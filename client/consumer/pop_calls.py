"""Requests of POP: receive from one broker group, acknowledge, change the invisible time.

What `SimpleConsumer` and a proxy are made of: nothing is kept here between two calls.

Spec: docs/internals/protocol/remoting.md, section 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from dledger.client.consumer.ack_batches import AckRequest, Received, ack_requests
from dledger.client.consumer.pull_consumer import SUSPEND_MARGIN_S
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    DamagedAnswerError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
    refusal,
)
from dledger.client.core.links import Link
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import CorruptRecordError, MQError
from dledger.commitlog.record import decode_record
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.own_fields import (
    FROM_NOW_FIELD,
    STALE_FIELD,
    UNSEEN_FIELD,
    decode_stale,
)
from dledger.remoting.protocol.pop_requests import (
    INIT_MAX,
    INIT_MIN,
    NORMAL_TOPIC,
    AckMessageHeader,
    BatchAckMessageRequestBody,
    ChangeInvisibleTimeHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationHeader,
    PopMessageHeader,
    PopMessageResponseHeader,
    ReceiptHandle,
    decode_start_offsets,
)

ANY_QUEUE: Final = -1

ROCKETMQ_MESSAGES_MAX: Final = 32
"""Messages of one receive: RocketMQ's brokers refuse a request for more, ours give up to 1,024."""

_NOTHING: Final = frozenset(
    {ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_FULL, ResponseCode.POLLING_TIMEOUT}
)


class _NamesNoneError(Exception):
    """The broker does not name the stale receipts of a batch."""

    def __init__(self, attempts: int) -> None:
        """Note how often another broker was asked before."""
        super().__init__()
        self.attempts = attempts


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

        Args:
            attempt_id: The same for each repetition of one receive, which gets what the first got.
        Raises:
            RequestFailedError: Refused; see its code and remark.
            RequestTimedOutError, BrokerUnreachableError: No answer in time, or none that states
                whether messages are out. They may be, in no hands: they come again when their time
                is over.
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
            attempt_id or f"{self._instance.rng.randrange(1 << 64):x}",
        )
        fields = dict(header.encode())
        if from_end:
            fields[FROM_NOW_FIELD] = "true"

        def bounded(link: Link) -> int:
            most = max_messages if link.cbor else min(max_messages, ROCKETMQ_MESSAGES_MAX)
            fields["maxMsgNums"] = str(most)
            return RequestCode.POP_MESSAGE

        answer = await self._ask(
            RequestCode.POP_MESSAGE, fields, topic, broker_name, hold_s, adapt=bounded
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
            mine = [
                (message.message_queue, message.receipt)
                for message in messages
                if message.broker_name == broker_name
            ]
            for request in ack_requests(self._group, mine):
                body = _body_of(request, broker_name)
                queue = mine[0][0]
                try:
                    await self._settle(RequestCode.BATCH_ACK_MESSAGE, {}, queue, timeout_s, body)
                except ReceiptStaleError as error:
                    stale = stale or error
        if stale is not None:
            raise stale

    async def ack_each(
        self, receipts: Sequence[Received], *, timeout_s: float = 10.0
    ) -> list[MQError | None]:
        """Acknowledge messages of one broker group; return the error of each, None: it is done.

        Raises RequestTimedOutError, RequestFailedError: as `ack`, for all of them.
        """
        if len(receipts) == 1:
            return await self._ack_singly(receipts, [0], timeout_s)
        deadline = self._instance.clock.monotonic() + timeout_s
        errors: list[MQError | None] = [None] * len(receipts)
        for request in ack_requests(self._group, receipts):
            left_s = max(0.001, deadline - self._instance.clock.monotonic())
            found = await self._ack_request(receipts, request, left_s)
            for place, error in zip(request.places, found, strict=True):
                errors[place] = error
        return errors

    async def _ack_request(
        self, receipts: Sequence[Received], request: AckRequest, timeout_s: float
    ) -> list[MQError | None]:
        """Return what went wrong with each message of *request*, in its order."""
        queue, _ = receipts[request.places[0]]
        deadline = self._instance.clock.monotonic() + timeout_s
        body = _body_of(request, queue.broker_name)
        try:
            answer, attempts = await self._asked_to_settle(
                RequestCode.BATCH_ACK_MESSAGE, {}, queue, timeout_s, body, by_name=True
            )
        except _NamesNoneError as unable:
            left_s = max(0.001, deadline - self._instance.clock.monotonic())
            return await self._ack_singly(receipts, request.places, left_s, unable.attempts)
        if answer.code != ResponseCode.NO_MESSAGE:
            _successful(answer, attempts)
            return [None] * len(request.places)
        try:
            stale = decode_stale(answer.ext.get(STALE_FIELD), len(request.places))
        except BadRequestError as error:
            raise RequestTimedOutError(
                f"an answer that cannot be read; each of them may be acknowledged: {error}",
                code=answer.code,
                remark=answer.remark or "",
            ) from error
        return [
            _not_out(attempts) if number in stale else None for number in range(len(request.places))
        ]

    async def _ack_singly(
        self,
        receipts: Sequence[Received],
        places: Sequence[int],
        timeout_s: float,
        attempts_before: int = 0,
    ) -> list[MQError | None]:
        errors: list[MQError | None] = [None] * len(places)

        async def acknowledge(number: int) -> None:
            queue, receipt = receipts[places[number]]
            try:
                await self.ack(queue, receipt, timeout_s=timeout_s)
            except ReceiptStaleError as error:
                errors[number] = _not_out(1 + attempts_before, error.remark)
            except MQError as error:
                errors[number] = error

        async with trio.open_nursery() as nursery:
            for number in range(len(places)):
                nursery.start_soon(acknowledge, number)
        return errors

    async def change_invisible(
        self,
        queue: MessageQueue,
        old: ReceiptHandle,
        invisible_s: float,
        *,
        timeout_s: float = 10.0,
        is_unseen: bool = False,
    ) -> ReceiptHandle:
        """Keep a message for *invisible_s* from now on; return its receipt from then on.

        With *is_unseen* no consumer got it: the grant is not counted as an attempt.

        Raises ReceiptStaleError, RequestTimedOutError, RequestFailedError: as `ack`.
        """
        header = ChangeInvisibleTimeHeader(
            self._group, queue.topic, queue.queue_id, old.encode(), old.offset, _ms(invisible_s)
        )
        fields = dict(header.encode())
        if is_unseen:
            fields[UNSEEN_FIELD] = "true"
        answer = await self._settle(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields, queue, timeout_s
        )
        try:
            new = ChangeInvisibleTimeResponseHeader.decode(answer.ext)
        except BadRequestError as error:
            raise RequestTimedOutError(
                f"the time is another one, and the new receipt cannot be read: {error}"
            ) from error
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
        answer, attempts = await self._asked_to_settle(code, ext, queue, timeout_s, body)
        if answer.code == ResponseCode.NO_MESSAGE:
            raise _not_out(attempts, answer.remark or "")
        return _successful(answer, attempts)

    async def _asked_to_settle(
        self,
        code: RequestCode,
        ext: dict[str, str],
        queue: MessageQueue,
        timeout_s: float,
        body: bytes = b"",
        *,
        by_name: bool = False,
    ) -> tuple[RemotingCommand, int]:
        """Return the answer, and how often was asked for it.

        Raises _NamesNoneError: it does not.
        """
        attempts = 0

        def count(link: Link) -> int:
            nonlocal attempts
            if by_name and not link.names_stale:
                raise _NamesNoneError(attempts)
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
        return answer, attempts

    async def _ask(
        self,
        code: RequestCode,
        ext: dict[str, str],
        topic: str,
        broker_name: str,
        hold_s: float,
        *,
        adapt: Callable[[Link], int] | None = None,
    ) -> RemotingCommand:
        return await self._instance.ask_leader(
            broker_name,
            code,
            ext,
            topic=topic,
            timeout_s=hold_s + SUSPEND_MARGIN_S,
            attempt_timeout_s=hold_s + SUSPEND_MARGIN_S,
            adapt=adapt,
        )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


_STALE: Final = (
    "the message is not out under this receipt: it was acknowledged, handed out again, or its"
    " receipt was changed"
)


def _body_of(request: AckRequest, broker_name: str) -> bytes:
    return BatchAckMessageRequestBody(broker_name=broker_name, acks=request.items).encode()


def _not_out(attempts: int, remark: str = "") -> RequestFailedError:
    """Return the error of a receipt that a broker calls stale at one attempt of several."""
    code = ResponseCode.NO_MESSAGE
    if attempts > 1:
        return RequestTimedOutError(
            f"an attempt before, whose answer is lost, may have done it: {remark or _STALE}",
            code=code,
            remark=remark,
        )
    return ReceiptStaleError(remark or _STALE, code=code, remark=remark)


def _successful(answer: RemotingCommand, attempts: int = 1) -> RemotingCommand:
    """Return *answer*, if what was asked for is done.

    Raises:
        RequestTimedOutError: It may be done: this answer states so, or it is not that of the first
            attempt.
        RequestFailedError: Refused.
    """
    if answer.code == ResponseCode.SUCCESS:
        return answer
    if attempts > 1:
        lost = "an attempt before, whose answer is lost, may have done it"
        raise refusal(lost, answer, RequestTimedOutError)
    raise refusal("refused", answer)


def _messages(answer: RemotingCommand, topic: str, broker_name: str) -> list[ReceivedMessage]:
    """Return the messages of an answer, each with its receipt.

    Raises DamagedAnswerError: they cannot be what was stored.
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
