"""Generated histories as rows: pulls kept by their hash get their messages back."""

from pathlib import Path

import pyarrow.parquet as pq

from dledger.jepsen_like.history.columns import SCHEMAS, hash_range, history_of
from dledger.jepsen_like.history.operation import F, History, Operation, Outcome, RunHeader
from dledger.jepsen_like.history.parquet import read_summary
from dledger.spark_jobs.generate.history import Generated, Shape, generate

WRONG = 1 << 61
"""A value that was never sent."""


def read_tables(parquet: Path) -> History:
    """Return the history in a whole folder of tables."""
    given = read_summary(parquet)
    tables = {
        name: pq.read_table(parquet / f"{name}.parquet", schema=schema)
        for name, schema in SCHEMAS.items()
    }
    header = RunHeader(given.run_id, given.seed, given.plan, given.versions)
    return history_of(**tables, header=header)


def generated(shape: Shape, folder: Path) -> tuple[History, Generated]:
    """Return the rows of *shape* and what was planted."""
    made = generate(shape, folder)
    history = read_tables(folder / "parquet")
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
