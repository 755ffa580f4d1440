"""The sequences of one producer in one broker group. Sans-IO, but for whose turn it is.

Each request to the group gets the next sequence and is repeated under it until its outcome is
known or nobody waits for it any more. While one is being repeated nothing later leaves, and of two
the earlier one goes first: so the broker meets them in order, and the order of sends is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from client.core.retry import RetrySchedule
from remoting.protocol.producer_stamp import OPEN_SEQUENCES_MAX, ProducerStamp


class ProducerSession:
    """An open session: the sequences given out in one epoch."""

    __slots__ = ("_next", "_open", "_repeating", "_turns", "epoch", "producer_id")

    def __init__(self, producer_id: bytes, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self._next = 0
        self._open: dict[int, None] = {}
        self._repeating: set[int] = set()
        self._turns = trio.lowlevel.ParkingLot()

    @property
    def first_open(self) -> int:
        """Lowest sequence whose outcome is not known; the next one when there is none."""
        return next(iter(self._open), self._next)

    async def room(self) -> None:
        """Return when `begin` may be called: at once, unless something is being repeated.

        Nothing happens between the return and the caller's next checkpoint.
        """
        while self._repeating or self._next - self.first_open >= OPEN_SEQUENCES_MAX:
            await self._turns.park()

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
        """Say that *sequence* will not be sent any more, whatever became of it. Idempotent."""
        self._open.pop(sequence, None)
        self._repeating.discard(sequence)
        self._turns.unpark_all()

    def stamp(self, sequence: int) -> ProducerStamp:
        """Return what goes with the request *sequence* now."""
        return ProducerStamp(self.producer_id, self.epoch, sequence, self.first_open)


@dataclass(slots=True)
class HeldSend:
    """A request under a sequence.

    Attributes:
        sent: An attempt ended without an answer: it may be stored, or still be on its way. Then
            the request is repeated as it is and nothing else is done with its messages.
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


DrawId = Callable[[], bytes]
"""Returns the producer's id, drawn at the first call."""
