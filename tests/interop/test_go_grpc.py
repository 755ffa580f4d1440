"""Apache's Go client 5.1.2 of the gRPC protocol, through `dledger-proxy` with TLS.

The client is not changed in any way; it comes from its registry. It has no push consumer and no
recall, and speaks nothing but TLS. Real processes and sockets.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.foreign_client import GRPC_GO, foreign_client, needs_grpc_go
from tests.harness.grpc_clients import cluster_with_tls, exchange_every_kind, lose_nothing

pytestmark = [pytest.mark.slow, pytest.mark.hunt, needs_grpc_go]

PARTS = ("receive",)


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, "grpc_go", *arguments, command=(GRPC_GO,))


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_tls(tmp_path) as cluster:
        endpoints = cluster.proxies["tls0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS, recalls=False)


async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    """All calls of the client wait while it dials an address that is dead: there is one alone."""
    async with cluster_with_tls(tmp_path) as cluster:
        endpoints = cluster.proxies["tls0"].address
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "tls0", again=True)
