"""`dledger check` and the runner's own checkers: the same verdicts, names and witnesses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers import queue_log, retention
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import History, Operation, RunHeader, encode_history
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.jepsen_like.plans.plan import Plan, encode_plan
from dledger.jepsen_like.plans.plan import Settings as PlanSettings
from dledger.jepsen_like.plans.promised import promised
from dledger.spark_jobs.engines.local import LocalSource
from dledger.spark_jobs.run import judge_run
from tests.harness.clean_histories import clean_history
from tests.harness.fast_part import gate_part
from tests.harness.history_world import SEGMENT
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_scene import InapplicableError, Planted, Scene
from tests.harness.queue_histories import is_linearizable, random_history

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

LATE = "delivered late"
"""Judged only where a run states how late a message may come."""
REMOVED = [kind for kind in PLANTERS if kind[0] == retention.NAME]
"""Judged only where a plan gives what is kept."""
KINDS = [kind for kind in PLANTERS if kind[1] != LATE and kind not in REMOVED]
PER_KIND = -(-200 // len(KINDS)) + 1
TRIES = 300
RANDOM = 1_000
SMALL = 9
"""Operations that an exhaustive search can put in order."""


def planted(kind: tuple[str, str], count: int) -> Iterator[tuple[int, History, Planted]]:
    """Yield clean histories with this anomaly in them: their seed, rows, what was planted."""
    found = 0
    for seed in range(TRIES):
        history = clean_history(seed)
        try:
            reported = PLANTERS[kind](Scene(history, seed))
        except InapplicableError:
            continue
        yield seed, history, reported
        found += 1
        if found == count:
            return
    pytest.fail(f"{kind} could be planted {found} times only")


def named(verdicts: list[Verdict]) -> dict[str, tuple[str, list[tuple[str, str, str, int]]]]:
    """Return validity and violations of each checker, witnesses aside: equals may stand in."""
    return {
        verdict.checker: (
            verdict.validity,
            sorted((v.name, v.subject, v.detail, v.at_ns) for v in verdict.violations),
        )
        for verdict in verdicts
    }


def proofs(verdicts: list[Verdict], kind: tuple[str, str]) -> list[set[int]]:
    return [
        set(violation.operations)
        for verdict in verdicts
        if verdict.checker == kind[0]
        for violation in verdict.violations
        if violation.name == kind[1]
    ]


def test_there_are_at_least_200_planted_anomalies() -> None:
    assert PER_KIND * len(KINDS) >= 200


@pytest.mark.parametrize("kind", gate_part(KINDS, 8), ids=": ".join)
def test_planted_anomalies_are_judged_as_by_the_runner(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    for seed, history, reported in planted(kind, PER_KIND):
        folder = tmp_path / str(seed)
        (folder / "history").mkdir(parents=True)
        (folder / "history" / "runner.cbor").write_bytes(encode_history(history))
        outcome = judge_run(folder, "local", lambda: 0.0)
        expected = check_everything(history, Settings(settled=bool(history.replica_reads)))
        where = f"{kind} in clean_history({seed})"
        assert outcome.verdict == "invalid", where
        assert named(outcome.verdicts) == named(expected), where
        for verdicts in (outcome.verdicts, expected):
            assert any(set(reported.witnesses) <= proof for proof in proofs(verdicts, kind)), where


@pytest.mark.parametrize("kind", REMOVED, ids=": ".join)
def test_planted_removals_are_judged_as_by_the_runner(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    plan = Plan(1, 60_000, settings=PlanSettings(segment_bytes=SEGMENT, keep_segments=2))
    for seed, history, _ in planted(kind, 3):
        folder = tmp_path / str(seed)
        (folder / "history").mkdir(parents=True)
        (folder / "history" / "runner.cbor").write_bytes(encode_history(history))
        (folder / "plan.json").write_text(encode_plan(plan))
        outcome = judge_run(folder, "local", lambda: 0.0)
        found = [verdict for verdict in outcome.verdicts if verdict.checker != "run"]
        assert named(found) == named(check_everything(history, promised(plan, settled=True))), seed
        assert proofs(found, kind), seed


def merged(count: int) -> list[list[Operation]]:
    """Return random histories, each as a queue of its own."""
    every: list[list[Operation]] = []
    for seed in range(count):
        rows = random_history(random.Random(seed), SMALL, all_offsets=True)
        for op in rows:
            op.queue, op.op_id = seed, op.op_id + seed * 100
        every.append(rows)
    return every


def test_random_histories_same_verdict_as_runner_and_search(
    spark: SparkSession, tmp_path: Path
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    queues = merged(RANDOM)
    history = History(RunHeader("r"), [op for rows in queues for op in rows])
    obs = write_history(tmp_path, history, "r")
    write_summary(tmp_path, Ingested(ops=len(history.operations), obs=obs))
    expected = next(v for v in check_everything(history) if v.checker == queue_log.NAME)
    wrong = {violation.subject for violation in expected.violations}
    assert RANDOM // 5 < len(wrong) < RANDOM * 4 // 5
    for number, rows in enumerate(queues):
        where = f"random_history(random.Random({number}), {SMALL})"
        assert is_linearizable(rows) == (f"t/{number}" not in wrong), where
    for source in (LocalSource(tmp_path), SparkSource(spark, str(tmp_path))):
        found = next(v for v in check_source(source) if v.checker == queue_log.NAME)
        assert named([found]) == named([expected]), type(source)
        assert found.counts == expected.counts
