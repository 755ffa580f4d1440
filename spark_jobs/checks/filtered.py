"""Filtered pulls, queue by queue: what they passed against what is there."""

from __future__ import annotations

from typing import Final

from jepsen_like.checkers import filters
from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.columns import operations_of, replica_reads_of
from jepsen_like.history.operation import NOTHING, F, History, Operation, RunHeader
from spark_jobs.checks.source import Queue, Source, Want

PULLS: Final = Want((("f", (int(F.FILTERED),)),))
"""The rows of filtered pulls."""


def check_filtered(source: Source, rows_max: int) -> Verdict | None:
    """Return the verdict over the filtered pulls of a source; None where there are none.

    Raises:
        TooManyRowsError: A queue holds more than *rows_max*, or there are so many pulls.
    """
    pulls = operations_of(source.ops(PULLS, rows_max), source.obs(Want(), 0))
    if not pulls:
        return None
    by_queue: dict[Queue, list[Operation]] = {}
    for op in pulls:
        by_queue.setdefault((op.topic, op.queue), []).append(op)
    counts = {"pulls": 0, "messages": 0}
    found: list[Violation] = []
    for queue, rows in sorted(by_queue.items()):
        held = source.obs(Want((("op_id", (NOTHING,)),), queue=queue), rows_max)
        reads = [
            read
            for read in replica_reads_of(source.nodes(), held)
            if (read.topic, read.queue) == queue
        ]
        said = filters.check_history(History(RunHeader(""), rows, replica_reads=reads))
        found += said.violations
        counts = {name: count + said.counts[name] for name, count in counts.items()}
    found.sort(key=lambda violation: violation.operations)
    return judge(filters.NAME, found[: filters.REPORTED_MAX], counts, looked_at=counts["messages"])
