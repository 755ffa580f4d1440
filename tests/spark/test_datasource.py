"""`format("dledger")` against three brokers on loopback: batch, stream, segments, writer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dledger import spark_jobs
from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.client.blocking import BlockingClient
from dledger.client.core.message import Message
from dledger.client.producer.config import ProducerConfig
from dledger.spark_jobs.audit.compare import audit
from tests.harness.cluster_questions import create_topic
from tests.harness.module_cluster import running
from tests.spark.late_worker import done

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

pytestmark = pytest.mark.slow

SETTINGS: dict[str, object] = {"store.mapped_file_size_commit_log": 1 << 20}
QUEUES = 3
SENT = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running(lay_out(tmp_path_factory.mktemp("cluster"), settings=SETTINGS)) as found:
        yield found


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    spark_jobs.register(spark)
    return spark


def send(cluster: LocalCluster, topic: str, count: int, first: int = 0) -> dict[Any, bytes]:
    """Send messages; return the body at each place as it was acknowledged."""
    with BlockingClient(cluster.namesrv_address) as client:
        producer = client.producer("senders", ProducerConfig(send_timeout_s=60))
        futures = [
            producer.send_async(
                Message(
                    topic,
                    f"body {number}".encode(),
                    tags="even" if number % 2 == 0 else "odd",
                    keys=f"k{number}",
                    properties={"number": str(number)},
                )
            )
            for number in range(first, first + count)
        ]
        found = {}
        for number, future in enumerate(futures, start=first):
            result = future.result()
            queue = result.message_queue
            found[queue.broker_name, queue.queue_id, result.queue_offset] = (
                f"body {number}".encode()
            )
        return found


def new_topic(cluster: LocalCluster, topic: str) -> None:
    trio.run(lambda: create_topic([cluster.namesrv_address], topic, queues=QUEUES))


@pytest.fixture(scope="module")
def sent(cluster: LocalCluster) -> dict[Any, bytes]:
    new_topic(cluster, "batch")
    return send(cluster, "batch", SENT)


def read(session: SparkSession, cluster: LocalCluster, topic: str, **options: str) -> DataFrame:
    reader = session.read.format("dledger").option("namesrv", cluster.namesrv_address)
    return reader.option("topic", topic).options(**options).load()


def places(frame: DataFrame) -> dict[Any, bytes]:
    rows = frame.select("broker", "queue_id", "queue_offset", "body").collect()
    found = {(row[0], row[1], row[2]): bytes(row[3]) for row in rows}
    assert len(found) == len(rows), "a place came twice"
    return found


def test_a_batch_is_what_was_sent(
    session: SparkSession, cluster: LocalCluster, sent: dict[Any, bytes]
) -> None:
    frame = read(session, cluster, "batch", maxMessagesPerPartition="50")
    assert places(frame) == sent
    assert frame.rdd.getNumPartitions() >= SENT // 50
    row = frame.where("keys = 'k7'").collect()[0]
    assert (row.topic, row.tags, row.properties["number"]) == ("batch", "odd", "7")
    assert row.born_timestamp <= row.store_timestamp
    assert len(row.message_id) == 32
    assert frame.groupBy("tags").count().collect()[0]["count"] == SENT // 2


def test_offsets_and_columns_are_chosen_by_options(
    session: SparkSession, cluster: LocalCluster, sent: dict[Any, bytes]
) -> None:
    queue = "batch/broker-a/1"
    frame = read(
        session,
        cluster,
        "batch",
        columns="queue_id,queue_offset",
        startingOffsets=json.dumps({queue: 5}),
        endingOffsets=json.dumps({queue: 9}),
    )
    assert frame.columns == ["queue_id", "queue_offset"]
    assert sorted(r[1] for r in frame.where("queue_id = 1").collect()) == [5, 6, 7, 8]
    others = sum(1 for _, queue_id, _ in sent if queue_id != 1)
    assert frame.where("queue_id != 1").count() == others


def test_filters_are_pushed_down_to_the_planned_ranges(
    session: SparkSession, cluster: LocalCluster, sent: dict[Any, bytes]
) -> None:
    from pyspark.sql.functions import col, lit

    def narrowed() -> DataFrame:
        options = {"maxMessagesPerPartition": "20", "filterPushdown": "true"}
        return read(session, cluster, "batch", **options)

    narrow = narrowed().where(
        "topic = 'batch' and queue_id = 2 and queue_offset >= 30 and queue_offset < 45"
    )
    # What is taken is not looked at again: no filter on it is left above the scan.
    plan = narrow._jdf.queryExecution().executedPlan().toString()
    assert "BatchScan dledger" in plan
    assert "Filter (" not in plan
    assert narrow.rdd.getNumPartitions() == 1
    assert set(places(narrow)) == {place for place in sent if place[1] == 2 and 30 <= place[2] < 45}
    odd = narrowed().where("queue_offset >= 30 and tags = 'odd'")
    plan = odd._jdf.queryExecution().executedPlan().toString()
    assert re.search(r"Filter \(.*tags#\d+ = odd", plan)
    assert not re.search(r"Filter \(.*queue_offset", plan)
    assert odd.count() == sum(
        1 for place, body in sent.items() if place[2] >= 30 and int(body.split()[1]) % 2
    )

    times = read(session, cluster, "batch", columns="queue_offset,queue_id,store_timestamp")
    stored = {(row[1], row[0]): row[2] for row in times.collect()}
    middle = sorted(stored.values())[SENT // 2]
    kept = places(narrowed().where(col("store_timestamp") >= lit(middle)))
    assert {place[1:] for place in kept} == {
        place for place, time in stored.items() if time >= middle
    }
    assert 0 < len(kept) <= SENT


def test_one_frame_may_be_filtered_twice_in_one_query(
    session: SparkSession, cluster: LocalCluster, sent: dict[Any, bytes]
) -> None:
    """With push-down Spark 4.3 would read the last planned filter's ranges for both."""
    frame = read(session, cluster, "batch")
    both = frame.where("queue_id = 0").union(frame.where("queue_id = 1"))
    counts = {row[0]: row[1] for row in both.groupBy("queue_id").count().collect()}
    expected = Counter(queue_id for _, queue_id, _ in sent)
    assert counts == {queue_id: expected[queue_id] for queue_id in (0, 1)}
    left, right = frame.where("queue_id = 0"), frame.where("queue_id = 2")
    for one in (left, right):
        one._jdf.queryExecution().executedPlan()
    assert (left.count(), right.count()) == (expected[0], expected[2])


