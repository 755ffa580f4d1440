"""Apache's Node.js client of the gRPC protocol, through `dledger-proxy`, over three brokers.

The client is not changed in any way; it comes from its registry. Real processes and sockets.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.foreign_client import foreign_client, needs_grpc_node
from tests.harness.grpc_clients import cluster_with_proxies, exchange_every_kind, lose_nothing

pytestmark = [pytest.mark.slow, needs_grpc_node]

PARTS = ("receive", "push")


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, "grpc_node.mjs", *arguments)


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS)


@pytest.mark.hunt
async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    """Several addresses make no target that the client's gRPC takes: there is one alone."""
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "proxy0", again=True)
