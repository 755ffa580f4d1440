"""Whom to ask for the entries that are damaged here: any member that has them, one at a time.

All replicas hold the same bytes at the same positions, so another member's copy of a committed
entry is the repair, whoever leads and in whatever term. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FETCH_BYTES: Final = 1 << 20
"""Entries in one answer, bytes; at least one entry goes."""

FETCH_ENTRIES_MAX: Final = 4096
"""Entries asked for at once: more than fit into an answer as a rule."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question: entries *first* … *last*, of member *peer*."""

    peer: str
    first: int
    last: int


@dataclass(slots=True)
class Repair:
    """One question is out at a time; who does not answer in time, or cannot help, is passed over.

    Args:
        retry_s: How long an answer is waited for.
    """

    retry_s: float
    asked: Ask | None = None
    asked_at_s: float = 0.0
    _turn: int = 0

    def next_ask(
        self, damaged: Sequence[tuple[int, int]], peers: Sequence[str], now_s: float
    ) -> Ask | None:
        """Return what to ask now; None while an answer is due, or nobody is there.

        Args:
            damaged: Runs of damaged entries, ascending.
            peers: Members that can be reached.
        """
        if self.asked is not None and now_s - self.asked_at_s < self.retry_s:
            return None
        if self.asked is not None:
            self._turn += 1
        self.asked = None
        if not damaged or not peers:
            return None
        first, last = damaged[0]
        last = min(last, first + FETCH_ENTRIES_MAX - 1)
        self.asked = Ask(peers[self._turn % len(peers)], first, last)
        self.asked_at_s = now_s
        return self.asked

    def expects(self, peer: str) -> bool:
        """Whether an answer of *peer* is waited for."""
        return self.asked is not None and self.asked.peer == peer

    def helped(self) -> None:
        """The answer was of use: the next question may follow at once, to the same member.

        Without it the next one goes to another member, when the time for this one is over.
        """
        self.asked = None
