"""Consumer groups of which a new leader does not know yet whether it knows every member. Pure.

Consumers of RocketMQ's Java clients tell every broker of themselves, so a follower knows them
before it leads. Other clients tell the leader alone, again every 30 seconds. What a new leader
knows may thus be half of a group, and half a list makes the members share out queues that others
still have. So a group that was there before the reign settles for one period of heartbeats: its
list of members is not told, which clients take as "keep what you have", and nobody is woken for
what is no news. A group that is made during a reign has no member anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SETTLE_S: Final = 30.0
"""RocketMQ's clients and ours send a heartbeat this often."""


class SettlingGroups:
    """Who settles, and whom to wake when that is over."""

    def __init__(self) -> None:
        self._groups: frozenset[str] = frozenset()
        self._owed: dict[str, None] = {}
        self.until_s: float | None = None
        """When it is over; None when nobody settles."""

    def begin(self, now_s: float, groups: Iterable[str]) -> None:
        """A reign begins, and these groups were there before."""
        self._groups = frozenset(groups)
        self._owed.clear()
        self.until_s = now_s + SETTLE_S if self._groups else None

    def end(self) -> None:
        """The reign is over."""
        self._groups = frozenset()
        self._owed.clear()
        self.until_s = None

    def holds(self, group: str, now_s: float) -> bool:
        """Tell whether *group* settles; if so its members are owed a call when that is over."""
        if self.until_s is None or now_s >= self.until_s or group not in self._groups:
            return False
        self._owed[group] = None
        return True

    def take_owed(self, now_s: float) -> list[str]:
        """Return the groups to wake, once, when all have settled."""
        if self.until_s is None or now_s < self.until_s:
            return []
        owed = list(self._owed)
        self.end()
        return owed
