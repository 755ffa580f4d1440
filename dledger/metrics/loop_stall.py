"""How long one turn of the event loop took: for so long nothing else ran, heartbeats included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

STALL_S: Final = 0.05
"""A turn above it is counted: half of the interval between two heartbeats."""

SLOT_S: Final = 1.0
SLOTS: Final = 60
"""The longest turn of each second is kept for a minute, so that a scrape every minute sees each."""

NOW_S: Final = 5.0
"""What a status answer calls now: tools ask every second."""


class LoopStall(trio.abc.Instrument):
    """Measures the turns of the event loop it is put into: two calls of its clock a turn.

    Attributes:
        longest_s: Since the start.
        stalls: How many turns took more than `STALL_S`.
    """

    def __init__(self) -> None:
        self._now_s: Callable[[], float] = trio.current_time
        self._began_s: float | None = None
        self._slots: deque[tuple[float, float]] = deque(maxlen=SLOTS)
        # A turn that took no longer than the longest of a second that goes on changes nothing.
        self._slot_end_s = self._slot_longest_s = 0.0
        self.longest_s = 0.0
        self.stalls = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the loop of this task while the block runs."""
        # The same clock without the two calls that find it.
        self._now_s = trio.lowlevel.current_clock().current_time
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self._began_s = self._now_s()

    def before_io_wait(self, timeout: float) -> None:
        """Note that a turn has ended."""
        began_s = self._began_s
        if began_s is not None:
            now_s = self._now_s()
            if now_s - began_s > self._slot_longest_s or now_s >= self._slot_end_s:
                self.note(now_s - began_s, now_s)

    def note(self, took_s: float, now_s: float) -> None:
        """Count a turn of *took_s* that ended at *now_s*, seconds of the monotonic clock."""
        slots = self._slots
        if now_s >= self._slot_end_s:
            slots.append((now_s, took_s))
            self._slot_end_s = now_s + SLOT_S
        elif took_s > slots[-1][1]:
            slots[-1] = (slots[-1][0], took_s)
        # Turns that count as stalls are all counted, whatever the longest of this second was.
        self._slot_longest_s = min(slots[-1][1], STALL_S)
        if took_s > STALL_S:
            self.stalls += 1
        if took_s > self.longest_s:
            self.longest_s = took_s

    def recent_s(self, span_s: float = SLOT_S * SLOTS) -> float:
        """Return the longest turn of the last minute, or of the last *span_s* seconds."""
        if not self._slots:
            return 0.0
        since = self._now_s() - span_s
        return max((took for began, took in self._slots if began >= since), default=0.0)

    def status(self) -> dict[str, float]:
        """Return what a status answer shows of it."""
        return {
            "longest_ms": round(self.longest_s * 1000, 3),
            "last_minute_ms": round(self.recent_s() * 1000, 3),
            "now_ms": round(self.recent_s(NOW_S) * 1000, 3),
            "stalls": self.stalls,
        }
