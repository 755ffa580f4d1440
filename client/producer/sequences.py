"""Sequences of a producer with an id: which request goes under which, and when it may leave.

Each request gets the next sequence and is repeated under it until its outcome is known or no send
waits for it any more. While one is being repeated nothing later leaves, and of two the earlier one
goes first: so the broker meets them in order, and the order of sends is kept. Where a session is
lost nothing leaves until all its requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from dledger.client.core.errors import BrokerUnreachableError
from dledger.client.core.links import Link
from dledger.client.core.retry import RetryPolicy, RetrySchedule
from dledger.remoting.errors import RemotingError
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.own_fields import (
    EPOCH_FIELD,
    ID_FIELD,
    OPEN_SEQUENCES_MAX,
    ProducerStamp,
)


class RefusedError(Exception):
    """A broker refused a whole request."""

    def __init__(self, answer: RemotingCommand) -> None:
        super().__init__(answer.remark)
        self.answer = answer


class OpenRefusedError(RefusedError):
    """A broker opened no session."""


class SessionLeftError(Exception):
    """The session was left before a request of the line had a sequence; nothing was sent."""


@dataclass(eq=False, repr=False, slots=True)
class ProducerSession:
    """An open session: the sequences given out in one epoch."""

    producer_id: bytes
    epoch: int
    _next: int = 0
    _open: dict[int, None] = field(default_factory=dict)
    _repeating: set[int] = field(default_factory=set)
    _turns: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    @property
    def first_open(self) -> int:
        """Lowest sequence whose outcome is not known; the next one when there is none."""
        return next(iter(self._open), self._next)

    async def wait_while_full(self) -> None:
        """Return when `begin` may be called: at once, unless something is being repeated.

        Nothing happens between the return and the caller's next checkpoint.
        """
        while self.is_full:
            await self._turns.park()

    @property
    def is_full(self) -> bool:
        """Whether no further request may leave now."""
        return bool(self._repeating) or self._next - self.first_open >= OPEN_SEQUENCES_MAX

    def begin(self) -> int:
        """Return the sequence of a request that leaves now."""
        sequence = self._next
        self._next += 1
        self._open[sequence] = None
        return sequence

    def hold(self, sequence: int) -> None:
        """Let nothing later leave: *sequence* is going to be repeated."""
        self._repeating.add(sequence)

    async def turn(self, sequence: int) -> None:
        """Return when all before *sequence* is settled."""
        while self.first_open != sequence:
            await self._turns.park()

    def settle(self, sequence: int) -> None:
        """End *sequence*, whatever its outcome: it is not sent any more. Idempotent."""
        self._open.pop(sequence, None)
        self._repeating.discard(sequence)
        self._turns.unpark_all()

    @property
    def has_open(self) -> bool:
        """Whether requests under it are not settled."""
        return bool(self._open)

    async def drained(self) -> None:
        """Return when no request under it is open."""
        while self._open:
            await self._turns.park()

    def stamp(self, sequence: int) -> ProducerStamp:
        """Return what goes with the request *sequence* now."""
        return ProducerStamp(self.producer_id, self.epoch, sequence, self.first_open)


@dataclass(slots=True)
class HeldSend:
    """A request under a sequence.

    *sent*: an attempt ended without an answer: it may be stored, or still be on its way. Then the
    request is repeated as it is and nothing else is done with its messages.
    """

    session: ProducerSession
    sequence: int
    schedule: RetrySchedule
    sent: bool = False

    @property
    def stamp(self) -> ProducerStamp:
        """What goes with it now."""
        return self.session.stamp(self.sequence)

    def settle(self) -> None:
        """Give the sequence up or back: see `ProducerSession.settle`."""
        self.session.settle(self.sequence)


@dataclass(eq=False, repr=False, slots=True)
class Sequences:
    """The sessions of one producer in one broker group, one after the other.

    *_producer_id*: What brokers know the producer by; drawn when its first session is opened.
    """

    _producer_id: Callable[[], bytes]
    _session: ProducerSession | None = None
    _left: list[ProducerSession] = field(default_factory=list)
    _left_epoch: int = 0
    _opening: trio.Lock = field(default_factory=trio.Lock)

    @property
    def is_draining(self) -> bool:
        """Whether requests of a session that was left are open: each may come back to the line."""
        if self._left:
            self._left = [session for session in self._left if session.has_open]
        return bool(self._left)

    async def drained(self) -> None:
        """Return when no request of a session that was left is open."""
        while self.is_draining:
            await self._left[0].drained()

    async def enter(
        self, link: Link, timeout_s: float, schedule: RetrySchedule, *, is_alone: bool = False
    ) -> HeldSend:
        """Return the next sequence when it may leave, in a session that is opened if need be.

        Raises:
            OpenRefusedError, BrokerUnreachableError: There is no session; nothing was sent.
            SessionLeftError: What was sent before comes back to the line: it belongs there, too.
        """
        while is_alone or not self.is_draining:
            session = self._session
            if session is None:
                session = await self._open(link, timeout_s)
            await session.wait_while_full()
            if session is self._session:
                return HeldSend(session, session.begin(), schedule)
            if not is_alone:
                break
        raise SessionLeftError

    def enter_nowait(self, policy: RetryPolicy, deadline: float) -> HeldSend | None:
        """Return the next sequence; None when `enter` would wait."""
        session = self._session
        if session is None or session.is_full:
            return None
        return HeldSend(session, session.begin(), RetrySchedule(policy, deadline))

    def leave(self, session: ProducerSession) -> None:
        """Open another session for the next request, if *session* is the one in use."""
        if self._session is session:
            self._session = None
            self._left.append(session)
            self._left_epoch = session.epoch

    async def _open(self, link: Link, timeout_s: float) -> ProducerSession:
        # The wait for others counts: they may ask a broker that does not lead any more.
        with trio.move_on_after(timeout_s):
            async with self._opening:
                if self._session is not None:
                    return self._session
                producer_id = self._producer_id()
                command = request(
                    RequestCode.OPEN_PRODUCER,
                    {ID_FIELD: producer_id.hex(), EPOCH_FIELD: str(self._left_epoch)},
                    serialize=link.serialize,
                )
                try:
                    answer = await link.connection.invoke(command, timeout_s)
                    if answer.code != ResponseCode.SUCCESS:
                        raise OpenRefusedError(answer)
                    epoch = whole_number(answer.ext[EPOCH_FIELD])
                except (RemotingError, KeyError, ValueError) as error:
                    raise BrokerUnreachableError(
                        f"broker {link.address} opened no session: {error}"
                    ) from error
                session = self._session = ProducerSession(producer_id, epoch)
                return session
        raise BrokerUnreachableError(
            f"broker {link.address} opened no session within {timeout_s} s"
        )