def ended(writer: DataStreamWriter) -> StreamingQuery:
    """Return the query, which has written what there is."""
    start = writer.trigger(availableNow=True).start
    return done(start(), lambda each: each.awaitTermination(), start)


def stream_once(
    session: SparkSession, cluster: LocalCluster, topic: str, folder: Path, **options: str
) -> list[Any]:
    """Read what there is into a table of files; return the progress of each batch."""
    reader = session.readStream.format("dledger").option("namesrv", cluster.namesrv_address)
    frame = reader.option("topic", topic).options(**options).load()
    query = ended(
        frame.writeStream.format("parquet")
        .option("path", str(folder / "table"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    return [batch for batch in query.recentProgress if batch["numInputRows"]]


def test_a_stream_goes_on_from_its_checkpoint(
    session: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    new_topic(cluster, "stream")
    first = send(cluster, "stream", 250)
    batches = stream_once(session, cluster, "stream", tmp_path, maxMessagesPerTrigger="100")
    assert [batch["numInputRows"] for batch in batches] == [100, 100, 50]
    assert places(session.read.parquet(str(tmp_path / "table"))) == first

    assert stream_once(session, cluster, "stream", tmp_path) == []
    second = send(cluster, "stream", 30, first=250)
    (batch,) = stream_once(session, cluster, "stream", tmp_path)
    assert batch["numInputRows"] == 30
    assert places(session.read.parquet(str(tmp_path / "table"))) == {**first, **second}
    end = json.loads(batch["sources"][0]["endOffset"])
    ends = Counter(queue_id for _, queue_id, _ in [*first, *second])
    assert end == {f"stream/broker-a/{queue_id}": count for queue_id, count in ends.items()}


def test_rows_become_messages(session: SparkSession, cluster: LocalCluster, tmp_path: Path) -> None:
    new_topic(cluster, "written")
    rows = session.range(200, numPartitions=3).selectExpr(
        "concat('row ', id) as body",
        "'a' as tags",
        "map('id', cast(id as string)) as properties",
        "concat('id-', id) as idempotent_key",
    )
    writer = rows.write.format("dledger").mode("append").option("namesrv", cluster.namesrv_address)
    writer.option("topic", "written").save()
    found = read(session, cluster, "written").collect()
    assert {bytes(row.body) for row in found} == {f"row {n}".encode() for n in range(200)}
    assert len(found) == 200
    assert all(row.tags == "a" for row in found)
    assert {row.properties["IDEMPOTENT_KEY"] for row in found} == {f"id-{n}" for n in range(200)}
    assert {row.keys for row in found} == {f"id-{n}" for n in range(200)}

    new_topic(cluster, "copied")
    stream = session.readStream.format("dledger").option("namesrv", cluster.namesrv_address)
    query = ended(
        stream.option("topic", "written")
        .load()
        .selectExpr("'copied' as topic", "body")
        .writeStream.format("dledger")
        .option("namesrv", cluster.namesrv_address)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    assert query.exception() is None
    copied = read(session, cluster, "copied").collect()
    assert Counter(bytes(row.body) for row in copied) == Counter(bytes(r.body) for r in found)


def test_segments_of_a_stopped_broker_are_a_table(
    session: SparkSession, cluster: LocalCluster, sent: dict[Any, bytes]
) -> None:
    stores = [node.store_path for node in cluster.brokers.values() if node.store_path]
    under_way = audit(stores)
    assert under_way.verdict != "parted"
    assert not under_way.replicas or all(one.running for one in under_way.replicas)
    trio.run(cluster.stop_all)
    reader = session.read.format("dledger").option("path", str(stores[0]))
    frame = reader.option("topic", "batch").load()
    found = {place[1:]: body for place, body in places(frame).items()}
    assert found == {place[1:]: body for place, body in sent.items()}
    narrowed = reader.option("topic", "batch").option("filterPushdown", "true").load()
    narrow = narrowed.where("queue_id = 1 and queue_offset between 3 and 8")
    assert sorted(row.queue_offset for row in narrow.collect()) == [3, 4, 5, 6, 7, 8]
    report = audit(stores)
    assert (report.verdict, report.findings) == ("equal", [])
    assert report.records > SENT


def test_datasource_names_a_wrong_option(session: SparkSession) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="topic is missing"):
        session.read.format("dledger").option("namesrv", "127.0.0.1:1").load().collect()
    with pytest.raises(PySparkException, match="is not known"):
        session.read.format("dledger").option("namesvr", "127.0.0.1:1").load().collect()
