"""Structured Streaming gives a run that goes on the verdict of the check in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.jepsen_like.checkers.all_checks import check_source
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import CorruptHistoryError, RunHeader, encode_row
from dledger.jepsen_like.history.parquet import NoHistoryError, ingest
from dledger.spark_jobs.engines.local import LocalSource
from dledger.spark_jobs.generate.history import Shape
from dledger.spark_jobs.live import LiveCheck, Tail
from tests.harness.generated import generated
from tests.harness.played_runs import PlayedRun, writes
from tests.spark.late_worker import done

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from dledger.spark_jobs.engines.stream import QueueFound

pytestmark = pytest.mark.slow

WRITES = 10


@pytest.mark.parametrize("plant", ["stale-read", ""])
def test_stream_reports_in_the_same_batch_as_one_process(
    spark: SparkSession, tmp_path: Path, plant: str
) -> None:
    from dledger.spark_jobs.engines.stream import start_following

    history, made = generated(Shape(6_000, 20, 2, seed=7, plant=plant), tmp_path / "made")
    run, live = PlayedRun(tmp_path / "run"), LiveCheck()
    tail = Tail(run.folder)
    reported: list[list[QueueFound]] = []

    def start() -> StreamingQuery:
        return start_following(spark, run.folder, tmp_path / "checkpoint", reported.append)

    query = start()
    by_batch: list[list[Violation]] = []
    seen = 0
    try:
        for number, rows in enumerate(writes(history.operations, WRITES)):
            run.write(rows)
            query = done(query, lambda each: each.processAllAvailable(), start)
            progress = live.take(tail.next())
            # On a busy machine Spark takes the files of one write in more than one batch.
            since, seen = reported[seen:], len(reported)
            last = {(queue.topic, queue.queue): queue for part in since for queue in part}.values()
            assert sum(queue.in_flight for queue in last) == progress.in_flight
            assert sum(queue.kept for queue in last) == progress.kept
            by_batch.append([v for part in since for queue in part for v in queue.violations])
            assert sorted(by_batch[-1], key=str) == sorted(progress.violations, key=str)
            if number == WRITES // 2:
                # A query that was stopped goes on where it was, with the state it had.
                query.stop()
                query = start()
    finally:
        query.stop()
    assert {v.name for part in by_batch for v in part} == ({made.plant} if plant else set())
    assert not by_batch[-1]
    in_a_write = 6_000 // WRITES
    assert max(queue.in_flight for queues in reported for queue in queues) < in_a_write
    assert max(queue.state_bytes for queues in reported for queue in queues) < 200_000

    ingest(run.folder)
    verdicts = {v.checker: v for v in check_source(LocalSource(run.folder / "parquet"))}
    offline = verdicts["queue_log"]
    assert offline.is_valid == (not plant)
    assert {v.name for v in offline.violations} == {v.name for part in by_batch for v in part}


def test_a_run_that_cannot_be_followed_is_one_error(spark: SparkSession, tmp_path: Path) -> None:
    from dledger.spark_jobs.engines.stream import follow_with_spark

    def follow(name: str) -> None:
        follow_with_spark(spark, tmp_path / name, lambda _: None, lambda _: None, lambda: True)

    with pytest.raises(NoHistoryError, match="holds no history yet"):
        follow("nothing")
    for name, data in (("first", b""), ("second", b""), ("damaged", b"\xff")):
        folder = tmp_path / ("two runs" if name != "damaged" else name) / "history"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.cbor").write_bytes(encode_row(RunHeader(name)) + data)
    (tmp_path / "a folder" / "history" / "0.cbor").mkdir(parents=True)
    for name, why in (
        ("two runs", "files of two runs, first and second"),
        ("damaged", "no record at byte"),
        ("a folder", "Spark cannot follow"),
    ):
        with pytest.raises(CorruptHistoryError, match=why):
            follow(name)
