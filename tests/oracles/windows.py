"""The log check a second time, in DataFrames and windows alone: a witness against the kernel.

It shares no code with the kernel and is slower. Every frame reaches from the first row to the
current one; the minimum over what follows is taken in descending order, because a frame without an
end is computed again for every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sf

from dledger.jepsen_like.checkers.kernel.facts import REPORTED_MAX, SUSPECTS_MAX
from dledger.jepsen_like.checkers.kernel.judge import Judged, TimePair
from dledger.jepsen_like.checkers.kernel.source import Queue, QueueReport, Replicas
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Level, Operation, Outcome
from dledger.spark_jobs.engines.frames import FrameTables
from dledger.spark_jobs.engines.spark import SparkSource

_QUEUE: Final = ("topic", "queue")
_NOT_YET: Final = -(1 << 63)
_COLUMNS: Final = (*_QUEUE, "off", "lo", "hi", "who", "is_filler")
_HOLDER: Final = "struct<min_off:bigint,r:bigint,c:bigint,o:bigint>"


class Contradictions(msgspec.Struct):
    """What is wrong with one queue.

    Attributes:
        offs: Offsets whose append had certainly happened before it certainly had not.
        values: Offsets with two values, values at two offsets, unsent or failed values.
        is_too_long: It is longer than there were sends.
        reads: Reads that contradict themselves.
    """

    offs: list[int] = []
    values: list[int] = []
    is_too_long: bool = False
    reads: list[int] = []


def contradictions(ops: DataFrame, obs: DataFrame) -> dict[Queue, Contradictions]:
    """Return what is wrong with each queue; queues without a fault are left out.

    Transactions and pulls kept as a hash are left to the kernel.
    """
    found: dict[Queue, Contradictions] = {}

    def at(topic: str, queue: int) -> Contradictions:
        return found.setdefault((topic, queue), Contradictions())

    for topic, queue, value in _values(ops, obs).collect():
        at(topic, queue).values.append(value)
    for topic, queue, op_id in reads_wrong(ops).collect():
        at(topic, queue).reads.append(op_id)
    for topic, queue in _too_long(ops, obs).collect():
        at(topic, queue).is_too_long = True
    for topic, queue, off in bad_offsets(ops, obs).collect():
        if not at(topic, queue).values and not at(topic, queue).is_too_long:
            at(topic, queue).offs.append(off)
    for one in found.values():
        one.offs.sort()
        one.values.sort()
    return {queue: one for queue, one in found.items() if one != Contradictions()}


def bad_offsets(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return topic, queue and offset where the earliest append lies after the latest."""
    return clashes(ops, obs).select(*_QUEUE, "off")


