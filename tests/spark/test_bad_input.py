"""Bad input is no verdict with Spark either; any address that it opens is one to judge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers.all_checks import check_source
from dledger.jepsen_like.checkers.kernel.source import Want
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import judge_run
from tests.harness.bad_tables import BAD

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


def test_one_pass_finds_the_witnesses_of_all_queues(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource
    from tests.spark.test_digest_matrix import random_queues
    from tests.spark.test_engines import local_digest

    folder = random_queues(tmp_path / "parquet", 60)
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
