"""One queue, from batches of Arrow to its judgement and its violations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jepsen_like.checkers.queue_log import NAME
from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import Operation
from spark_jobs.checks.queue_facts import OBS_COLUMNS, OPS_COLUMNS, Columns, QueueFacts, Spares
from spark_jobs.checks.queue_judge import Judged, judge_queue
from spark_jobs.checks.queue_witness import name_violations

UNPROVED: Final = "pulls kept as a hash hold messages that nobody else saw"


def to_numpy(batch: Any, names: Sequence[str]) -> Columns:
    """Return columns of a record batch or a table; without a copy where Arrow allows it."""
    return {name: batch.column(name).to_numpy(zero_copy_only=False) for name in names}


def table_to_numpy(table: Any, names: Sequence[str]) -> Columns:
    """Return columns of a table."""
    columns = {name: table.column(name) for name in names}
    return {
        name: codes_of(column) if name == "replica" else column.to_numpy()
        for name, column in columns.items()
    }


def codes_of(words: Any) -> npt.NDArray[np.int64]:
    """Return a number for each word of a column: its place among the different ones, sorted."""
    told = np.array(words.cast(pa.string()).to_pylist(), dtype=object)
    return np.unique(told, return_inverse=True)[1].astype(np.int64)


def gather(
    ops: Iterable[Columns], obs: Iterable[Columns], appends: Sequence[Operation] = ()
) -> QueueFacts:
    """Return the facts of one queue.

    Args:
        ops: Its rows of `ops`, in any order and cut anywhere.
        obs: Its rows of `obs`, likewise.
        appends: What transactions appended to it, see `half_messages`.
    """
    facts = QueueFacts()
    for batch in ops:
        facts.add_ops(batch)
    for batch in obs:
        facts.add_obs(batch)
    if appends:
        facts.add_spares(spares_of(appends))
    return facts


def spares_of(appends: Sequence[Operation]) -> Spares:
    """Return what transactions appended as sends without an offset."""
    rows = [(op.op_id, op.call_ns, op.ret_ns, op.value, op.outcome) for op in appends]
    numbers = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Spares(*(numbers[:, at] for at in range(5)))


def check_tables(
    ops: Any, obs: Any, subject: str = "", appends: Sequence[Operation] = ()
) -> tuple[Judged, list[Violation]]:
    """Return the judgement and the violations of one queue whose tables are in memory."""
    rows, seen = table_to_numpy(ops, OPS_COLUMNS), table_to_numpy(obs, OBS_COLUMNS)
    said = judge_queue(gather([rows], [seen], appends))
    if said.is_valid:
        return said, []
    return said, name_violations(said, rows, seen, subject, tuple(appends))


def verdict_of(judged: Iterable[Judged], violations: Iterable[Violation]) -> Verdict:
    """Return the verdict over all queues: linearizability is local to a queue."""
    every = list(judged)
    counts = {
        "queues": len(every),
        "sends": sum(said.sends for said in every),
        "reads": sum(said.reads for said in every),
    }
    facts = sum(said.acked + said.reads for said in every)
    verdict = judge(NAME, violations, counts, looked_at=facts)
    unproved = sum(said.unproved for said in every)
    if verdict.is_valid and unproved:
        return Verdict(NAME, "unknown", (), counts, f"{unproved} {UNPROVED}")
    return verdict
