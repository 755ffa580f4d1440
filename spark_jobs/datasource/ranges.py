"""Which offsets of which queues are read, and how they are cut into tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
