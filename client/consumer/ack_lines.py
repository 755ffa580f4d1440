"""Acknowledgements of one consumer: what is asked while a request is under way shares the next one.

::

    ack ─► line of a broker group and topic ─► request ─► each caller's own result
                     ▲                            │
                     └── those that came since ◄──┘

No acknowledgement waits for others to come: where none is under way it leaves at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.consumer.ack_batches import ACK_MESSAGES_MAX, Received
from dledger.client.consumer.pop_calls import PopCalls
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ReceiptStaleError,
    RequestTimedOutError,
    same_again,
)
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.pop_requests import ReceiptHandle

_SPENT: Final = "it was acknowledged at the same time with the same receipt, or was stale before"


@dataclass(slots=True, eq=False)
class _Ack:
    """One that its caller waits for."""

    receipt: Received
    deadline_s: float
    is_sent: bool = False
    error: MQError | None = None
    ended: trio.Event = field(default_factory=trio.Event)

    def end(self, error: MQError | None) -> None:
        """Let its caller go on; None: it is acknowledged."""
        self.error = error
        self.ended.set()


@dataclass(slots=True, eq=False)
class _Line:
    """Those of one broker group and topic: one refusal of rights is that of all of them."""

    waiting: deque[_Ack] = field(default_factory=deque)

    def take(self) -> list[_Ack]:
        """Take the next request's worth: a receipt that is in it already waits for the answer."""
        batch: dict[Received, _Ack] = {}
        again: list[_Ack] = []
        while self.waiting and len(batch) < ACK_MESSAGES_MAX:
            ack = self.waiting.popleft()
            if batch.setdefault(ack.receipt, ack) is not ack:
                again.append(ack)
        self.waiting.extendleft(reversed(again))
        for ack in batch.values():
            ack.is_sent = True
        return list(batch.values())

    def settle(self, batch: list[_Ack]) -> None:
        """End what waits with a receipt of *batch* that is spent now; it would only be refused."""
        spent = {ack.receipt for ack in batch if _is_spent(ack.error)}
        still: deque[_Ack] = deque()
        for ack in self.waiting:
            if ack.receipt in spent:
                ack.end(ReceiptStaleError(_SPENT, code=ResponseCode.NO_MESSAGE, remark=_SPENT))
            else:
                still.append(ack)
        self.waiting = still


def _is_spent(error: MQError | None) -> bool:
    return error is None or isinstance(error, ReceiptStaleError)


class AckLines:
    """The acknowledgements of one consumer that are under way."""

    def __init__(self, instance: ClientInstance, calls: PopCalls) -> None:
        """Send by *calls*, in tasks of *instance*."""
        self._instance = instance
        self._calls = calls
        self._lines: dict[tuple[str, str], _Line] = {}

    @property
    def is_idle(self) -> bool:
        """Whether none is under way."""
        return not self._lines

    async def ack(self, queue: MessageQueue, receipt: ReceiptHandle, *, timeout_s: float) -> None:
        """Acknowledge one message; returns when that is stored.

        Raises:
            ReceiptStaleError: It is not this consumer's any more; another one may have it, and it
                may have been acknowledged.
            RequestTimedOutError: It may be acknowledged or not, and comes again if not.
            RequestFailedError, BrokerUnreachableError, ClientClosedError: Not acknowledged.
        Cancellation: As a time-out.
        """
        place = queue.broker_name, queue.topic
        line = self._lines.get(place)
        if line is None:
            # One tick later: those that are asked for in this one go together.
            line = _Line()
            self._instance.nursery.start_soon(self._run, place, line)
            self._lines[place] = line
        ack = _Ack((queue, receipt), self._instance.clock.monotonic() + timeout_s)
        line.waiting.append(ack)
        try:
            with trio.move_on_after(timeout_s):
                await ack.ended.wait()
        finally:
            if not ack.is_sent and not ack.ended.is_set():
                line.waiting.remove(ack)
        if not ack.ended.is_set():
            raise _late(ack, timeout_s)
        if ack.error is not None:
            raise same_again(ack.error) from ack.error

    async def _run(self, place: tuple[str, str], line: _Line) -> None:
        """Send what waits, one request after the other.

        Cancellation: The client closes; callers get errors.
        """
        batch: list[_Ack] = []
        try:
            while batch := line.take():
                await self._send(batch)
                line.settle(batch)
        finally:
            del self._lines[place]
            for ack in (*batch, *line.waiting):
                ack.end(_closed(ack))
            line.waiting.clear()

    async def _send(self, batch: list[_Ack]) -> None:
        left_s = max(ack.deadline_s for ack in batch) - self._instance.clock.monotonic()
        errors: list[MQError | None]
        try:
            errors = await self._calls.ack_each(
                [ack.receipt for ack in batch], timeout_s=max(0.001, left_s)
            )
        except MQError as error:
            errors = [error] * len(batch)
        for ack, result in zip(batch, errors, strict=True):
            ack.end(result)


def _late(ack: _Ack, timeout_s: float) -> MQError:
    if ack.is_sent:
        return RequestTimedOutError(
            f"no answer within {timeout_s:g} s; it may be acknowledged, and comes again if not"
        )
    return BrokerUnreachableError(
        f"acknowledgements before it got no answer within {timeout_s:g} s; it was not sent, and the"
        " message comes again"
    )


def _closed(ack: _Ack) -> MQError:
    if ack.is_sent:
        return RequestTimedOutError(
            "the client was closed before the answer came; it may be acknowledged, and comes again"
            " if not"
        )
    return ClientClosedError("the client was closed; it was not sent, and the message comes again")
