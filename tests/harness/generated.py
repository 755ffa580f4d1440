"""Generated histories as rows: pulls kept by their hash get their messages back."""

from pathlib import Path

from dledger.jepsen_like.history.columns import hash_range
from dledger.jepsen_like.history.operation import F, History, Operation, Outcome
from dledger.jepsen_like.history.parquet import read_history
from dledger.spark_jobs.generate.history import Generated, Shape, generate

WRONG = 1 << 61
"""A value that was never sent."""


def generated(shape: Shape, folder: Path) -> tuple[History, Generated]:
    """Return the rows of *shape* and what was planted."""
    made = generate(shape, folder)
    history = read_history(folder / "parquet")
    unfold(history)
    return history, made


def unfold(history: History) -> list[Operation]:
    """Give pulls their messages from the final read; return those whose hash is another."""
    logs = {(read.topic, read.queue): read.values for read in history.replica_reads}
    wrong: list[Operation] = []
    for op in history.operations:
        if op.f != F.PULL or op.outcome != Outcome.OK or op.values or not op.range_hash:
            continue
        values = logs[op.topic, op.queue][op.off : op.off + op.cnt]
        op.values = values
        if hash_range(op.off, values) != op.range_hash:
            wrong.append(op)
            op.values = (*values[:-1], WRONG)
        op.range_hash = 0
    return wrong
