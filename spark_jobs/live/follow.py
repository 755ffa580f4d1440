"""A run followed in this process: what is wrong so far, batch by batch, until it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from jepsen_like.checkers.half_messages import SYSTEM_TOPICS
from jepsen_like.checkers.queue_watch import QueueWatch
from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.operation import NOTHING, Operation
from spark_jobs.live.tail import Batch, Tail

INTERVAL_S: Final = 0.5
"""Between two looks at the files."""


class Progress(msgspec.Struct):
    """How it stands after a batch.

    Attributes:
        batch: Its number.
        operations: Ended so far.
        open: Under way.
        in_flight: Offsets that are not closed.
        pending: Sends with an unknown outcome.
        kept: Things remembered, of all queues.
        violations: What this batch completed.
    """

    batch: int
    operations: int
    open: int
    in_flight: int
    pending: int
    kept: int
    violations: list[Violation]


class LiveCheck:
    """All queues of a run. Pure: it is given batches."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], QueueWatch] = {}
        self._batch = 0

    def take(self, batch: Batch) -> Progress:
        """Judge a batch; also queues without a row in it may settle."""
        found: list[Violation] = []
        for (topic, queue), rows in sorted(by_queue(batch.ended).items()):
            fresh = QueueWatch(subject=f"{topic}/{queue}")
            found += self.queues.setdefault((topic, queue), fresh).take(rows, batch.horizon_ns)
        self._batch += 1
        watches = self.queues.values()
        return Progress(
            self._batch,
            sum(watch.rows for watch in watches),
            batch.open,
            sum(watch.in_flight for watch in watches),
            sum(watch.pending for watch in watches),
            sum(watch.size for watch in watches),
            found,
        )


def by_queue(rows: Iterable[Operation]) -> dict[tuple[str, int], list[Operation]]:
    """Return the rows of each queue that clients write to."""
    found: dict[tuple[str, int], list[Operation]] = {}
    for op in rows:
        if op.topic and op.queue != NOTHING and op.topic not in SYSTEM_TOPICS:
            found.setdefault((op.topic, op.queue), []).append(op)
    return found


def follow(
    folder: Path,
    report: Callable[[Progress], object],
    sleep: Callable[[float], object],
    is_over: Callable[[], bool],
) -> list[Violation]:
    """Judge the run in *folder* until *is_over*, and return what was found.

    Args:
        report: Called after each batch that had something in it.
        sleep: Waits so many seconds.
        is_over: Whether nothing more will be written.

    Raises:
        NoHistoryError: There is no history yet.
        CorruptHistoryError: A record in the middle of a file is damaged.
        OSError: A file cannot be read.
    """
    tail, live = Tail(folder), LiveCheck()
    found: list[Violation] = []
    while True:
        over = is_over()
        batch = tail.next()
        if batch.ended:
            progress = live.take(batch)
            found += progress.violations
            report(progress)
        elif over:
            return found
        else:
            sleep(INTERVAL_S)
