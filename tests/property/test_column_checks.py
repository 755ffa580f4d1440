"""Checks over tables find what checks over rows in memory find."""

from pathlib import Path

import pytest

from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.verdict import Verdict, digest_of
from dledger.jepsen_like.history.operation import History
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from tests.harness.any_rows import ANY, any_rows
from tests.harness.clean_histories import clean_history
from tests.harness.fast_part import gate_part
from tests.harness.history_world import KEEPS, LATE_MAX_NS
from tests.harness.judged import comparable
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_facts import FACTS
from tests.harness.planted_scene import InapplicableError, Scene

pytestmark = pytest.mark.slow

ANY_ROWS = 60
PER_KIND = 2
TRIES = 60
SETTINGS = Settings(late_max_ns=LATE_MAX_NS, keeps=KEEPS)


def by_columns(history: History, folder: Path, settings: Settings = SETTINGS) -> list[Verdict]:
    folder.mkdir()
    obs = write_history(folder, history, "r")
    write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
    return check_source(LocalSource(folder), settings)


@pytest.mark.parametrize("seed", gate_part(range(ANY_ROWS), 4))
def test_any_rows_get_the_same_verdicts_and_counts(seed: int, tmp_path: Path) -> None:
    history = any_rows(seed)
    found = by_columns(history, tmp_path / "any", ANY)
    assert comparable(found) == comparable(check_everything(history, ANY))
    assert len({v.checker for v in found if v.validity == "invalid"}) > 15


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
        expected = check_everything(
            history, Settings(settled=settled, late_max_ns=LATE_MAX_NS, keeps=KEEPS)
        )
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
