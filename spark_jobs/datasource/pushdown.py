"""Which offsets are read, from the filters that Spark hands down, and how they become tasks. Pure.

Only terms that are joined by AND come here. A term that is taken is exact; store times are taken
and handed back as well, because brokers find them by whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from spark_jobs.datasource.options import EARLIEST, LATEST, Offsets, queue_name


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Offsets *begin* up to and without *end* of one queue."""

    topic: str
    broker: str
    queue_id: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """The queue, as offsets name it."""
        return queue_name(self.topic, self.broker, self.queue_id)


def chosen(
    bounds: Iterable[QueueRange], starting: str | Offsets, ending: str | Offsets
) -> list[QueueRange]:
    """Return what of each queue is read; queues that offsets do not name are read whole."""
    return sorted(
        replace(
            queue,
            begin=max(queue.begin, _offset(queue, starting, queue.begin)),
            end=min(queue.end, _offset(queue, ending, queue.end)),
        )
        for queue in bounds
    )


def _offset(queue: QueueRange, wanted: str | Offsets, default: int) -> int:
    if wanted == EARLIEST:
        return queue.begin
    if wanted == LATEST:
        return queue.end
    assert not isinstance(wanted, str)
    return wanted.get(queue.name, default)


def cut(ranges: Iterable[QueueRange], messages: int) -> list[QueueRange]:
    """Return the same offsets in pieces of at most *messages*; empty ranges go."""
    return [
        replace(one, begin=begin, end=min(begin + messages, one.end))
        for one in sorted(ranges)
        for begin in range(one.begin, one.end, messages)
    ]


def between(
    start: Offsets, end: Offsets, parse: Mapping[str, tuple[str, str, int]]
) -> list[QueueRange]:
    """Return what lies between two positions of a stream; a new queue begins at 0."""
    return sorted(
        QueueRange(*parse[name], start.get(name, 0), offset)
        for name, offset in end.items()
        if offset > start.get(name, 0)
    )


def advance(start: Offsets, latest: Offsets, messages: int) -> dict[str, int]:
    """Return a position at most *messages* after *start*: each queue gets its share of them.

    A queue with less than its share gives the rest to the others, so no queue waits without end and
    a batch is as large as it may be. The same arguments give the same answer.
    """
    left = {name: latest[name] - start.get(name, 0) for name in latest}
    given = dict.fromkeys(left, 0)
    waiting = sorted((name for name in left if left[name] > 0), key=lambda name: (left[name], name))
    for number, name in enumerate(waiting):
        share = -(-messages // (len(waiting) - number))
        given[name] = min(left[name], share, messages)
        messages -= given[name]
    return {name: start.get(name, 0) + given[name] for name in sorted(latest)}


def total(ranges: Sequence[QueueRange]) -> int:
    """Return how many offsets these are."""
    return sum(one.end - one.begin for one in ranges)


FAR: Final = 1 << 62


@dataclass(slots=True)
class Bounds:
    """What a read has to look at: offsets and times from and without the second one."""

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first_queue_id: int = 0
    end_queue_id: int = FAR
    first_offset: int = 0
    end_offset: int = FAR
    from_ms: int = -FAR
    until_ms: int = FAR

    @property
    def has_times(self) -> bool:
        """Whether store times bound it."""
        return self.from_ms > -FAR or self.until_ms < FAR

    def has(self, queue: QueueRange) -> bool:
        """Whether anything of a queue is wanted."""
        return (
            (self.topics is None or queue.topic in self.topics)
            and (self.brokers is None or queue.broker in self.brokers)
            and (self.queue_ids is None or queue.queue_id in self.queue_ids)
            and self.first_queue_id <= queue.queue_id < self.end_queue_id
        )

    def narrow(self, ranges: Iterable[QueueRange]) -> list[QueueRange]:
        """Return what is wanted of each range, by all but store time."""
        return [
            replace(
                one,
                begin=max(one.begin, self.first_offset),
                end=min(one.end, self.end_offset),
            )
            for one in ranges
            if self.has(one)
        ]

    def take(self, kind: str, column: str, value: Any) -> bool:
        """Take in one term; return whether it is taken exactly.

        Args:
            kind: Name of the filter's class in pyspark.sql.datasource.
        """
        if kind == "IsNotNull":
            return column in _NEVER_NULL
        values = tuple(value) if kind == "In" else (value,)
        if any(one is None for one in values):
            return False
        if kind in ("EqualTo", "EqualNullSafe", "In"):
            return self._take_values(column, values)
        if kind not in _LOW and kind not in _HIGH:
            return False
        return self._take_bound(kind, column, values[0])

    def _take_values(self, column: str, values: tuple[Any, ...]) -> bool:
        match column:
            case "topic":
                self.topics = _both(self.topics, values)
            case "broker":
                self.brokers = _both(self.brokers, values)
            case "queue_id":
                self.queue_ids = _both(self.queue_ids, values)
            case "queue_offset" if len(values) == 1:
                self.first_offset = max(self.first_offset, values[0])
                self.end_offset = min(self.end_offset, values[0] + 1)
            case "store_timestamp" if len(values) == 1 and isinstance(values[0], datetime):
                self._take_bound("GreaterThanOrEqual", column, values[0])
                self._take_bound("LessThanOrEqual", column, values[0])
                return False
            case _:
                return False
        return True

    def _take_bound(self, kind: str, column: str, value: Any) -> bool:
        low, past = kind in _LOW, kind in ("GreaterThan", "LessThanOrEqual")
        if column == "store_timestamp" and isinstance(value, datetime):
            ms = int(value.timestamp() * 1000)
            # A millisecond too much on either side: Spark checks every row again.
            if low:
                self.from_ms = max(self.from_ms, ms - 1)
            else:
                self.until_ms = min(self.until_ms, ms + 2)
            return False
        if column not in ("queue_offset", "queue_id"):
            return False
        bound = int(value) + past
        if column == "queue_id":
            if low:
                self.first_queue_id = max(self.first_queue_id, bound)
            else:
                self.end_queue_id = min(self.end_queue_id, bound)
        elif low:
            self.first_offset = max(self.first_offset, bound)
        else:
            self.end_offset = min(self.end_offset, bound)
        return True


_NEVER_NULL: Final = frozenset({"topic", "broker", "queue_id", "queue_offset", "store_timestamp"})
_LOW: Final = frozenset({"GreaterThan", "GreaterThanOrEqual"})
_HIGH: Final = frozenset({"LessThan", "LessThanOrEqual"})


def _both(known: frozenset[Any] | None, values: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(values) if known is None else known & frozenset(values)
