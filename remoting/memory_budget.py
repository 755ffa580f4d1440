"""Memory for what connections hold: unfinished frames, requests in work and unsent answers. Pure.

One budget for all connections of a daemon. Each connection counts once per received or sent chunk,
never per message. When the budget is met, new requests are refused as busy, those of
administration and registration excepted, and the connection whose peer has left most unread gives
way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

from remoting.frame_room import FrameRoom
from remoting.protocol.frame import MAX_FRAME_BYTES

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

LOOK_EVERY_S: Final = 0.1
"""So that a look at all connections costs little while the budget stays met."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """How much memory connections may hold together.

    Attributes:
        total_bytes: Requests in work and unsent answers, bodies only.
        unfinished_bytes: Frames of which a part has come, beside it.
        max_frame_bytes: The largest frame.
    """

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
        frames: Space for unfinished frames.
        peer_frames: What unfinished frames of members hold, where a daemon has any: it counts
            against the budget, so that new requests are refused and members are not.
        used_bytes: Requests in work and unsent answers.
        is_met: Whether new requests are refused.
        refused: Requests refused because of it, since the start.
        given_way: Connections ended because of it, since the start.
    """

    def __init__(
        self, limits: BudgetLimits | None = None, *, peer_frames: FrameRoom | None = None
    ) -> None:
        """Make a budget of which nothing is used."""
        self.limits = limits if limits is not None else BudgetLimits()
        self.frames = FrameRoom(self.limits.unfinished_bytes, self.limits.max_frame_bytes)
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
            self._next_look_s = now_s + LOOK_EVERY_S
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
    """Return the budget of a process.

    Args:
        configured: Value of the setting; 0: none.
        memory_bytes: What the process may use.
    """
    return configured or memory_bytes // BUDGET_SHARE
