"""How many messages came in and went out, by topic and by group: since the start, and lately.

What came in is counted by the leader that applies it; what went out by the broker that answered the
pull. Counters only grow; three rings keep copies of them, for the last minute, hour and day (UTC),
so a span costs two copies and a subtraction, and sending costs nothing: what a topic took is read
from where its queues end.

Spec: docs/internals/protocol/remoting.md, section 10.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from dledger.group_api import QueueTouched
from dledger.remoting.metrics import Histogram
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.remoting.seams import Clock
from dledger.state.apply import QueueUnits
from dledger.state.tables import QueueKey, StateTables

# ---------------------------------------------------------------------------------- counters


MAX_COUNTERS: Final = 5_000
"""Topics, and pairs of topic and group, that are counted: as many series as a page shows. They
take about 2 MB."""

MAX_KNOWN_LEFT_OUT: Final = 5_000
"""Keys remembered only to say how many are not counted; at this number it means *at least*."""

SIZE_BOUNDS_BYTES: Final = (1_024, 4_096, 524_288, 1_048_576, 2_097_152, 4_194_304)
"""RocketMQ's."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class Count:
    """What was counted since the start."""

    messages: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Counters(Generic[KeyT]):
    """Counts by key, for a limited number of keys; they are the first ones, until these are
    forgotten."""

    counts: dict[KeyT, Count] = field(default_factory=dict)
    left_out: dict[KeyT, None] = field(default_factory=dict)

    def add(self, key: KeyT, messages: int, size_bytes: int) -> None:
        """Count messages of *key*, unless there are too many keys already."""
        count = self.counts.get(key)
        if count is None:
            if len(self.counts) >= MAX_COUNTERS:
                if len(self.left_out) < MAX_KNOWN_LEFT_OUT:
                    self.left_out[key] = None
                return
            count = self.counts[key] = Count()
        count.messages += messages
        count.size_bytes += size_bytes

    def keep(self, wanted: Callable[[KeyT], bool]) -> None:
        """Forget the keys that are not *wanted*."""
        for key in [key for key in self.counts if not wanted(key)]:
            del self.counts[key]
        for key in [key for key in self.left_out if not wanted(key)]:
            del self.left_out[key]


class Traffic:
    """What one node took and gave since it started."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self.taken: Counters[str] = Counters()
        self.given: Counters[tuple[str, str]] = Counters()
        self.sizes = Histogram(SIZE_BOUNDS_BYTES)

    def on_units(self, units: Sequence[QueueUnits]) -> None:
        """Count applied messages; to be put into the group's `on_units`."""
        if self._leads():
            for item in units:
                self.sizes.observe_all(item.units["size"].tolist())
                self.taken.add(item.topic, len(item.units), int(item.units["size"].sum()))

    def count_given(self, topic: str, group: str, messages: int, size_bytes: int) -> None:
        """Count an answered pull."""
        self.given.add((topic, group), messages, size_bytes)

    def keep(self, has_topic: Callable[[str], bool], has_group: Callable[[str], bool]) -> None:
        """Forget what was deleted, so that others can be counted in its place."""
        self.taken.keep(has_topic)
        is_full = bool(self.given.left_out)
        self.given.keep(lambda pair: has_topic(pair[0]) and (not is_full or has_group(pair[1])))


# ---------------------------------------------------------------------------------- rates


TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
"""Keyed by topic."""
GROUP_GET_NUMS = "GROUP_GET_NUMS"
"""Keyed by ``topic@group``."""
GROUP_GET_SIZE = "GROUP_GET_SIZE"
"""Bytes, keyed by ``topic@group``."""
BROKER_PUT_NUMS = "BROKER_PUT_NUMS"
BROKER_GET_NUMS = "BROKER_GET_NUMS"
"""Of this node, all topics together; keyed by the cluster's name, whatever it is."""

EVERY_S = (10, 600, 3600)
COPIES = (7, 7, 25)
"""RocketMQ's: a minute in steps of ten seconds, an hour in steps of ten minutes, a day in hours."""


@dataclass(frozen=True, slots=True)
class Span:
    """How many messages there were between two copies."""

    count: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Messages a second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Copy:
    at: float
    counts: Mapping[str, Mapping[str, int]]


@dataclass(slots=True)
class _Ring:
    every_s: int
    copies: deque[_Copy]
    next_s: float = 0.0


class BrokerStats:
    """What one node took and gave since it started."""

    def __init__(self, ends: Callable[[], Mapping[str, int]]) -> None:
        self._ends = ends
        self.got: Counters[tuple[str, str]] = Counters()
        """What groups were given, by topic and group. 39 copies of it are about 20 MB."""
        self._rings = [
            _Ring(every_s, deque(maxlen=copies))
            for every_s, copies in zip(EVERY_S, COPIES, strict=True)
        ]

    def copy_counters(self, now: float) -> None:
        """Keep copies of the counters where it is time; to be called every second or so."""
        due = [ring for ring in self._rings if now >= ring.next_s]
        if not due:
            return
        copy = _Copy(now, self._counts())
        for ring in due:
            ring.copies.append(copy)
            ring.next_s = now + ring.every_s

    def spans(self, name: str, key: str, now: float) -> tuple[Span, ...] | None:
        """Return the last minute, hour and day; None when nothing was ever counted."""
        counts = self._counts()
        if name in (BROKER_PUT_NUMS, BROKER_GET_NUMS):
            key = ""
        count = counts.get(name, {}).get(key)
        if count is None:
            return None
        spans = []
        for ring in self._rings:
            then = ring.copies[0] if ring.copies else _Copy(now, counts)
            before = then.counts[name].get(key, 0)
            # A topic that was made again ends before where it ended.
            spans.append(Span(max(0, count - before), now - then.at))
        return tuple(spans)

    def _counts(self) -> dict[str, dict[str, int]]:
        put = dict(self._ends())
        given = {f"{topic}@{group}": count for (topic, group), count in self.got.counts.items()}
        got = {name: count.messages for name, count in given.items()}
        return {
            TOPIC_PUT_NUMS: put,
            GROUP_GET_NUMS: got,
            GROUP_GET_SIZE: {name: count.size_bytes for name, count in given.items()},
            BROKER_PUT_NUMS: {"": sum(put.values()) - put.get(STATE_TOPIC, 0)},
            BROKER_GET_NUMS: {"": sum(got.values())},
        }


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
        self.expired = 0
        """Messages that reads passed over because their time was over."""
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
            self.stats.got.add((topic, group), messages, size_bytes)
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
