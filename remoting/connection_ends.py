"""Why connections of a daemon ended: all are counted, a few of each kind are logged."""

from __future__ import annotations

from collections import Counter
from typing import Final

from remoting.log import get_logger

LINES_PER_WINDOW: Final = 20
"""Warnings of one kind in one window: enough to see the sender. A flood has thousands a second."""

WINDOW_S: Final = 10.0

QUIET_KINDS: Final = frozenset({"ended", "idle", "broken"})
"""What happens to every client: below the level that is shown."""

_log = get_logger(__name__)


class ConnectionEnds:
    """Counts the ends of connections by kind.

    Attributes:
        counts: Connections ended so far, by kind: the words before the colon of a reason.
    """

    def __init__(self) -> None:
        """Count from nothing."""
        self.counts: Counter[str] = Counter()
        # Of each kind of warning: when its window began, lines in it, and how many were left out.
        self._window_began_s: dict[str, float] = {}
        self._lines: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def note(self, peer: str, reason: str, now_s: float) -> None:
        """Count an end, and log it unless its kind was logged often enough lately.

        Args:
            reason: What happened, then perhaps a colon and details, which a peer may choose.
        """
        kind = reason.partition(":")[0]
        if kind.startswith("ended"):
            kind = "ended"
        self.counts[kind] += 1
        if kind in QUIET_KINDS:
            _log.debug("connection_ends", peer=peer, reason=reason)
            return
        if now_s - self._window_began_s.get(kind, -WINDOW_S) >= WINDOW_S:
            self._window_began_s[kind] = now_s
            self._lines[kind] = 0
        if self._lines[kind] >= LINES_PER_WINDOW:
            self._left_out[kind] += 1
            return
        self._lines[kind] += 1
        left_out = {"left_out": count} if (count := self._left_out.pop(kind, 0)) else {}
        _log.warning("connection_ends", peer=peer, reason=reason, **left_out)
