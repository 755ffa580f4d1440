"""This member's clock, with a date that the log and the clock that never jumps bound.

Every entry carries a store time that never decreases, so one leader whose date is a year ahead
would stamp the group a year ahead permanently: nothing expires by age any more, idle producers are
forgotten at once. So a date that jumps does not count at first: the one before goes on with the
clock that never jumps. At the start of the process the newest entry of the log is the date before,
and an outage is the only reason to be far beyond it.

A date that stays where it jumped to counts in the end: it was corrected, or the machine was
suspended.

A store time that is ahead of the date goes on at half speed until the date has reached it: what
waits by store time, a message that is out by POP, waits twice as long at most and not for hours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import structlog
import trio

from dledger.remoting.seams import Clock

log = structlog.get_logger(__name__)

JUMP_MAX_MS: Final = 60_000
"""A date that is further from the one before has jumped.

NTP keeps dates within milliseconds; leases and delays of users are seconds.
"""

OUTAGE_MAX_MS: Final = 30 * 86_400_000
"""At the start of the process the date may be so far beyond the newest entry of the log."""

COUNTS_AFTER_S: Final = 3_600.0
"""A date that has jumped counts when it has differed for so long: time to correct it."""


class LogClock:
    """Implements `remoting.seams.Clock`; for all that waits for a date or compares store times.

    Args:
        newest_ms: Returns the store time of the newest entry; 0: there is none.
    """

    def __init__(self, clock: Clock, newest_ms: Callable[[], int]) -> None:
        self._clock = clock
        self._newest_ms = newest_ms
        # A date, and when on the clock that never jumps it was the date.
        self._before: tuple[int, float] | None = None
        self._ahead_max_ms = OUTAGE_MAX_MS
        self._differs_since_s: float | None = None
        # A store time that is ahead of the date, and when it was the newest.
        self._ahead: tuple[int, float] | None = None

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds*."""
        await self._clock.sleep(seconds)

    def time_out(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Cancel the block after *seconds*."""
        return self._clock.time_out(seconds)

    def wall_ms(self) -> int:
        """Return the date in milliseconds; where that has jumped lately, the one before goes on."""
        wall_ms, now_s = self._clock.wall_ms(), self._clock.monotonic()
        if self._before is None:
            newest_ms = self._newest_ms()
            if not newest_ms:
                return wall_ms
            self._before = newest_ms, now_s
        before_ms, then_s = self._before
        going_ms = before_ms + int(1000 * (now_s - then_s))
        ahead_ms, since_s = wall_ms - going_ms, self._differs_since_s
        if not -JUMP_MAX_MS <= ahead_ms <= self._ahead_max_ms:
            if since_s is None:
                log.error("clock_is_off", ahead_ms=ahead_ms)
                self._differs_since_s = since_s = now_s
            if now_s - since_s < COUNTS_AFTER_S:
                return going_ms
        self._before, self._ahead_max_ms, self._differs_since_s = (
            (wall_ms, now_s),
            JUMP_MAX_MS,
            None,
        )
        return wall_ms

    def off_ms(self) -> int:
        """Return how far the clock's date is ahead of the one that counts."""
        return self._clock.wall_ms() - self.wall_ms()

    def store_time_ms(self) -> int:
        """Return the store time of an entry that is sealed now: no earlier than the newest one."""
        date_ms, newest_ms, now_s = self.wall_ms(), self._newest_ms(), self._clock.monotonic()
        if date_ms >= newest_ms:
            self._ahead = None
            return date_ms
        if self._ahead is not None:
            then_ms, since_s = self._ahead
            store_time_ms = then_ms + int(500 * (now_s - since_s))
            if store_time_ms >= newest_ms:
                return store_time_ms
        self._ahead = newest_ms, now_s
        return newest_ms
