"""Apache's Go client 5.1.2 of the gRPC protocol, through `dledger-proxy` with TLS.

The client is not changed in any way; it comes from its registry. It has no push consumer and no
recall, and speaks nothing but TLS. Real processes and sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from dledger.cli.local_cluster import LocalCluster, Node
from dledger.cli.ports import free_ports
from tests.harness.foreign_client import GRPC_GO, foreign_client, needs_grpc_go
from tests.harness.grpc_clients import cluster_with_proxies, exchange_every_kind, lose_nothing

pytestmark = [pytest.mark.slow, needs_grpc_go, pytest.mark.timeout(480)]

PARTS = ("receive",)


def client(folder: Path, *arguments: str) -> Any:
    """Start the client in one of its parts."""
    return foreign_client(folder, "grpc_go", *arguments, command=(GRPC_GO,))


@asynccontextmanager
async def cluster_with_tls(folder: Path) -> AsyncIterator[LocalCluster]:
    """Run brokers, and a proxy ``tls0`` that speaks TLS."""
    server = trustme.CA().issue_cert("127.0.0.1")
    key, chain = folder / "key.pem", folder / "chain.pem"
    server.private_key_pem.write_to_path(key)
    for part in server.cert_chain_pems:
        part.write_to_path(chain, append=True)
    config = folder / "proxy.toml"
    config.write_text(f"[server]\ntls_cert_file = '{chain}'\ntls_key_file = '{key}'\n")
    async with cluster_with_proxies(folder, 0) as cluster:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        options = ("-c", str(config), "--namesrv", cluster.namesrv_address, "--listen", address)
        log = cluster.folder / "tls0.log"
        cluster.proxies["tls0"] = Node("tls0", address, ("proxy", *options), log)
        await cluster.start("tls0")
        await cluster.wait_proxies()
        yield cluster


async def test_every_kind_of_message_arrives_as_sent(tmp_path: Path) -> None:
    async with cluster_with_tls(tmp_path) as cluster:
        endpoints = cluster.proxies["tls0"].address
        await exchange_every_kind(tmp_path, client, endpoints, PARTS, recalls=False)


async def test_nothing_is_lost_when_leader_and_proxy_die(tmp_path: Path) -> None:
    """All calls of the client wait while it dials an address that is dead: there is one alone."""
    async with cluster_with_tls(tmp_path) as cluster:
        endpoints = cluster.proxies["tls0"].address
        await lose_nothing(tmp_path, client, cluster, endpoints, PARTS, "tls0", again=True)
