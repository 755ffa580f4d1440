"""The page for Prometheus, asked of real brokers over real HTTP.

Real processes.
"""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest
import trio

from dledger.cli.local_cluster import local_cluster
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from tests.harness.cluster_questions import create_topic
from tests.harness.eventually import eventually
from tests.harness.metrics_page import MetricsPage

pytestmark = pytest.mark.slow

SENT = 50


def get(port: int, host: str = "127.0.0.1", path: str = "/metrics") -> tuple[int, str, str]:
    """Return status, content type and text."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


async def page_of(port: int) -> MetricsPage:
    status, kind, text = await trio.to_thread.run_sync(get, port)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return MetricsPage.read(text)


async def settled_page_of(port: int) -> MetricsPage:
    """Return a page that counts the producer's heartbeat, while nothing is under way."""
    found: list[MetricsPage] = []

    async def is_settled() -> bool:
        page = await page_of(port)
        found.append(page)
        return bool(page.of("rocketmq_producer_connections")) and (
            page.value("dledger_applied_index") == page.value("dledger_commit_index")
        )

    await eventually("the producer is known, and all is applied", is_settled)
    return found[-1]


async def test_broker_shows_its_metrics(tmp_path: Path) -> None:
    # Together, so that none of them is another one.
    port, *ports = free_ports(4)
    async with local_cluster(
        tmp_path, brokers=1, settings={"metrics.listen_port": port}, ports=ports
    ) as cluster:
        namesrvs = [cluster.namesrv_address]
        await create_topic(namesrvs, "seen", queues=1)
        async with (
            connect(namesrvs) as client,
            Producer(client, "senders") as producer,
            PullConsumer(client, "readers") as consumer,
        ):
            for number in range(SENT):
                await producer.send(Message("seen", b"%d" % number))
            (queue,) = await consumer.fetch_message_queues("seen")
            found = await consumer.pull(queue, 0, max_messages=20)
            assert len(found.messages) == 20
            await consumer.commit_offset(queue, 20)
            page = await settled_page_of(port)

        assert page.of("rocketmq_messages_in_total", "topic")[("seen",)] == SENT
        assert page.of("rocketmq_throughput_in_total", "topic")[("seen",)] > SENT * 91
        pair = ("seen", "readers")
        labels = ("topic", "consumer_group")
        assert page.of("rocketmq_messages_out_total", *labels) == {pair: 20}
        taken = page.of("rocketmq_throughput_in_total", "topic")[("seen",)]
        assert 0 < page.value("rocketmq_throughput_out_total") < taken
        assert page.of("rocketmq_consumer_lag_messages", *labels) == {pair: SENT - 20}
        sends = page.of("rocketmq_rpc_latency_count", "request_code", "response_code")
        assert sends["send_records", "success"] >= 1
        assert page.value("rocketmq_message_size_count") >= SENT
        assert page.of("rocketmq_consumer_lag_latency", *labels)[pair] > 0
        assert page.value("rocketmq_producer_connections") >= 1
        assert page.value("rocketmq_storage_size") > taken
        assert page.value("dledger_is_leader") == 1
        assert page.value("dledger_leader_changes_total") == 1
        assert page.value("dledger_applied_index") == page.value("dledger_commit_index") > SENT / 2
        assert {labels["member"] for labels in page.labels("dledger_term")} == {"n0"}
