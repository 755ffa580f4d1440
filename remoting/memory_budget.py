"""Memory for what connections hold: unfinished frames, requests in work and unsent answers. Pure.

A frame that does not come in one piece takes space for all of it before it is read on. When there
is none its connection waits unread, and a frame that does not arrive as fast as it could gives way.

One budget for all connections of a daemon. Each connection counts once per received or sent chunk.
When the budget is met, new requests are refused as busy, those of administration and registration
excepted, and the connection whose peer has left most unread gives way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dledger.remoting.protocol.frame import MAX_FRAME_BYTES

# -------------------------------------------------------------------------------- unfinished frames


FREE_FRAME_BYTES: Final = 4 * 1024
"""Frames up to this size take no space: with all connections a server may have it is 16 MiB."""

SMALL_FRAME_BYTES: Final = 64 * 1024
"""Frames up to this size may take the part that is reserved for them."""

SMALL_SHARE: Final = 4
"""One part in this number is reserved for small frames: administration, heartbeats,
registrations."""

UNPROVEN_SHARE: Final = 4
"""Of what frames that wait hold, one part in this number may be of connections that never sent a
request."""

STALLED_S: Final = 0.5
"""A frame of which nothing came for so long gives way to one that waits: a sender that is given
time by its machine and its network sends on within a few round trips."""

YOUNG_S: Final = 2.0
"""A younger frame is never too slow: the start of a transfer shows little of its speed."""

SLOW_BYTES_PER_S: Final = 256 * 1024
"""A frame that arrives slower than this gives way to one that waits: 16 MiB take a minute then,
which is as long as a frame may take anyway."""

LOOK_EVERY_S: Final = 0.25
"""How often a frame that waits checks for one that comes too slowly."""

LOOKS_AT_ONCE: Final = 64
"""Where more frames wait each checks less often: together they check about 256 times a second."""


class FrameTicket:
    """The place of one connection: what its unfinished frame holds, or waits for.

    Attributes:
        is_proven: Whether a whole, valid request has come over the connection.
        held_bytes: Space it has; 0: none.
        wanted_bytes: Space it waits for; 0: it does not wait.
        waiting_bytes: Bytes of the frame that are in memory while it waits.
        received_bytes: Bytes that have come since it got its space.
    """

    __slots__ = (
        "address",
        "began_s",
        "give_way",
        "granted",
        "held_bytes",
        "is_proven",
        "progress_s",
        "received_bytes",
        "waiting_bytes",
        "wanted_bytes",
    )

    def __init__(self, address: str, give_way: Callable[[], None]) -> None:
        """Make a place that holds nothing."""
        self.address = address
        self.give_way = give_way
        self.granted: Callable[[], None] = lambda: None
        self.is_proven = False
        self.held_bytes = 0
        self.wanted_bytes = 0
        self.waiting_bytes = 0
        self.received_bytes = 0
        self.began_s = 0.0
        self.progress_s = 0.0

    def is_late(self, now_s: float) -> bool:
        """Tell whether the frame comes so slowly that one that waits goes before it."""
        if now_s - self.progress_s >= STALLED_S:
            return True
        age_s = now_s - self.began_s
        return age_s >= YOUNG_S and self.received_bytes < age_s * SLOW_BYTES_PER_S


class FrameSpace:
    """Space for unfinished frames.

    Attributes:
        waiting_bytes: Bytes in memory of frames that wait for space.
        given_way: Connections that were ended for another one's frame, since the start.
    """

    def __init__(self, limit_bytes: int, max_frame_bytes: int) -> None:
        """Make it empty.

        *limit_bytes*: of all unfinished frames; one of the largest fits in any case beside the part
        that is reserved for small ones.
        """
        reserved = max_frame_bytes // (SMALL_SHARE - 1) + SMALL_SHARE
        self.limit_bytes = max(limit_bytes, max_frame_bytes + reserved)
        self._large_limit_bytes = self.limit_bytes - self.limit_bytes // SMALL_SHARE
        self.max_waiting_bytes = self.limit_bytes
        self._max_unproven_waiting_bytes = self.limit_bytes // UNPROVEN_SHARE
        self.used_bytes = 0
        self.waiting_bytes = 0
        self._unproven_waiting_bytes = 0
        self.given_way = 0
        self._held_by: Counter[str] = Counter()
        self._next_look_s = 0.0
        # In the order in which they got space, and in which they began to wait.
        self._holders: dict[FrameTicket, None] = {}
        self._waiters: dict[FrameTicket, None] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether a frame waits for space."""
        return bool(self._waiters)

    @property
    def look_every_s(self) -> float:
        """How long one that waits does so before it calls `relieve`."""
        return LOOK_EVERY_S * (1 + len(self._waiters) // LOOKS_AT_ONCE)

    def take(self, ticket: FrameTicket, size: int, pending_bytes: int, now_s: float) -> bool:
        """Take space for a frame, or begin to wait for it; return whether it was taken.

        A ticket that waits gets its space by `granted`.
        """
        if self._fits(size) and not self._is_behind(ticket, size):
            self._grant(ticket, size, now_s)
            return True
        ticket.wanted_bytes = size
        ticket.waiting_bytes = pending_bytes
        self.waiting_bytes += pending_bytes
        if not ticket.is_proven:
            self._unproven_waiting_bytes += pending_bytes
        self._waiters[ticket] = None
        while (
            self.waiting_bytes > self.max_waiting_bytes
            or self._unproven_waiting_bytes > self._max_unproven_waiting_bytes
        ):
            self._end(self._first_to_go(self._waiters))
        return False

    def progress(self, ticket: FrameTicket, size: int, now_s: float) -> None:
        """Note that *size* bytes of a frame that has space have come."""
        ticket.progress_s = now_s
        ticket.received_bytes += size

    def leave(self, ticket: FrameTicket, now_s: float) -> None:
        """Give back what a connection has, and let those that wait have it. Idempotent."""
        self._forget(ticket)
        if self._waiters:
            self._grant_waiting(now_s)

    def relieve(self, now_s: float) -> None:
        """End frames that come too slowly while others wait; to be called again while some do."""
        if not self._waiters or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S / 2
        late = [ticket for ticket in self._holders if ticket.is_late(now_s)]
        wanted = self._next().wanted_bytes
        freed = self._limit_for(wanted) - self.used_bytes
        # Connections that never sent a request first, then the address that holds most, then the
        # oldest.
        late.sort(key=lambda ticket: (ticket.is_proven, -self._held_by[ticket.address]))
        for ticket in late:
            if freed >= wanted:
                break
            freed += ticket.held_bytes
            self._end(ticket)
        self._grant_waiting(now_s)

    def _fits(self, size: int) -> bool:
        return self.used_bytes + size <= self._limit_for(size)

    def _limit_for(self, size: int) -> int:
        return self.limit_bytes if size <= SMALL_FRAME_BYTES else self._large_limit_bytes

    def _is_behind(self, ticket: FrameTicket, size: int) -> bool:
        """Return whether another one goes first: else a large frame could wait without end."""
        if size <= SMALL_FRAME_BYTES or not self._waiters:
            return False
        return not ticket.is_proven or any(waiter.is_proven for waiter in self._waiters)

    def _grant(self, ticket: FrameTicket, size: int, now_s: float) -> None:
        ticket.held_bytes = size
        ticket.received_bytes = 0
        ticket.began_s = ticket.progress_s = now_s
        self.used_bytes += size
        self._held_by[ticket.address] += size
        self._holders[ticket] = None

    def _grant_waiting(self, now_s: float) -> None:
        while self._waiters:
            ticket = self._next()
            size = ticket.wanted_bytes
            if not self._fits(size):
                return
            self._forget(ticket)
            self._grant(ticket, size, now_s)
            ticket.granted()

    def _next(self) -> FrameTicket:
        """Return the next to get space: small, then of proven connections, then the least held."""

        def rank(one: FrameTicket) -> tuple[bool, bool, int]:
            is_large = one.wanted_bytes > SMALL_FRAME_BYTES
            return is_large, not one.is_proven, self._held_by[one.address]

        return min(self._waiters, key=rank)

    def _first_to_go(self, tickets: dict[FrameTicket, None]) -> FrameTicket:
        return min(tickets, key=lambda one: (one.is_proven, -self._held_by[one.address]))

    def _end(self, ticket: FrameTicket) -> None:
        self._forget(ticket)
        self.given_way += 1
        ticket.give_way()

    def _forget(self, ticket: FrameTicket) -> None:
        if ticket in self._waiters:
            del self._waiters[ticket]
            self.waiting_bytes -= ticket.waiting_bytes
            if not ticket.is_proven:
                self._unproven_waiting_bytes -= ticket.waiting_bytes
            ticket.wanted_bytes = ticket.waiting_bytes = 0
        if ticket in self._holders:
            del self._holders[ticket]
            self.used_bytes -= ticket.held_bytes
            held = self._held_by[ticket.address] - ticket.held_bytes
            if held:
                self._held_by[ticket.address] = held
            else:
                del self._held_by[ticket.address]
            ticket.held_bytes = 0


# ------------------------------------------------------------------------ all that connections hold


DEFAULT_TOTAL_BYTES: Final = 256 * 1024 * 1024
"""For a caller that does not know how much memory it may use."""

DEFAULT_UNFINISHED_BYTES: Final = 32 * 1024 * 1024
"""Unfinished frames of all connections: one of the largest, or six of 4 MiB, beside many small
ones. A frame is unfinished only while it arrives, so this bounds how many large ones arrive at the
same moment, not how many there are."""

BUDGET_SHARE: Final = 4
"""The budget is one part in this number of the memory that the process may use: the log's pages,
the tables and the interpreter have the rest."""

NOTED_BYTES: Final = 64 * 1024
"""A connection that holds less is never considered when one has to give way."""

UNREAD_S: Final = 1.0
"""A peer that has taken nothing of its answers for so long gives way when the budget is met."""

UNREAD_CHECK_EVERY_S: Final = 0.1
"""So that a look at all connections costs little while the budget stays met."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """How much memory connections may hold together."""

    total_bytes: int = DEFAULT_TOTAL_BYTES
    unfinished_bytes: int = DEFAULT_UNFINISHED_BYTES
    max_frame_bytes: int = MAX_FRAME_BYTES


class Holder(Protocol):
    """What a budget sees of a connection."""

    peer_address: tuple[str, int]

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that its peer has not taken."""

    def unread_for_s(self, now_s: float) -> float:
        """Return how long the peer has taken nothing of what waits for it; 0 when it takes."""

    def give_way(self, reason: str) -> None:
        """End the connection."""


class MemoryBudget:
    """What the connections of one daemon hold, and which one gives way.

    Attributes:
        peer_frames: What unfinished frames of members hold, where a daemon has any: it counts
            against the budget, so that new requests are refused and members are not.
        used_bytes: Requests in work and unsent answers.
        refused: Requests refused because of it, since the start.
    """

    def __init__(
        self, limits: BudgetLimits | None = None, *, peer_frames: FrameSpace | None = None
    ) -> None:
        """Make a budget of which nothing is used."""
        self.limits = limits if limits is not None else BudgetLimits()
        self.frames = FrameSpace(self.limits.unfinished_bytes, self.limits.max_frame_bytes)
        self.peer_frames = peer_frames
        self.used_bytes = 0
        self.is_met = False
        self.refused = 0
        self.given_way = 0
        self._holders: dict[Holder, int] = {}
        self._next_look_s = 0.0

    def count(self, holder: Holder, before: int, held: int, now_s: float) -> None:
        """Note that *holder* holds *held* bytes now, where it held *before*."""
        self.used_bytes += held - before
        if held >= NOTED_BYTES:
            self._holders[holder] = held
        elif before >= NOTED_BYTES:
            self._holders.pop(holder, None)
        self.is_met = self._counted_bytes >= self.limits.total_bytes
        if self.is_met and now_s >= self._next_look_s:
            self._next_look_s = now_s + UNREAD_CHECK_EVERY_S
            self._relieve(now_s)

    @property
    def _counted_bytes(self) -> int:
        return self.used_bytes + (self.peer_frames.used_bytes if self.peer_frames else 0)

    def _relieve(self, now_s: float) -> None:
        by_address: Counter[str] = Counter()
        for holder, held in self._holders.items():
            by_address[holder.peer_address[0]] += held
        unread = [one for one in self._holders if one.unread_for_s(now_s) >= UNREAD_S]
        unread.sort(key=lambda one: (by_address[one.peer_address[0]], one.unsent_bytes))
        excess = self._counted_bytes - self.limits.total_bytes
        while unread and excess >= 0:
            holder = unread.pop()
            excess -= holder.unsent_bytes
            self.given_way += 1
            holder.give_way("its unread answers hold memory that others need")


def budget_bytes(configured: int, memory_bytes: int) -> int:
    """Return the budget of a process."""
    return configured or memory_bytes // BUDGET_SHARE
