"""Apache's Rust client 5.0.0 of the gRPC protocol, through `dledger-proxy`, over three brokers.

The client is not changed in any way; it comes from its registry. It has no push consumer, no
recall, no TLS, and no call that changes an invisible time. Real processes and sockets.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.foreign_client import GRPC_RUST, foreign_client, needs_grpc_rust
from tests.harness.grpc_clients import cluster_with_proxies, exchange_every_kind, lose_nothing

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_grpc_rust]

PARTS = ("receive",)


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, "grpc_rust", *arguments, command=(GRPC_RUST,))


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path) as cluster:
        endpoints = cluster.proxies["proxy0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS, recalls=False)


async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    async with cluster_with_proxies(tmp_path, 2) as cluster:
        endpoints = ",".join(node.address for node in cluster.proxies.values())
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "proxy0")
