"""An audit spread over Spark's tasks finds what one process finds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.spark_jobs.audit.compare import audit
from tests.harness.replica_folders import SEGMENT_BYTES, flip, usual, write_folder, write_group

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def test_audit_spark_agrees_on_equal_and_damaged_folders(
    spark: SparkSession, tmp_path: Path
) -> None:
    from dledger.spark_jobs.engines.spark import SparkDoer

    log = usual()
    roots = write_group(tmp_path / "equal", log.frames)
    here, there = audit(roots), audit(roots, SparkDoer(spark))
    assert here.verdict == "equal"
    assert here.entries == len(log.frames)
    assert there.digest == here.digest

    roots[2] = write_folder(tmp_path / "behind", log.frames, commit=30, floor=1, clean=False)
    for position in (100, 5000, 2 * SEGMENT_BYTES + 7, 4 * SEGMENT_BYTES + 300):
        base = position // SEGMENT_BYTES * SEGMENT_BYTES
        flip(roots[1] / "commitlog" / f"{base:020d}", position - base)
    flip(sorted((roots[0] / "index").iterdir())[0], 50)
    flip(roots[0] / "consumequeue" / "T" / "0" / ("0" * 20), 33)
    here, there = audit(roots), audit(roots, SparkDoer(spark))
    found = {(Path(f.replica).name, f.position) for f in here.findings if f.position >= 0}
    assert found == {
        ("n1", 100), ("n1", 5000), ("n1", 2 * SEGMENT_BYTES + 7), ("n1", 4 * SEGMENT_BYTES + 300),
    }  # fmt: skip
    assert len(here.findings) == 6
    assert there == here
    assert there.digest == here.digest
