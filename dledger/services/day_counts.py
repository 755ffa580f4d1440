"""How many messages had come and gone when a day began: what dashboards make daily figures of.

Days are UTC ones.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY_MS = 86_400_000


@dataclass(slots=True)
class DayCounts:
    """Totals since start, as they were at the beginning of yesterday and of today."""

    day: int | None = None
    put_yesterday_morning: int = 0
    put_today_morning: int = 0
    got_yesterday_morning: int = 0
    got_today_morning: int = 0

    def look(self, wall_ms: int, put: int, got: int) -> None:
        """Note that the totals are so now; to be called every second or so."""
        day = wall_ms // DAY_MS
        if self.day is None or day == self.day:
            self.day = day
            return
        # A clock that was set by days starts anew: yesterday is what was today.
        self.day = day
        self.put_yesterday_morning, self.put_today_morning = self.put_today_morning, put
        self.got_yesterday_morning, self.got_today_morning = self.got_today_morning, got
