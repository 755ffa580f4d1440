"""Board and alerts against a real cluster: each metric they name is shown, by Prometheus too.

Real processes.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.ports import free_ports
from dledger.client.connect import connect
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.cluster_questions import create_topic
from tests.harness.deployed_files import DEPLOY, board, board_queries, metrics_of, watched_queries
from tests.harness.eventually import eventually
from tests.harness.metrics_page import MetricsPage

pytestmark = pytest.mark.slow


def read(url: str) -> str:
    """Return a page."""
    with urllib.request.urlopen(url, timeout=60) as page:
        text: str = page.read().decode()
    return text


async def page_of(port: int) -> MetricsPage:
    """Return what a broker shows."""
    url = f"http://127.0.0.1:{port}/metrics"
    return MetricsPage.read(await trio.to_thread.run_sync(read, url))


async def with_messages(cluster: LocalCluster) -> None:
    """Send, consume a part of it, and make a dead letter."""
    namesrvs = [cluster.namesrv_address]
    await create_topic(namesrvs, "seen", queues=1)
    async with (
        connect(namesrvs) as client,
        Producer(client, "senders") as producer,
        PullConsumer(client, "readers") as consumer,
    ):
        for _ in range(2):
            await producer.send(Message("seen", b"x"))
        (queue,) = await consumer.fetch_message_queues("seen")
        pulled = await consumer.pull(queue, 0, max_messages=1)
        await consumer.commit_offset(queue, 1)
        header = {
            "offset": str(pulled.messages[0].phy_offset),
            "group": "readers",
            "delayLevel": "-1",
            "originTopic": "seen",
        }
        name = pulled.messages[0].broker_name
        code = RequestCode.CONSUMER_SEND_MSG_BACK
        answer = await client.ask_leader(name, code, header, topic="seen")
        assert answer.code == 0, answer.remark


def asked() -> set[str]:
    """The metrics that board and alerts name."""
    return set().union(*map(metrics_of, watched_queries())) - {"up"}


async def test_every_metric_of_board_and_alerts_is_shown(tmp_path: Path) -> None:
    ports = free_ports(10)
    async with local_cluster(tmp_path / "cluster", brokers=3, ports=ports[:7]) as cluster:
        metrics_ports = dict(zip(cluster.brokers, ports[7:], strict=True))
        for name, port in metrics_ports.items():
            node = cluster.brokers[name]
            node.arguments = (*node.arguments, "--set", f"metrics.listen_port={port}")
            await cluster.restart(name)
        await cluster.wait_healthy()
        await with_messages(cluster)

        async def all_shown() -> bool:
            pages = [await page_of(port) for port in metrics_ports.values()]
            return asked() <= set().union(*(page.kinds for page in pages))

        await eventually("all metrics are on a page", all_shown)
        if shutil.which("prometheus") is None:
            return
        await prometheus_answers(tmp_path, list(metrics_ports.values()), cluster)


async def prometheus_answers(folder: Path, ports: list[int], cluster: LocalCluster) -> None:
    """Run Prometheus: queries that need no event return data; an alert fires for a dead member."""
    (own_port,) = free_ports(1)
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    for name in ("prometheus.yml", "alerts.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        quick = text.replace("15s", "1s").replace("for: 1m", "for: 0s")
        quick = re.sub(r'"127\.0\.0\.1:555[89]"', "", quick)  # no NameServer, no proxy
        (folder / name).write_text(quick.replace('"127.0.0.1:5557"', targets))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{own_port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    async def ask(what: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{own_port}/api/v1/{what}?{query}"
        try:
            return json.loads(await trio.to_thread.run_sync(read, url))["data"]
        except urllib.error.HTTPError as error:
            error.close()
            return {}
        except OSError:
            return {}

    async def has_data(query: str) -> bool:
        for name, text in (("$cluster", ".*"), ("$group", ".*"), ("$__rate_interval", "1m")):
            query = query.replace(name, text)
        return bool((await ask("query", query=query)).get("result"))

    async def fires(name: str) -> bool:
        alerts = (await ask("alerts")).get("alerts", ())
        return any(a["labels"]["alertname"] == name and a["state"] == "firing" for a in alerts)

    try:
        for query in board_queries(board()):
            # What never happened here has no series: a refusal; dead letters are there once.
            if query.startswith("label_values") or "response_code!=" in query:
                continue
            await eventually(query, partial(has_data, query))
        assert not await fires("DledgerMemberDown")
        await cluster.kill(next(iter(cluster.brokers)))
        await eventually("the alert", partial(fires, "DledgerMemberDown"))
        await eventually("the alert", partial(fires, "DledgerPeerDisconnected"))
    finally:
        process.terminate()
        await trio.to_thread.run_sync(process.wait)


async def test_daemons_report_to_the_service_manager(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.settimeout(60)
        ports = free_ports(2)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "HOME": str(tmp_path)}
        for command in (
            ["namesrv", "--listen-port", str(ports[0])],
            [
                *("broker", "--listen-port", str(ports[1]), "--store", str(tmp_path / "n0")),
                *("--set", f"raft.peers=n0-127.0.0.1:{free_ports(3)[2]}"),
                *("--set", "store.mapped_file_size_commit_log=16 MiB"),
            ],
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "dledger", *command],
                env=environment,
                stderr=subprocess.DEVNULL,
            )
            try:
                assert await trio.to_thread.run_sync(bound.recv, 100) == b"READY=1"
                process.terminate()
                assert await trio.to_thread.run_sync(bound.recv, 100) == b"STOPPING=1"
                assert await trio.to_thread.run_sync(process.wait) == 0
            finally:
                process.kill()
