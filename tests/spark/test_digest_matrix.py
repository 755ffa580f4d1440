"""One digest: both editions, one hot queue and many, files, partitions, AQE, other processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers.all_checks import check_source
from dledger.jepsen_like.checkers.kernel.cut import CHUNK_OFFSETS
from dledger.jepsen_like.checkers.verdict import digest_of
from dledger.jepsen_like.history.operation import F, History, Operation, RunHeader
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.generate.history import Shape, generate
from tests.harness.java import need_java
from tests.harness.queue_histories import random_history
from tests.harness.shipped_files import ROOT
from tests.spark.test_engines import local_digest, shuffled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

HOT = Shape(8_000, clients=30, queues=1, plant="stale-read")
MANY = Shape(8_000, clients=60, queues=40, plant="send-order-inverted")
MAIN = "from dledger.cli.main import main; raise SystemExit(main())"
CLUSTER = "local-cluster[2,1,1024]"
"""Two workers of one core and 1 GiB, each a process of its own."""


def random_queues(folder: Path, count: int) -> Path:
    """Write a history of many small random queues, some with a first offset that goes back."""
    operations: list[Operation] = []
    for seed in range(count):
        rng = random.Random(seed)
        for op in random_history(rng, 12, all_offsets=True):
            op.queue, op.op_id = seed, op.op_id + seed * 1_000
            if op.f != F.SEND and rng.random() < 0.1:
                op.min_off = rng.randint(0, 1)
            operations.append(op)
    obs = write_history(folder, History(RunHeader("r"), operations), "r")
    write_summary(folder, Ingested(ops=len(operations), obs=obs))
    return folder


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


def test_random_queues_have_one_digest(spark: SparkSession, tmp_path: Path) -> None:
    folder = random_queues(tmp_path / "parquet", 150)
    expected = local_digest(folder)
    assert digest(spark, folder, "one task per queue") == expected


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
