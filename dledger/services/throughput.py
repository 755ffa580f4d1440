"""How many messages came in and went out lately, and when each day began, for dashboards.

Days are UTC ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dledger.group_api import QueueTouched
from dledger.metrics.traffic import Traffic
from dledger.services.broker_stats import BrokerStats
from dledger.state.tables import QueueKey, StateTables
from remoting.seams import Clock

DAY_MS = 86_400_000


@dataclass(slots=True)
class DayCounts:
    """Totals since start, as they were at the beginning of yesterday and of today."""

    day: int | None = None
    put_yesterday_morning: int = 0
    put_today_morning: int = 0
    got_yesterday_morning: int = 0
    got_today_morning: int = 0

    def update(self, wall_ms: int, put: int, got: int) -> None:
        """Compare the totals of now with the day; to be called every second or so."""
        day = wall_ms // DAY_MS
        if self.day is None or day == self.day:
            self.day = day
            return
        # A clock that was set by days starts again: yesterday is what was today.
        self.day = day
        self.put_yesterday_morning, self.put_today_morning = self.put_today_morning, put
        self.got_yesterday_morning, self.got_today_morning = self.got_today_morning, got


WINDOWS_S = (10, 60, 600)
"""The three spans RocketMQ's tools show."""


@dataclass(slots=True)
class _Sample:
    at: float
    put: int
    found: int
    missed: int
    got: int


class Throughput:
    """Counters since start, and their rates over the last 10, 60 and 600 seconds."""

    def __init__(self, clock: Clock, tables: StateTables) -> None:
        self._clock = clock
        self.day = DayCounts()
        self.traffic: Traffic | None = None
        """Set where metrics are served."""
        self.put = 0
        self.found = 0
        self.missed = 0
        self.got = 0
        self._samples: deque[_Sample] = deque([self._sample()], maxlen=max(WINDOWS_S) + 1)
        self._ends: dict[QueueKey, int] = {
            key: bounds.max_offset for key, bounds in tables.queues.items()
        }
        self._put_of: dict[str, int] = {}
        for (topic, _), end in self._ends.items():
            self._put_of[topic] = self._put_of.get(topic, 0) + end
        self.stats = BrokerStats(lambda: self._put_of)
        # What comes before the first sample counts too.
        self.stats.copy_counters(clock.monotonic())

    def count_pull(self, messages: int, size_bytes: int, topic: str, group: str) -> None:
        """Count an answered pull; 0 messages is a miss."""
        if messages:
            self.found += 1
            self.got += messages
            self.stats.count_got(topic, group, messages, size_bytes)
            if self.traffic is not None:
                self.traffic.count_given(topic, group, messages, size_bytes)
        else:
            self.missed += 1

    def on_applied(self, touched: Sequence[QueueTouched]) -> None:
        """Count applied messages; to be put into the group's `on_applied`."""
        ends = self._ends
        for topic, queue_id, end in touched:
            known = ends.get((topic, queue_id), 0)
            # A queue that is shorter than it was belongs to a topic made again.
            self.put += end - known if end > known else end
            ends[(topic, queue_id)] = end
            self._put_of[topic] = self._put_of.get(topic, 0) + end - known

    def record_sample(self) -> None:
        """Keep a sample of the counters; to be called once a second."""
        sample = self._sample()
        self._samples.append(sample)
        self.stats.copy_counters(sample.at)
        self.day.update(self._clock.wall_ms(), self.put, self.got)

    def rates(self, counter: str) -> str:
        """Return "a b c": events a second over the three windows."""
        return " ".join(f"{self._rate(counter, window):.2f}" for window in WINDOWS_S)

    def _rate(self, counter: str, window: int) -> float:
        now = self._sample()
        index = max(0, len(self._samples) - window)
        then = self._samples[index]
        span = now.at - then.at
        if span <= 0:
            return 0.0
        return float(getattr(now, counter) - getattr(then, counter)) / span

    def _sample(self) -> _Sample:
        return _Sample(self._clock.monotonic(), self.put, self.found, self.missed, self.got)
