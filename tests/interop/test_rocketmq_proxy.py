"""RocketMQ's own proxy 5.5.0, in cluster mode, before three real brokers of ours.

Neither it nor its clients are changed in any way: Apache's Python and Node.js clients of the gRPC
protocol, and the Java client of the remoting protocol, to which it is a NameServer and a broker.
"""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.ports import free_ports, is_free
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from tests.harness.foreign_client import (
    GRPC_PYTHON,
    SCRIPTS,
    foreign_client,
    java_jars,
    needs_grpc_node,
    needs_grpc_python,
    needs_java,
)
from tests.harness.grpc_clients import end_transactions, exchange_every_kind, lose_nothing
from tests.harness.java_remoting import java_client
from tests.harness.remoting_clients import QUICK_CHECKS, TOPIC
from tests.harness.remoting_clients import exchange_every_kind as exchange_by_remoting

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_java]

PARTS = ("receive", "push")
PAYMENTS = "Payments"


VERSION = "5.5.0"
START_S = 90.0
"""It loads some thousand classes, and makes a topic at the brokers first."""

LOOK_S = 0.1


class RocketMqProxy:
    """One process, at the same ports each time it is started. Get it from `rocketmq_proxy`."""

    def __init__(self, folder: Path, namesrv: str) -> None:
        self._grpc_port, self._remoting_port = free_ports(2)
        self.address = f"127.0.0.1:{self._grpc_port}"
        """Of the gRPC protocol."""
        self.remoting_address = f"127.0.0.1:{self._remoting_port}"
        """Of the remoting protocol: a NameServer and a broker at once."""
        self.log = folder / "stdout.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "proxyMode": "CLUSTER",
            "namesrvAddr": namesrv,
            "grpcServerPort": self._grpc_port,
            "remotingListenPort": self._remoting_port,
            "localServeAddr": "127.0.0.1",
            "remotingAccessAddr": "127.0.0.1",
            # The defaults are 20 s: how long it sends to a leader of before.
            "topicRouteServiceCacheRefreshSeconds": 1,
            "transactionHeartbeatPeriodSecond": 1,
        }
        (folder / "conf").mkdir(parents=True)
        self._config = folder / "conf" / "rmq-proxy.json"
        self._config.write_text(json.dumps(settings))

    async def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            AssertionError: It ended, or did not serve in time; with the end of what it printed.
        """
        jars = f"{java_jars(VERSION)}/*"
        home = f"-Duser.home={self._folder}"
        command = ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", home, "-cp", jars]
        program = ["org.apache.rocketmq.proxy.ProxyStartup", "-pc", str(self._config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "RMQ_PROXY_HOME": str(self._folder)},
                start_new_session=True,
            )
        with trio.move_on_after(START_S) as waited:
            while is_free(self._grpc_port) or is_free(self._remoting_port):
                if self._process.poll() is not None:
                    break
                await trio.sleep(LOOK_S)
        if waited.cancelled_caught or self._process.poll() is not None:
            raise AssertionError(f"the proxy does not serve: {self.log.read_text()[-3000:]}")

    async def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            await trio.to_thread.run_sync(self._process.wait)


@asynccontextmanager
async def rocketmq_proxy(folder: Path, namesrv: str) -> AsyncIterator[RocketMqProxy]:
    """Run a proxy while the block runs.

    Args:
        folder: Its home, made here; its logs are in it.
    """
    proxy = RocketMqProxy(folder, namesrv)
    try:
        await proxy.start()
        yield proxy
    finally:
        with trio.CancelScope(shield=True):
            await proxy.kill()


def python_client(folder: Path, *arguments: str) -> Any:
    """Start Apache's Python client in one of its parts."""
    script = "grpc_python.py"
    return foreign_client(folder, script, *arguments, command=(GRPC_PYTHON, SCRIPTS / script))


def node_client(folder: Path, *arguments: str) -> Any:
    """Start Apache's Node.js client in one of its parts."""
    return foreign_client(folder, "grpc_node.mjs", *arguments)


@asynccontextmanager
async def cluster_behind_a_proxy(folder: Path) -> AsyncIterator[tuple[LocalCluster, RocketMqProxy]]:
    """Run three brokers and RocketMQ's proxy.

    There is a topic for messages of all types, and one for transactions: the proxy lets brokers ask
    about those of such a topic alone.
    """
    async with local_cluster(folder / "cluster", settings=QUICK_CHECKS) as cluster:
        async with connect([cluster.namesrv_address]) as sdk:
            for topic, kind in ((TOPIC, "MIXED"), (PAYMENTS, "TRANSACTION")):
                types = {"message.type": kind}
                await Admin(sdk).create_topic(topic, queue_nums=4, attributes=types)
        async with rocketmq_proxy(folder / "proxy", cluster.namesrv_address) as proxy:
            yield cluster, proxy


@needs_grpc_python
async def test_every_kind_arrives_as_the_python_client_sent(tmp_path: Path) -> None:
    async with cluster_behind_a_proxy(tmp_path) as (_, proxy):
        await exchange_every_kind(tmp_path, python_client, proxy.address, PARTS, asked_back=False)
        await end_transactions(tmp_path, python_client, proxy.address, PAYMENTS)


@needs_grpc_node
async def test_every_kind_arrives_as_the_node_client_sent(tmp_path: Path) -> None:
    async with cluster_behind_a_proxy(tmp_path) as (_, proxy):
        await exchange_every_kind(tmp_path, node_client, proxy.address, PARTS, asked_back=False)
        await end_transactions(tmp_path, node_client, proxy.address, PAYMENTS)


async def test_every_kind_arrives_as_the_java_client_sent(tmp_path: Path) -> None:
    """Of this protocol the proxy passes no first decision on: brokers ask back for each."""
    client = java_client("5.5.0", tmp_path / "classes")
    async with cluster_behind_a_proxy(tmp_path) as (cluster, proxy):
        namesrv = cluster.namesrv_address
        await exchange_by_remoting(
            tmp_path, client, namesrv, proxy.remoting_address, decisions=("commit", "leave")
        )


@needs_grpc_python
async def test_nothing_is_lost_when_the_leader_dies(tmp_path: Path) -> None:
    """Behind a proxy that starts again this client has no settings there for five minutes."""
    async with cluster_behind_a_proxy(tmp_path) as (cluster, proxy):
        await lose_nothing(tmp_path, python_client, cluster, proxy.address, PARTS)
