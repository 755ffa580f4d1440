"""Checks over tables find what checks over rows in memory find."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.verdict import Verdict, digest_of
from dledger.jepsen_like.history.operation import History
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from tests.harness.clean_histories import clean_history, interrupted
from tests.harness.fast_part import gate_part
from tests.harness.history_world import KEEPS, LATE_MAX_NS
from tests.harness.judged import comparable
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_facts import FACTS
from tests.harness.planted_scene import InapplicableError, Scene

pytestmark = pytest.mark.slow

CLEAN = 60
PER_KIND = 2
TRIES = 60


def by_columns(history: History, folder: Path) -> list[Verdict]:
    folder.mkdir()
    obs = write_history(folder, history, "r")
    write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
    return check_source(LocalSource(folder), Settings(late_max_ns=LATE_MAX_NS, keeps=KEEPS))


@pytest.mark.parametrize("seed", gate_part(range(CLEAN), 4))
def test_clean_histories_get_the_same_verdicts_and_counts(seed: int, tmp_path: Path) -> None:
    history = clean_history(seed)
    found = by_columns(history, tmp_path / "whole")
    expected = check_everything(history, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
    assert comparable(found) == comparable(expected)
    assert "invalid" not in {verdict.validity for verdict in found}, found
    cut = interrupted(history)
    expected = check_everything(cut, settled=False, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
    assert comparable(by_columns(cut, tmp_path / "cut")) == comparable(expected)


PLANTED = {": ".join(kind): (kind, planter) for kind, planter in PLANTERS.items()} | FACTS


@pytest.mark.parametrize("what", gate_part(PLANTED, 12))
def test_planted_anomalies_get_the_same_violations(what: str, tmp_path: Path) -> None:
    kind, planter = PLANTED[what]
    planted = 0
    for seed in range(TRIES):
        history = clean_history(seed)
        try:
            planter(Scene(history, seed))
        except InapplicableError:
            continue
        settled = bool(history.replica_reads)
        expected = check_everything(history, settled=settled, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
        found = by_columns(history, tmp_path / str(seed))
        assert comparable(found) == comparable(expected), f"{kind} in clean_history({seed})"
        assert any(v.name == kind[1] for verdict in found for v in verdict.violations)
        planted += 1
        if planted == PER_KIND:
            return
    pytest.fail(f"{kind} could be planted {planted} times only")


def test_a_digest_is_that_of_the_findings_alone(tmp_path: Path) -> None:
    history = clean_history(1)
    one = by_columns(history, tmp_path / "one")
    again = by_columns(history, tmp_path / "again")
    assert digest_of(one) == digest_of(list(reversed(again)))
    history.operations.pop()
    assert digest_of(one) != digest_of(by_columns(history, tmp_path / "other"))
