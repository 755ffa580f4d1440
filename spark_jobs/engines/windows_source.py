"""The engine `windows`: the log of each queue judged in DataFrames alone, the rest as with Spark.

What windows cannot say comes from the kernel: pulls kept as a hash, and queues that transactions
appended to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from jepsen_like.history.operation import NOTHING, F, Level, Operation, Outcome
from spark_jobs.checks.queue_judge import Judged, TimePair
from spark_jobs.checks.source import Queue, QueueReport, Replicas
from spark_jobs.engines import windows
from spark_jobs.engines.spark import SparkSource

_QUEUE: Final = ("topic", "queue")
_NOBODY: Final = -(1 << 63)


class WindowsSource(SparkSource):
    """See the module."""

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue by windows; what replicas hold is compared as with Spark."""
        reports = super().queues(appends, replicas)
        judged = judged_by_windows(self.tables["ops"], self.tables["obs"])
        for report in reports:
            known = report.judged
            if report.key in judged and report.key not in appends:
                report.judged = judged[report.key]
                report.judged.unproved = known.unproved
                report.judged.pulls_wrong = known.pulls_wrong
                if known.pulls_wrong:
                    report.judged.pairs = ()
        return reports


def judged_by_windows(ops: DataFrame, obs: DataFrame) -> dict[Queue, Judged]:
    """Return what is wrong with each queue; pulls kept as a hash and transactions aside."""
    ops = ops.where((sf.col("f") <= int(F.MIN_OFFSET)) & (sf.col("queue") >= 0))
    obs = obs.where(sf.col("queue") >= 0)
    found = _counted(ops, obs)
    for topic, queue, offs, values in windows.suspects(ops, obs).collect():
        said = found.setdefault((topic, queue), Judged())
        said.offs, said.values = tuple(offs), tuple(values)
    for topic, queue, op_id in windows.reads_wrong(ops).collect():
        said = found[topic, queue]
        said.reads_wrong = tuple(sorted((*said.reads_wrong, op_id)))
    for topic, queue, *row in windows.gone_back(ops).collect():
        said = found[topic, queue]
        said.lows = (*said.lows, tuple(row))
    for topic, queue, _, low, high in windows.first_clashes(ops, obs).orderBy("off").collect():
        said = found[topic, queue]
        if not (said.offs or said.values or said.reads_wrong or said.length > said.attempts):
            pair = TimePair(-low.minus_off, high.off, low.lo, high.hi)
            if low.who != _NOBODY:
                who = {"low_op": -low.who - 1, "is_filler": bool(low.is_filler)}
                pair = msgspec.structs.replace(pair, **who)
            said.pairs = (*said.pairs, pair)
    return found


def _counted(ops: DataFrame, obs: DataFrame) -> dict[Queue, Judged]:
    """Return the counts of each queue, how long it is, and who saw it longer than it can be."""

    def how_many(condition: str) -> Column:
        return sf.count(sf.when(sf.expr(condition), 1))

    send, ok = f"f = {int(F.SEND)}", f"outcome = {int(Outcome.OK)}"
    read = f"f in ({int(F.PULL)}, {int(F.MAX_OFFSET)}) and level = {int(Level.LINEARIZABLE)}"
    counts = ops.groupBy(*_QUEUE).agg(
        how_many(send),
        how_many(f"{read} and {ok}"),
        how_many(f"{send} and {ok} and off != {NOTHING}"),
        how_many(f"{send} and outcome != {int(Outcome.FAIL)}"),
        sf.count("*"),
    )
    found: dict[Queue, Judged] = {}
    for topic, queue, sends, reads, acked, attempts, rows in counts.collect():
        found[topic, queue] = Judged(sends, reads, acked, 0, attempts, rows=rows)
    for topic, queue, length, who in windows.longest(ops, obs).collect():
        said = found.setdefault((topic, queue), Judged())
        said.length = length
        if length > said.attempts:
            said.beyond = who
    return found
