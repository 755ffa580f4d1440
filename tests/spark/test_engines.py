"""Every engine and split of the rows gives one digest."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dledger.jepsen_like.checkers import queue_log
from dledger.jepsen_like.checkers.all_checks import Settings, check_everything, check_source
from dledger.jepsen_like.checkers.verdict import Verdict, digest_of
from dledger.jepsen_like.history.columns import OBS, OPS
from dledger.jepsen_like.history.parquet import Ingested, write_history, write_summary
from dledger.spark_jobs.engines.local import LocalSource
from dledger.spark_jobs.generate.history import Shape, generate
from dledger.spark_jobs.run import Outcome
from tests.harness.clean_histories import clean_history
from tests.harness.planted_anomalies import PLANTERS
from tests.harness.planted_scene import InapplicableError, Scene
from tests.harness.shipped_files import ROOT
from tests.harness.workload_histories import MAKERS, MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def local_digest(parquet: Path) -> str:
    return digest_of(check_source(LocalSource(parquet)))


def spark_digest(spark: SparkSession, parquet: Path) -> str:
    from dledger.spark_jobs.engines.spark import SparkSource

    return digest_of(check_source(SparkSource(spark, str(parquet))))


def many_kinds(folder: Path) -> Path:
    """Write one history with an anomaly of several checkers in it."""
    for seed in range(200):
        history = clean_history(seed)
        scene = Scene(history, seed)
        try:
            for kind in ((queue_log.NAME, queue_log.STALE_READ), ("locks", "two holders at once")):
                PLANTERS[kind](scene)
        except InapplicableError:
            continue
        obs = write_history(folder, history, "r")
        write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
        expected = {v.name for verdict in check_everything(history) for v in verdict.violations}
        assert {queue_log.STALE_READ, "two holders at once"} <= expected
        return folder
    pytest.fail("no history takes both")


def test_all_engines_say_the_same_of_every_kind_of_operation(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = many_kinds(tmp_path / "parquet")
    assert spark_digest(spark, folder) == local_digest(folder)


def test_engines_agree_on_retries_recalls_and_order(spark: SparkSession, tmp_path: Path) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    settings = Settings(idempotent=True, late_max_ns=3 * MS)
    for workload, make in MAKERS.items():
        history, folder = make(7, 0.2), tmp_path / workload
        obs = write_history(folder, history, "r")
        write_summary(folder, Ingested(ops=len(history.operations), obs=obs))
        local = check_source(LocalSource(folder), settings)
        assert any(verdict.violations for verdict in local), workload
        again = check_source(SparkSource(spark, str(folder)), settings)
        assert digest_of(again) == digest_of(local), workload
        expected = check_everything(history, idempotent=True, late_max_ns=3 * MS)
        assert witnesses(again) == witnesses(expected), workload


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


def witnesses(verdicts: list[Verdict]) -> list[tuple[str, str, tuple[int, ...]]]:
    every = [violation for verdict in verdicts for violation in verdict.violations]
    return sorted((violation.checker, violation.name, violation.operations) for violation in every)


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


def test_digest_independent_of_row_order_and_shuffle(spark: SparkSession, tmp_path: Path) -> None:
    generate(Shape(6_000, clients=20, queues=3, plant="stale-read"), tmp_path)
    folder = tmp_path / "parquet"
    expected = local_digest(folder)
    other = shuffled(folder, tmp_path / "other", 5, files=5, group_rows=313)
    assert local_digest(other) == expected
    for partitions, adaptive in ((1, "true"), (2, "false"), (7, "true")):
        spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        spark.conf.set("spark.sql.adaptive.enabled", adaptive)
        assert spark_digest(spark, other) == expected, (partitions, adaptive)
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    generate(Shape(6_000, clients=20, queues=3), tmp_path / "clean")
    assert local_digest(tmp_path / "clean" / "parquet") != expected


@pytest.mark.parametrize("plant", ["", "stale-read", "slot-of-no-send", "duplicate"])
def test_one_hot_queue_in_chunks_has_the_digest_of_one_task(
    spark: SparkSession, tmp_path: Path, plant: str
) -> None:
    from dledger.spark_jobs.engines.spark import SparkSource

    made = generate(Shape(100_000, clients=40, queues=1, plant=plant), tmp_path)
    folder = tmp_path / "parquet"
    whole = check_source(LocalSource(folder))
    found = {op for verdict in whole for v in verdict.violations for op in v.operations}
    assert set(made.witnesses) <= found
    for chunks in (1, 7, 64) if plant == "stale-read" else (7,):
        width = -(-50_000 // chunks)
        source = SparkSource(spark, str(folder), chunk_offsets=width)
        assert digest_of(check_source(source)) == digest_of(whole), chunks


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


def test_tables_have_the_columns_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    generate(Shape(300, queues=2), tmp_path)
    for name, schema in (("ops", OPS), ("obs", OBS)):
        frame = spark.read.parquet(str(tmp_path / "parquet" / f"{name}.parquet"))
        assert frame.columns == schema.names
