"""Spark finds every anomaly and every fact that is planted, and has the digest of one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers.all_checks import Settings, check_source
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from tests.harness.clean_histories import clean_history
from tests.harness.fast_part import gate_part
from tests.harness.history_world import KEEPS, LATE_MAX_NS
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_facts import FACTS
from tests.harness.planted_scene import InapplicableError, Planted, Scene

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SETTINGS = Settings(late_max_ns=LATE_MAX_NS, keeps=KEEPS)
PLANTED = {": ".join(kind): (kind, planter) for kind, planter in PLANTERS.items()} | FACTS
TRIES = 300


def planted_into(what: str, folder: Path) -> Planted:
    """Write the first clean history that takes it, with it."""
    _, planter = PLANTED[what]
    for seed in range(TRIES):
        scene = Scene(clean_history(seed), seed)
        try:
            planted = planter(scene)
        except InapplicableError:
            continue
        obs = write_history(folder, scene.history, "r")
        write_summary(folder, Ingested(ops=len(scene.history.operations), obs=obs))
        return planted
    pytest.fail(f"{what} could be planted nowhere")


@pytest.mark.parametrize("what", gate_part(sorted(PLANTED), 10))
def test_what_is_planted_is_found_with_spark(
    spark: SparkSession, what: str, tmp_path: Path
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    planted = planted_into(what, tmp_path)
    verdicts = check_source(SparkSource(spark, str(tmp_path)), SETTINGS)
    assert digest_of(verdicts) == digest_of(check_source(LocalSource(tmp_path), SETTINGS))
    proofs = [
        set(violation.operations)
        for verdict in verdicts
        for violation in verdict.violations
        if (verdict.checker, violation.name) == PLANTED[what][0]
    ]
    assert any(set(planted.witnesses) <= proof for proof in proofs)
