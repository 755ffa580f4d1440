"""The history of every workload, played and then judged from its folder: the same verdicts."""

from pathlib import Path

import pytest

from dledger.jepsen_like.checkers.all_checks import check_everything
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import encode_history
from dledger.jepsen_like.history.parquet import FOLDER
from dledger.jepsen_like.plans.promised import promised
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.worker import Order, plan_of
from dledger.jepsen_like.workloads.presets import PRESETS
from dledger.spark_jobs.run import judge_run
from tests.harness.fast_part import gate_part
from tests.harness.judged import comparable

SEED = 3
JUDGED_BY_ITSELF = {
    "idempotent": "producer_order",
    "transactions": "transactions",
    "locks": "locks",
    "pop": "pop",
    "steps": "steps",
    "retries": "retries",
    "filters": "filters",
    "everything": "filters",
    "timers": "delayed",
}
"""Workload, and the checker that must have had something to judge."""


def run_of(folder: Path, played: Played) -> Path:
    """Write the folder of a run, as a runner does."""
    (folder / "history").mkdir(parents=True)
    (folder / "history" / "runner.cbor").write_bytes(encode_history(played.history))
    (folder / "plan.json").write_text(played.history.header.plan)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("preset", gate_part(PRESETS, 1))
def test_a_played_workload_is_judged_again_as_by_the_runner(preset: str, tmp_path: Path) -> None:
    plan = plan_of(SEED, Order(duration_s=45.0, preset=preset))
    played = play(plan)
    history = played.history
    expected = check_everything(history, promised(plan, settled=bool(history.replica_reads)))
    folder = run_of(tmp_path / "run", played)
    found = without_run(judge_run(folder, "local", lambda: 0.0).verdicts)
    assert comparable(found) == comparable(expected)
    assert {v.checker for v in found if v.violations} == set()
    tables = judge_run(folder / FOLDER, "local", lambda: 0.0)
    assert comparable(tables.verdicts) == comparable(expected)
    if preset in JUDGED_BY_ITSELF:
        (own,) = [v for v in found if v.checker == JUDGED_BY_ITSELF[preset]]
        assert own.validity == "valid"


def without_run(verdicts: list[Verdict]) -> list[Verdict]:
    """Leave out that the run wrote no result: it was no real one."""
    return [verdict for verdict in verdicts if verdict.checker != "run"]
