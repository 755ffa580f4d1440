"""Checks over tables say of every workload what the runner's checkers say over its rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dledger.jepsen_like.checkers import delayed, filters, producer_order, retries
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.delayed import latest_before
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.columns import ops_table
from dledger.jepsen_like.history.operation import NOTHING, F, History, Level, Operation, Outcome
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from tests.harness.judged import comparable
from tests.harness.workload_histories import MAKERS, MS

WHOLE = 12
"""Histories of each workload that go through files and all checks."""
DRAWN = 450
"""Histories that one check alone judges."""
LATE_MAX_NS = 3 * MS
NAMES = {
    "given back": {retries.LOST, retries.DOUBLED, retries.NOWHERE, retries.EARLY},
    "recalled": {delayed.RECALLED, delayed.TOO_LATE_EARLY, delayed.NOT_DELIVERED, delayed.LATE},
    "idempotent": {producer_order.OVERTAKEN},
    "filtered": {filters.WRONG},
}
"""Anomalies that the spoiled histories of a workload must have shown."""


def both(history: History, folder: Path) -> tuple[list[Verdict], list[Verdict]]:
    """Return the verdicts on a history in memory, and those on its tables."""
    settled = bool(history.replica_reads)
    expected = check_everything(history, settled=settled, late_max_ns=LATE_MAX_NS, idempotent=True)
    folder.mkdir()
    obs = write_history(folder, history, "r")
    write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
    settings = Settings(idempotent=True, late_max_ns=LATE_MAX_NS)
    return expected, check_source(LocalSource(folder), settings)


@pytest.mark.slow
@pytest.mark.parametrize("workload", MAKERS)
def test_a_workload_gets_the_same_verdicts_counts_and_witnesses(
    workload: str, tmp_path: Path
) -> None:
    names: Counter[str] = Counter()
    for seed in range(WHOLE):
        for spoiled in (0.0, 0.1):
            history = MAKERS[workload](seed, spoiled)
            expected, found = both(history, tmp_path / f"{seed}-{spoiled}")
            assert comparable(found) == comparable(expected), (
                f"{MAKERS[workload].__name__}({seed}, {spoiled})"
            )
            names.update(v.name for verdict in found for v in verdict.violations if spoiled)
    assert names.keys() >= NAMES[workload], names


def test_only_the_read_that_proves_most_is_taken() -> None:
    def read(op_id: int, call_ns: int, end: int, level: Level = Level.LINEARIZABLE) -> Operation:
        op = Operation(op_id, op_id, 1, NOTHING, F.MAX_OFFSET, Outcome.OK, call_ns, call_ns + 5)
        op.max_off, op.level = end, level
        return op

    rows = [
        read(1, 10, 0),
        read(2, 30, 2),
        read(3, 20, 2),
        read(4, 15, 3),
        read(5, 90, 4),
        read(6, 99, 1, Level.LOCAL),
    ]
    table = ops_table("r", rows)
    assert [op.op_id for op in latest_before(table, [0])] == [1]
    assert [op.op_id for op in latest_before(table, [3, 2, 3])] == [2]
    assert [op.op_id for op in latest_before(table, [0, 3, 9])] == [1, 2, 5]
    assert latest_before(ops_table("r", rows[1:2]), [1]) == []
    assert latest_before(table, []) == []
    assert latest_before(ops_table("r", []), [4]) == []
