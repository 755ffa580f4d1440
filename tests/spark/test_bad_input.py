"""Bad input is no verdict with Spark either; any address that it opens is one; its audit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers.all_checks import check_source
from dledger.jepsen_like.checkers.kernel.source import Want
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.jepsen_like.history.operation import F, History, Operation, RunHeader
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.audit.compare import audit
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import judge_run
from tests.harness.bad_tables import BAD
from tests.harness.queue_histories import random_history
from tests.harness.replica_folders import SEGMENT_BYTES, flip, usual, write_folder, write_group

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.slow

BY_ROWS = ("operations of a newer kind", "returns before calls", "nulls", "a page is damaged")
"""What no footer shows."""


def test_bad_tables_are_unknown_with_spark(spark: SparkSession, tmp_path: Path) -> None:
    generate(Shape(3_000, clients=8, queues=2), tmp_path / "whole")
    for number, (name, change) in enumerate(BAD.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole" / "parquet", folder)
        file = change(folder)
        outcome = judge_run(folder, "spark", lambda: 0.0)
        assert (outcome.verdict, outcome.anomalies) == ("unknown", []), name
        assert str(folder / file) in outcome.reason, name
        assert "Spark ended" not in outcome.reason, name


@pytest.fixture
def of_hadoop(spark: SparkSession, tmp_path: Path) -> str:
    """Return an address that only Hadoop opens: a link of its view of file systems."""
    spark.conf.set("fs.viewfs.mounttable.runs.link./all", tmp_path.as_uri())
    return "viewfs://runs/all"


def test_an_address_that_only_hadoop_opens_is_judged(
    spark: SparkSession, of_hadoop: str, tmp_path: Path
) -> None:
    generate(Shape(6_000, clients=20, queues=3, plant="stale-read"), tmp_path / "run")
    expected = judge_run(tmp_path / "run", "local", lambda: 0.0)
    found = judge_run(f"{of_hadoop}/run", "spark", lambda: 0.0)
    assert (found.verdict, found.digest) == (expected.verdict, expected.digest)
    assert found.operations == 6_000
    for name in BY_ROWS[:3]:
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(tmp_path / "run" / "parquet", folder)
        BAD[name](folder)
        outcome = judge_run(f"{of_hadoop}/{folder.name}", "spark", lambda: 0.0)
        assert outcome.verdict == "unknown", name
        assert f"{of_hadoop}/{folder.name}/ops.parquet" in outcome.reason, name
    assert judge_run(f"{of_hadoop}/nothing", "spark", lambda: 0.0).verdict == "unknown"


def random_queues(folder: Path, count: int) -> None:
    """Write a history of many small random queues, some with a first offset that goes back."""
    operations: list[Operation] = []
    for seed in range(count):
        rng = random.Random(seed)
        for op in random_history(rng, 12, all_offsets=True):
            op.queue, op.op_id = seed, op.op_id + seed * 1_000
            if op.f != F.SEND and rng.random() < 0.1:
                op.min_off = rng.randint(0, 1)
            operations.append(op)
    history = History(RunHeader("r"), operations)
    obs = write_history(folder, history, "r")
    write_summary(folder, Ingested(ops=len(operations), obs=obs))


def test_one_pass_finds_the_witnesses_of_all_queues(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource
    from tests.spark.test_engines import local_digest

    folder = tmp_path / "parquet"
    random_queues(folder, 60)
    source = SparkSource(spark, str(folder))
    passes: list[tuple[str, int]] = []
    read = source._pass

    def counted(
        table: str, wants: tuple[Want, ...], rows_max: int
    ) -> list[list[tuple[int, bytes]]]:
        passes.append((table, len(wants)))
        return read(table, wants, rows_max)

    monkeypatch.setattr(source, "_pass", counted)
    assert digest_of(check_source(source)) == local_digest(folder)
    many = [(table, count) for table, count in passes if count > 10]
    assert [table for table, _ in many] == ["ops", "obs"]


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
