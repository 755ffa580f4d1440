"""Which waiting message is due next: offsets in the order of their times. Pure.

What is far away lies in a bucket for each hour, in compact arrays; the hours that have come are
sorted into seconds. A leader makes it again from the timer queue when its term begins.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

HOUR_MS: Final = 3_600_000
SECOND_MS: Final = 1000

Offsets = npt.NDArray[np.int64]


class TimerIndex:
    """Offsets by time: 12 bytes for each that is hours away, 8 for each in a near second.

    What was recalled stays until its time has come: code that takes an offset asks whether it
    still waits.
    """

    def __init__(self) -> None:
        self._far: dict[int, list[tuple[Offsets, npt.NDArray[np.uint32]]]] = {}
        self._near: dict[int, array[int]] = {}
        self._seconds: list[int] = []
        self._opened_hour = -1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, offsets: Offsets, due_ms: Offsets) -> None:
        """Take in offsets, in ascending order, with their times."""
        self._size += len(offsets)
        hours = due_ms // HOUR_MS
        near = hours <= self._opened_hour
        if near.any():
            self._add_near(offsets[near], due_ms[near])
        for hour in np.unique(hours[~near]).tolist():
            chosen = hours == hour
            within = (due_ms[chosen] - hour * HOUR_MS).astype(np.uint32)
            self._far.setdefault(hour, []).append((offsets[chosen].astype(np.int64), within))

    def _add_near(self, offsets: Offsets, due_ms: Offsets) -> None:
        # Rounded up: what is in a second is due when the second is.
        seconds = -(-due_ms // SECOND_MS)
        order = np.argsort(seconds, kind="stable")
        offsets, seconds = offsets[order], seconds[order]
        found, starts = np.unique(seconds, return_index=True)
        bounds = [*starts.tolist(), len(offsets)]
        for place, second in enumerate(found.tolist()):
            waiting = self._near.get(second)
            if waiting is None:
                waiting = self._near[second] = array("q")
                heappush(self._seconds, second)
            waiting.extend(offsets[bounds[place] : bounds[place + 1]].tolist())

    def _open_hours(self, now_ms: int) -> None:
        """Sort the hours that have come into seconds."""
        hour = now_ms // HOUR_MS
        if hour <= self._opened_hour:
            return
        self._opened_hour = hour
        for come in sorted(known for known in self._far if known <= hour):
            for offsets, within in self._far.pop(come):
                self._add_near(offsets, within.astype(np.int64) + come * HOUR_MS)

    def take(self, now_ms: int, count: int) -> list[int]:
        """Remove and return up to *count* offsets that are due, earliest first."""
        self._open_hours(now_ms)
        taken: list[int] = []
        while self._seconds and self._seconds[0] * SECOND_MS <= now_ms and len(taken) < count:
            second = self._seconds[0]
            waiting = self._near[second]
            room = count - len(taken)
            taken.extend(waiting[:room])
            del waiting[:room]
            if not waiting:
                heappop(self._seconds)
                del self._near[second]
        self._size -= len(taken)
        return taken

    def put_back(self, offsets: list[int], now_ms: int) -> None:
        """Let *offsets*, which were taken, be due again: before all that come after them."""
        if offsets:
            second = min(
                self._seconds[0] if self._seconds else now_ms // SECOND_MS, now_ms // SECOND_MS
            )
            waiting = self._near.get(second)
            if waiting is None:
                waiting = self._near[second] = array("q")
                heappush(self._seconds, second)
            self._near[second] = array("q", offsets) + waiting
            self._size += len(offsets)

    def next_ms(self) -> int | None:
        """Return when to look again, never later than the next offset is due; None: no offset."""
        times = []
        if self._seconds:
            times.append(self._seconds[0] * SECOND_MS)
        if self._far:
            times.append(min(self._far) * HOUR_MS)
        return min(times, default=None)
