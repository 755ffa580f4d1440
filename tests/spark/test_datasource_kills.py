"""A stream is read while its leader is killed three times: every message once in the table."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dledger import spark_jobs
from dledger.cli.topic_command import create_topic
from dledger.client.blocking import BlockingClient, BlockingFuture
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.spark_jobs.audit.compare import audit
from tests.harness.threaded_cluster import ThreadedCluster, threaded_cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.slow

MESSAGES = 100_000
IN_FLIGHT = 400
KILL_AT = (20_000, 45_000, 70_000)
"""A leader is killed when this many messages are acknowledged."""
RESTART_AT = 55_000
"""The query is stopped and goes on from its checkpoint."""
BATCH_WAIT_S = 120.0
TOPIC = "kills"
SETTINGS: dict[str, object] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.max_hash_slot_num": 100_000,
    "store.max_index_num": 400_000,
}


class Sender:
    """Sends messages in a thread; others wait until *count* are acknowledged."""

    def __init__(self, namesrv: str) -> None:
        self._namesrv = namesrv
        self.acknowledged: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="sender")

    def _run(self) -> None:
        try:
            self._send_all()
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _send_all(self) -> None:
        waiting: deque[tuple[int, BlockingFuture]] = deque()
        with BlockingClient(self._namesrv) as client:
            producer = client.producer("senders", ProducerConfig(send_timeout_s=60))
            for number in range(MESSAGES):
                if len(waiting) >= IN_FLIGHT:
                    self._settle(*waiting.popleft())
                waiting.append((number, producer.send_async(Message(TOPIC, b"%d" % number))))
            while waiting:
                self._settle(*waiting.popleft())

    def _settle(self, number: int, future: BlockingFuture) -> None:
        result = future.result()
        with self._changed:
            self.acknowledged[result.message_queue.queue_id, result.queue_offset] = number
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until *count* messages are acknowledged."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.error is not None or len(self.acknowledged) >= count, 300
            )
        if self.error is not None:
            raise self.error


def start(
    session: SparkSession, cluster: ThreadedCluster, folder: Path, *, rest: bool = False
) -> StreamingQuery:
    """Start the query, or go on from its checkpoint; *rest*: up to what there is now."""
    frame = (
        session.readStream.format("dledger")
        .option("namesrv", cluster.namesrv)
        .option("topic", TOPIC)
        .option("columns", "queue_id,queue_offset,body")
        .option("maxMessagesPerTrigger", "6000")
        .load()
    )
    writer = (
        frame.writeStream.format("parquet")
        .option("path", str(folder / "table"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    return (writer.trigger(availableNow=True) if rest else writer).start()


def wait_batch(query: StreamingQuery) -> None:
    """Wait until the query has written a batch: so that there is a checkpoint to go on from."""
    until_s = time.monotonic() + BATCH_WAIT_S
    while not query.recentProgress and query.exception() is None:
        assert time.monotonic() < until_s, "no batch"
        time.sleep(0.1)


async def kill_leader(cluster: Any) -> None:
    leader = await cluster.wait_leader()
    await cluster.kill(leader)
    await cluster.wait_leader(other_than=leader, timeout_s=60)
    await cluster.start(leader)
    await cluster.wait_caught_up(leader, 60)


@pytest.mark.hunt
def test_table_has_each_message_once_after_kills(spark: SparkSession, tmp_path: Path) -> None:
    spark_jobs.register(spark)
    with threaded_cluster(tmp_path / "cluster", SETTINGS) as cluster:
        cluster.call(lambda: create_topic([cluster.namesrv], TOPIC, queues=4))
        sender = Sender(cluster.namesrv)
        query = start(spark, cluster, tmp_path)
        sender.thread.start()
        steps = [(at, "kill") for at in KILL_AT] + [(RESTART_AT, "restart")]
        batches = []
        for at, step in sorted(steps):
            sender.wait(at)
            if step == "kill":
                cluster.call(kill_leader, cluster.cluster)
            else:
                wait_batch(query)
                batches.append(len(query.recentProgress))
                query.stop()
                query = start(spark, cluster, tmp_path)
        sender.wait(MESSAGES)
        sender.thread.join()
        assert query.exception() is None
        query.stop()
        last = start(spark, cluster, tmp_path, rest=True)
        last.awaitTermination()
        assert last.exception() is None

        table = spark.read.parquet(str(tmp_path / "table")).toArrow()
        read = (
            spark.read.format("dledger")
            .option("namesrv", cluster.namesrv)
            .option("topic", TOPIC)
            .option("columns", "queue_id,queue_offset,body")
            .load()
            .toArrow()
        )
        cluster.stop()
        report = audit(cluster.stores)
    rows = sorted(
        zip(*(table.column(name).to_pylist() for name in table.schema.names), strict=True)
    )
    there = sorted(zip(*(read.column(name).to_pylist() for name in read.schema.names), strict=True))
    assert rows == there
    places = {(queue_id, offset): int(body) for queue_id, offset, body in rows}
    assert len(places) == len(rows)
    assert len(sender.acknowledged) == MESSAGES
    assert {place: places.get(place) for place in sender.acknowledged} == sender.acknowledged
    assert set(places.values()) == set(range(MESSAGES))
    assert batches[0] > 0
    assert (report.verdict, report.findings) == ("equal", [])
    assert report.records >= MESSAGES
    print(f"{len(rows)} rows of {MESSAGES} messages; audit of {report.entries} entries: equal")
