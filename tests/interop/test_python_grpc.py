"""Apache's Python client 5.1.2 of the gRPC protocol, through `dledger-proxy`, over three brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.client.connect import connect
from tests.harness.cluster_questions import create_topic
from tests.harness.foreign_client import GRPC_PYTHON, SCRIPTS, foreign_client, needs_grpc_python
from tests.harness.grpc_clients import (
    LOOK_S,
    answered,
    cluster_with_proxies,
    exchange_every_kind,
    exchange_in_order,
    lose_nothing,
)
from tests.harness.shipped_files import ROOT
from tests.harness.stored_messages import committed_behind, stored_in

pytestmark = [pytest.mark.slow, needs_grpc_python]

SCRIPT = "grpc_python.py"
PARTS = ("receive", "push")


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, SCRIPT, *arguments, command=(GRPC_PYTHON, SCRIPTS / SCRIPT))


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS)


@pytest.mark.hunt
async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path, 2) as cluster:
        endpoints = ";".join(node.address for node in cluster.proxies.values())
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "proxy0")


async def test_example_of_the_guide_prints_its_order(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "grpc-clients.md").read_text()
    (code,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    async with cluster_with_proxies(tmp_path) as cluster:
        await create_topic([cluster.namesrv_address], "orders", queues=4)
        address = cluster.proxies["proxy0"].address
        assert "127.0.0.1:8081" in code
        done = await trio.run_process(
            [str(GRPC_PYTHON), "-"],
            stdin=code.replace("127.0.0.1:8081", address).encode(),
            capture_stdout=True,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
    assert done.stdout.decode().splitlines()[-1] == "an order from Python"


@pytest.mark.hunt
async def test_slow_listener_keeps_its_message(tmp_path: Path) -> None:
    """Its time is 60 s, and it is renewed while the client is there."""
    async with cluster_with_proxies(tmp_path, queues=1) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        async with (
            client(tmp_path / "producer", "produce", endpoints, "Orders") as producer,
            client(tmp_path / "one", "push", endpoints, "slow", "Orders", "*", "66") as one,
            client(tmp_path / "two", "push", endpoints, "slow", "Orders", "*", "66") as two,
        ):
            sent = await answered(producer, "slow")
            done = {"waited": sent["message_id"]}
            with trio.fail_after(100):
                while done not in one.lines and done not in two.lines:
                    await trio.sleep(LOOK_S)
            async with connect([cluster.namesrv_address]) as sdk:
                stored = (await stored_in(sdk, "Orders"))["slow"]
                await committed_behind(sdk, "slow", "Orders", [stored])
        assert [line["attempt"] for line in (*one.messages, *two.messages)] == [1]


@pytest.mark.hunt
async def test_message_groups_are_consumed_in_order(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        await exchange_in_order(tmp_path, client, cluster)