def clashes(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return the bounds of each such offset: `low` and `high` say what, where, and by which send.

    `low` is ``(lo, -off, who, is_filler)``, `high` ``(hi, off)``: of equal ones the first's.
    """
    facts = _facts(ops, obs).groupBy(*_QUEUE, "off")
    by_off = facts.agg(
        sf.max(sf.struct("lo", "who", "is_filler")).alias("low"), sf.min("hi").alias("hi")
    )
    until = Window.partitionBy(*_QUEUE)
    before = until.orderBy("off").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    after = until.orderBy(sf.desc("off")).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    low = sf.struct(
        sf.col("low.lo"), (-sf.col("off")).alias("minus_off"), sf.col("low.who"),
        sf.col("low.is_filler"),
    )  # fmt: skip
    bounds = by_off.select(
        *_QUEUE, "off", sf.max(low).over(before).alias("low"),
        sf.min(sf.struct("hi", "off")).over(after).alias("high"),
    )  # fmt: skip
    return bounds.where("low.lo > high.hi")


def first_clashes(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return of each upper bound that is contradicted the first offset; of each queue a few."""
    by_bound = clashes(ops, obs).groupBy(*_QUEUE, "high")
    first = by_bound.agg(sf.min(sf.struct("off", "low")).alias("first"))
    number = sf.row_number().over(Window.partitionBy(*_QUEUE).orderBy("first.off"))
    few = first.withColumn("n", number).where(sf.col("n") <= REPORTED_MAX)
    return few.select(*_QUEUE, "first.off", "first.low", "high")


def suspects(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return offsets and values that contradict others, least first, a few of each queue."""
    reported = _told(ops, obs)
    least, greatest = sf.min("value").alias("a"), sf.max("value").alias("b")
    of_off = reported.groupBy(*_QUEUE, "off").agg(least, greatest)
    offs = of_off.where("a != b").select(*_QUEUE, "off")
    inside = reported.join(offs, [*_QUEUE, "off"], "left_semi").select(*_QUEUE, "value")
    acked = _acked(ops).select(*_QUEUE, "value", "off").distinct().drop("off")
    again = _spares(ops).select(*_QUEUE, "value").unionByName(acked)
    again = again.groupBy(*_QUEUE, "value").count().where("count > 1").select(*_QUEUE, "value")
    below = _seen(obs).where("off < 0").select(*_QUEUE, "value")
    parts = [_values(ops, obs), inside, again, below]
    values = reduce(DataFrame.unionByName, parts)
    nothing = sf.lit(None).cast("long")
    both = offs.withColumn("value", nothing).unionByName(values.withColumn("off", nothing))
    few = [
        sf.slice(sf.sort_array(sf.collect_set(name)), 1, SUSPECTS_MAX).alias(name)
        for name in ("off", "value")
    ]
    return both.groupBy(*_QUEUE).agg(*few)


def gone_back(ops: DataFrame) -> DataFrame:
    """Return reads that reported a lesser first offset than one that had returned before its call.

    Time runs over calls and returns; what had returned by then is a running maximum.
    """
    reported = _mins(ops)
    holder = sf.struct(
        "min_off", (-sf.col("ret_ns")).alias("r"), (-sf.col("call_ns")).alias("c"),
        (-sf.col("op_id")).alias("o"),
    )  # fmt: skip
    calls = reported.withColumn("at", sf.col("call_ns")).withColumn("is_return", sf.lit(0))
    returns = reported.withColumn("at", sf.col("ret_ns")).withColumn("is_return", sf.lit(1))
    events = calls.withColumn("h", sf.lit(None).cast(_HOLDER)).unionByName(
        returns.withColumn("h", holder.cast(_HOLDER))
    )
    order = Window.partitionBy(*_QUEUE).orderBy("at", "is_return", "op_id")
    until = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    known = events.withColumn("best", sf.max("h").over(until)).where("is_return = 0")
    wrong = known.where("best.min_off > min_off")
    least = Window.partitionBy(*_QUEUE).orderBy("call_ns", "min_off", "op_id")
    few = wrong.withColumn("n", sf.row_number().over(least)).where(sf.col("n") <= REPORTED_MAX)
    return few.select(
        *_QUEUE, (-sf.col("best.o")).alias("first"), "op_id",
        sf.col("best.min_off").alias("best"), "min_off", "call_ns",
    ).orderBy(*_QUEUE, "n")  # fmt: skip


def _mins(ops: DataFrame) -> DataFrame:
    return ops.where(
        (sf.col("outcome") == int(Outcome.OK)) & (sf.col("level") == int(Level.LINEARIZABLE))
        & (sf.col("min_off") != NOTHING) & (sf.col("f") <= int(F.MIN_OFFSET))
        & (sf.col("f") != int(F.SEND))
    ).select(*_QUEUE, "op_id", "call_ns", "ret_ns", "min_off")  # fmt: skip


def first_kept(ops: DataFrame) -> DataFrame:
    """Return the greatest first offset kept of each queue, the call of the first read, and it."""
    one = sf.struct(
        "min_off", (-sf.col("ret_ns")).alias("r"), (-sf.col("call_ns")).alias("c"),
        (-sf.col("op_id")).alias("o"),
    )  # fmt: skip
    most = _mins(ops).where("min_off > 0").groupBy(*_QUEUE).agg(sf.max(one).alias("most"))
    return most.select(*_QUEUE, "most.min_off", -sf.col("most.c"), -sf.col("most.o"))


def _told(ops: DataFrame, obs: DataFrame) -> DataFrame:
    return _acked(ops).select(*_QUEUE, "off", "value").unionByName(_seen(obs))


def _who() -> Column:
    """Return a number that is the greater, the smaller the id of a send without an offset is."""
    return -sf.col("op_id") - 1


def _nobody() -> tuple[Column, Column]:
    return sf.lit(_NOT_YET), sf.lit(0)


def _acked(ops: DataFrame) -> DataFrame:
    return ops.where(
        (sf.col("f") == int(F.SEND)) & (sf.col("outcome") == int(Outcome.OK))
        & (sf.col("off") != NOTHING)
    )  # fmt: skip


def _spares(ops: DataFrame) -> DataFrame:
    acked = (sf.col("outcome") == int(Outcome.OK)) & (sf.col("off") != NOTHING)
    return ops.where((sf.col("f") == int(F.SEND)) & ~acked)


def _reads(ops: DataFrame) -> DataFrame:
    reads = ops.where(
        sf.col("f").isin([int(F.PULL), int(F.MAX_OFFSET)])
        & (sf.col("outcome") == int(Outcome.OK)) & (sf.col("level") == int(Level.LINEARIZABLE))
    )  # fmt: skip
    count = sf.when(sf.col("f") == int(F.PULL), sf.col("cnt")).otherwise(0)
    return reads.withColumn("count", count)


def reads_wrong(ops: DataFrame) -> DataFrame:
    """Return reads that contradict themselves."""
    wrong = _reads(ops).where(
        "(max_off != -1 and count > 0 and off + count > max_off)"
        " or (count > 0 and off < 0) or max_off < -1"
        " or (count = 0 and off != -1 and min_off <= off and off < max_off)"
        " or (max_off != -1 and min_off > max_off)"
    )
    return wrong.select(*_QUEUE, "op_id")


def _seen(obs: DataFrame) -> DataFrame:
    return obs.where(sf.col("op_id") != NOTHING).select(*_QUEUE, "off", "value").distinct()


def _values(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return topic, queue and a value, for each that contradicts others."""
    reported = _told(ops, obs)
    of_off = reported.groupBy(*_QUEUE, "off").agg(sf.min("value").alias("value"), sf.max("value"))
    of_value = reported.groupBy(*_QUEUE, "value").agg(sf.min("off").alias("low"), sf.max("off"))
    sent = ops.where(sf.col("f") == int(F.SEND)).groupBy(*_QUEUE, "value")
    failed = (sf.col("outcome") == int(Outcome.FAIL)).cast("int")
    sends = sent.agg(sf.min(failed).alias("failed"))
    unsent = (
        _seen(obs).join(sends, [*_QUEUE, "value"], "left").where("failed is null or failed = 1")
    )
    parts = [
        of_off.where("value != `max(value)`").select(*_QUEUE, "value"),
        of_value.where("low != `max(off)`").select(*_QUEUE, "value"),
        unsent.select(*_QUEUE, "value"),
    ]
    return reduce(DataFrame.unionByName, parts).distinct()


def _bound(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return sends without an offset that a pull found, with the offset."""
    live = _spares(ops).where(sf.col("outcome") != int(Outcome.FAIL))
    return live.drop("off").join(_seen(obs), [*_QUEUE, "value"])


def _read_facts(ops: DataFrame) -> DataFrame:
    reads, never, not_yet = _reads(ops), sf.lit(NEVER), sf.lit(_NOT_YET)
    call, ret = sf.col("call_ns"), sf.col("ret_ns")
    parts = [
        reads.where("count > 0").select(
            *_QUEUE, (sf.col("off") + sf.col("count") - 1), not_yet, ret
        ),
        reads.where("max_off > 0").select(*_QUEUE, (sf.col("max_off") - 1), not_yet, ret),
        reads.where("max_off >= 0").select(*_QUEUE, "max_off", call, never),
        _mins(ops).where("min_off > 0").select(*_QUEUE, (sf.col("min_off") - 1), not_yet, ret),
    ]
    return reduce(DataFrame.union, [part.toDF(*_QUEUE, "off", "lo", "hi") for part in parts])


def longest(ops: DataFrame, obs: DataFrame) -> DataFrame:
    """Return the length of each queue, and the operation that proved most of it.

    Ends before pulls before sends before first offsets kept.
    """
    reads = _reads(ops)
    acked = _acked(ops).select(*_QUEUE, (sf.col("off") + 1), sf.lit(2), "op_id")
    ends = reads.where("max_off > 0").select(*_QUEUE, "max_off", sf.lit(0), "op_id")
    pulls = reads.where("count > 0").select(*_QUEUE, sf.expr("off + count"), sf.lit(1), "op_id")
    lows = _mins(ops).where("min_off > 0").select(*_QUEUE, "min_off", sf.lit(3), "op_id")
    parts = (acked, ends, pulls, lows)
    proofs = reduce(DataFrame.union, parts).toDF(*_QUEUE, "end", "kind", "op_id")
    first = sf.min_by("op_id", sf.struct((-sf.col("end")).alias("e"), "kind", "op_id"))
    who = proofs.groupBy(*_QUEUE).agg(first.alias("who"))
    lengths = _lengths(ops, obs).join(who, list(_QUEUE), "left")
    return lengths.select(*_QUEUE, "length", sf.coalesce("who", sf.lit(NOTHING)))


def _lengths(ops: DataFrame, obs: DataFrame) -> DataFrame:
    ends = _acked(ops).select(*_QUEUE, (sf.col("off") + 1).alias("end"))
    ends = ends.union(_seen(obs).select(*_QUEUE, sf.col("off") + 1))
    reads = _reads(ops)
    ends = ends.union(reads.where("count > 0").select(*_QUEUE, sf.col("off") + sf.col("count")))
    ends = ends.union(reads.where("max_off > 0").select(*_QUEUE, "max_off"))
    ends = ends.union(_mins(ops).where("min_off > 0").select(*_QUEUE, "min_off"))
    return ends.groupBy(*_QUEUE).agg(sf.max("end").alias("length"))


def _too_long(ops: DataFrame, obs: DataFrame) -> DataFrame:
    sends = ops.where((sf.col("f") == int(F.SEND)) & (sf.col("outcome") != int(Outcome.FAIL)))
    attempts = sends.groupBy(*_QUEUE).agg(sf.count("*").alias("attempts"))
    lengths = _lengths(ops, obs).join(attempts, list(_QUEUE), "left")
    return lengths.where("length > coalesce(attempts, 0)").select(*_QUEUE)


def _facts(ops: DataFrame, obs: DataFrame) -> DataFrame:
    acked = _acked(ops).select(*_QUEUE, "off", "call_ns", "ret_ns", *_nobody())
    bound = _bound(ops, obs)
    found = bound.select(*_QUEUE, "off", "call_ns", sf.lit(NEVER), _who(), sf.lit(0))
    known = acked.union(found).toDF(*_COLUMNS)
    reads = _read_facts(ops).select("*", *_nobody()).toDF(*_COLUMNS)
    return known.unionByName(reads).unionByName(_fillers(ops, obs, known, bound))


def _fillers(ops: DataFrame, obs: DataFrame, known: DataFrame, bound: DataFrame) -> DataFrame:
    """Pair gaps by offset with unseen sends by call: the n-th with the n-th."""
    too_long = _too_long(ops, obs)
    lengths = _lengths(ops, obs).where("length > 0").join(too_long, list(_QUEUE), "left_anti")
    every = lengths.select(*_QUEUE, sf.explode(sf.expr("sequence(0L, length - 1)")).alias("off"))
    gaps = every.join(known.select(*_QUEUE, "off"), [*_QUEUE, "off"], "left_anti")
    of_queue = Window.partitionBy(*_QUEUE)
    gaps = gaps.withColumn("n", sf.row_number().over(of_queue.orderBy("off")))
    live = _spares(ops).where(sf.col("outcome") != int(Outcome.FAIL))
    unseen = live.join(bound.select("op_id"), "op_id", "left_anti")
    unseen = unseen.select(*_QUEUE, "call_ns", "op_id")
    numbered = unseen.withColumn("n", sf.row_number().over(of_queue.orderBy("call_ns", "op_id")))
    pairs = gaps.join(numbered, [*_QUEUE, "n"])
    return pairs.select(*_QUEUE, "off", sf.col("call_ns"), sf.lit(NEVER), _who(), sf.lit(1)).toDF(
        *_COLUMNS
    )


class WindowsSource(SparkSource):
    """The log of each queue judged in DataFrames alone, the rest as with Spark.

    Pulls kept as a hash and queues that transactions appended to are left to the kernel.
    """

    def __init__(self, spark: SparkSession, folder: str) -> None:
        super().__init__(spark, folder)
        self._frames = FrameTables(spark, folder)

    def queues(
        self, appends: Mapping[Queue, tuple[Operation, ...]], replicas: Replicas
    ) -> list[QueueReport]:
        """Judge every queue by windows; what replicas hold is compared as with Spark."""
        reports = super().queues(appends, replicas)
        judged = judged_by_windows(self._frames.frame("ops"), self._frames.frame("obs"))
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
    for topic, queue, offs, values in suspects(ops, obs).collect():
        said = found.setdefault((topic, queue), Judged())
        said.offs, said.values = tuple(offs), tuple(values)
    for topic, queue, op_id in reads_wrong(ops).collect():
        said = found[topic, queue]
        said.reads_wrong = tuple(sorted((*said.reads_wrong, op_id)))
    for topic, queue, *row in gone_back(ops).collect():
        said = found[topic, queue]
        said.lows = (*said.lows, tuple(row))
    for topic, queue, *most in first_kept(ops).collect():
        found[topic, queue].first_kept = tuple(most)
    for topic, queue, _, low, high in first_clashes(ops, obs).orderBy("off").collect():
        said = found[topic, queue]
        if not (said.offs or said.values or said.reads_wrong or said.length > said.attempts):
            pair = TimePair(-low.minus_off, high.off, low.lo, high.hi)
            if low.who != _NOT_YET:
                who = {"low_op": -low.who - 1, "is_filler": bool(low.is_filler)}
                pair = msgspec.structs.replace(pair, **who)
            said.pairs = (*said.pairs, pair)
    return found


def _counted(ops: DataFrame, obs: DataFrame) -> dict[Queue, Judged]:
    """Return the counts of each queue, its length, and the reads that are longer than it can be."""

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
    for topic, queue, length, who in longest(ops, obs).collect():
        said = found.setdefault((topic, queue), Judged())
        said.length = length
        if length > said.attempts:
            said.beyond = who
    return found
