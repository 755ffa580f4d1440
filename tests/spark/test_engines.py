"""Every engine, and every way the rows are dealt, gives one digest."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dledger.jepsen_like.checkers.all_checks import check_everything, check_source
from dledger.jepsen_like.checkers.kernel.cut import CHUNK_OFFSETS
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import Outcome
from tests.harness.any_rows import ANY, any_rows
from tests.harness.java import need_java
from tests.harness.judged import comparable
from tests.harness.shipped_files import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.slow


def local_digest(parquet: Path) -> str:
    return digest_of(check_source(LocalSource(parquet)))


def spark_digest(spark: SparkSession, parquet: Path) -> str:
    from dledger.spark_jobs.engines.spark import SparkSource

    return digest_of(check_source(SparkSource(spark, str(parquet))))


def test_engines_agree_on_any_rows(spark: SparkSession, tmp_path: Path) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    for seed in range(3):
        history, folder = any_rows(seed), tmp_path / str(seed)
        obs = write_history(folder, history, "r")
        write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
        verdicts = check_source(SparkSource(spark, str(folder)), ANY)
        assert comparable(verdicts) == comparable(check_everything(history, ANY)), seed


@pytest.mark.parametrize("plant", ["", "duplicate"])
def test_history_without_half_messages_is_read_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    passes: list[str] = []
    first, more, judged = SparkSource._first_pass, SparkSource._pass, SparkSource._judged
    for name, act in (("_first_pass", first), ("_pass", more), ("_judged", judged)):

        def counted(self: SparkSource, *rest: Any, act: Any = act, name: str = name) -> Any:
            passes.append(name)
            return act(self, *rest)

        monkeypatch.setattr(SparkSource, name, counted)
    generate(Shape(4_000, 10, 2, seed=3, plant=plant), tmp_path)
    folder = tmp_path / "parquet"
    assert spark_digest(spark, folder) == local_digest(folder)
    assert passes[:2] == ["_first_pass", "_judged"]
    if not plant:
        assert passes[2:] == []


def shuffled(folder: Path, into: Path, seed: int, *, files: int, group_rows: int) -> Path:
    """Write the same rows in another order, in several files and other row groups."""
    into.mkdir()
    rng = random.Random(seed)
    for name in ("nodes.parquet", "events.parquet", "ingest.json"):
        (into / name).write_bytes((folder / name).read_bytes())
    for name in ("ops", "obs"):
        table = pq.read_table(folder / f"{name}.parquet")
        order = list(range(table.num_rows))
        rng.shuffle(order)
        (into / f"{name}.parquet").mkdir()
        for part in range(files):
            rows = table.take(pa.array(order[part::files], pa.int64()))
            where = into / f"{name}.parquet" / f"part-{part}.parquet"
            pq.write_table(rows, where, row_group_size=group_rows)
    return into


def test_spark_submit_prints_the_outcome_and_ends_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    generate(Shape(3_000, queues=2, plant="duplicate"), tmp_path)
    submit = Path(sys.executable).parent / "spark-submit"
    settings = ["--master", "local[1]", "--driver-memory", "1g"]
    settings += ["--conf", "spark.ui.enabled=false"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [submit, *settings, ROOT / "spark_jobs" / "submitted_check.py", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1, done.stderr[-2_000:]
    outcome = msgspec.json.decode(done.stdout[done.stdout.index("{") :], type=Outcome)
    assert outcome.verdict == "invalid"
    assert [anomaly["name"] for anomaly in outcome.anomalies] == ["duplicate"]
    assert outcome.digest == local_digest(tmp_path / "parquet")


HOT = Shape(8_000, clients=30, queues=1, plant="stale-read")
MANY = Shape(8_000, clients=60, queues=40, plant="send-order-inverted")
MAIN = "from dledger.cli.main import main; raise SystemExit(main())"
CLUSTER = "local-cluster[2,1,1024]"
"""Two workers of one core and 1 GiB, each a process of its own."""


def digest(spark: SparkSession, folder: Path, edition: str, partitions: int = 0) -> str:
    """Return the digest of an edition, its rows dealt to partitions by lot on request."""
    from pyspark.sql import functions as sf

    from dledger.spark_jobs.engines.frames import FrameTables
    from dledger.spark_jobs.engines.spark import SparkSource, open_tables

    tables = open_tables(spark, str(folder))
    if partitions:
        tables = FrameTables(spark, str(folder))
        for name in ("ops", "obs"):
            rows = tables.frame(name).repartition(partitions, sf.rand(partitions))
            tables.frames[name] = rows
    width = 1_500 if edition == "chunks" else CHUNK_OFFSETS
    source = SparkSource(spark, tables, chunk_offsets=width)
    return digest_of(check_source(source))


@pytest.mark.parametrize("shape", [HOT, MANY], ids=["one hot queue", "many queues"])
def test_one_digest_for_each_way_the_work_is_dealt(
    spark: SparkSession, tmp_path: Path, shape: Shape
) -> None:
    generate(shape, tmp_path)
    folder = tmp_path / "parquet"
    expected = local_digest(folder)
    layouts = [
        folder,
        shuffled(folder, tmp_path / "files", 3, files=9, group_rows=200),
        shuffled(folder, tmp_path / "groups", 4, files=1, group_rows=50),
    ]
    assert [local_digest(layout) for layout in layouts] == [expected] * 3
    editions = ("one task per queue", "chunks") if shape is HOT else ("one task per queue",)
    for number, (edition, adaptive) in enumerate(product(editions, ("true", "false"))):
        spark.conf.set("spark.sql.adaptive.enabled", adaptive)
        where = (shape, layouts[number % 3].name, edition, f"adaptive {adaptive}")
        assert digest(spark, layouts[number % 3], edition) == expected, where
    spark.conf.set("spark.sql.adaptive.enabled", "true")


@pytest.mark.hunt
def test_digest_same_for_64_partitions_and_a_shuffle_of_200(
    spark: SparkSession, tmp_path: Path
) -> None:
    generate(HOT, tmp_path)
    folder = tmp_path / "parquet"
    expected = local_digest(folder)
    assert digest(spark, folder, "one task per queue", partitions=64) == expected
    assert digest(spark, folder, "chunks", partitions=64) == expected
    spark.conf.set("spark.sql.shuffle.partitions", "200")
    for adaptive in ("true", "false"):
        spark.conf.set("spark.sql.adaptive.enabled", adaptive)
        assert digest(spark, folder, "one task per queue") == expected, adaptive
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    spark.conf.set("spark.sql.adaptive.enabled", "true")


def test_worker_processes_of_their_own_give_the_same_digest(tmp_path: Path) -> None:
    need_java()
    made = generate(MANY, tmp_path)
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = ["check", str(tmp_path), "--engine", "spark", "--master", CLUSTER]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *command, "--output", "json"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr[-2_000:]
    reported = json.loads(done.stdout[done.stdout.index("{") :])
    assert reported["digest"] == local_digest(tmp_path / "parquet")
    assert set(reported["anomalies"][0]["operations"]) == set(made.witnesses)
