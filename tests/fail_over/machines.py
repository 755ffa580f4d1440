"""Each member on a machine of its own, and keepalived on each, as `deploy/keepalived` has it.

::

    n0 ─ eth0 10.0.0.1 ─┐
    n1 ─ eth0 10.0.0.2 ─┼─ bridge 10.0.0.254: NameServer, proxy and clients
    n2 ─ eth0 10.0.0.3 ─┘

A machine is a network namespace. Needs root, keepalived, curl, and `ip` and `ss` of iproute2.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import trio

from dledger.cli.local_cluster import LocalCluster, lay_out
from dledger.jepsen_like.chaos.namespaces import enter, entered, new_namespace
from tests.harness.deployed_files import DEPLOY

CLIENTS = "10.0.0.254"
MEMBERS = {"n0": "10.0.0.1", "n1": "10.0.0.2", "n2": "10.0.0.3"}
NAMESRV_PORT, PORT, PEER_PORT, METRICS_PORT = 9876, 10911, 10912, 5557
LEADER_ADDRESS = f"10.0.0.9:{PORT}"
"""As in the file of keepalived."""

MODULE = "dledger.jepsen_like.chaos.namespaces"
Machines = Mapping[str, Path]
"""Namespace of each member."""


def _order(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


@contextmanager
def machines() -> Iterator[Machines]:
    """Make the machines, and be on that of the clients from then on."""
    with ExitStack() as stack:
        clients = stack.enter_context(new_namespace())
        spaces = {name: stack.enter_context(new_namespace()) for name in MEMBERS}
        enter(clients)
        _order("link set lo up", "link add br0 type bridge", f"addr add {CLIENTS}/24 dev br0")
        _order("link set br0 up")
        for name, address in MEMBERS.items():
            _order(
                f"link add {name} type veth peer name eth0 netns {spaces[name]}",
                f"link set {name} master br0",
                f"link set {name} up",
            )
            with entered(spaces[name]):
                _order("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
        yield spaces


@asynccontextmanager
async def cluster_on_machines(
    folder: Path, spaces: Machines, settings: Mapping[str, object], proxy_port: int
) -> AsyncIterator[LocalCluster]:
    """Run a cluster, each member on its machine, and keepalived beside each."""
    peers = ";".join(f"{name}-{address}:{PEER_PORT}" for name, address in MEMBERS.items())
    there = {
        "raft.peers": peers,
        "server.listen_host": "0.0.0.0",
        "server.open_admin": True,  # the clients' machine moves leadership
        "metrics.listen_port": METRICS_PORT,
        "broker.leader_address": LEADER_ADDRESS,
    }
    cluster = lay_out(
        folder,
        host=CLIENTS,
        settings={**settings, **there},
        ports=[NAMESRV_PORT, *[PORT, PEER_PORT] * len(MEMBERS)],
        proxies=[proxy_port],
    )
    async with trio.open_nursery() as nursery:
        for name, node in cluster.brokers.items():
            own = "--set", f"broker.broker_ip1={MEMBERS[name]}"
            node.arguments = str(spaces[name]), node.module, *node.arguments, *own
            node.module, node.address = MODULE, f"{MEMBERS[name]}:{PORT}"
            nursery.start_soon(partial(_keep_alive, folder / f"{name}.keepalived", spaces[name]))
        try:
            for node in cluster.nodes:
                await cluster.start(node.name)
            await cluster.wait_healthy()
            await cluster.wait_proxies()
            yield cluster
        finally:
            await cluster.stop_all()
            nursery.cancel_scope.cancel()


async def _keep_alive(files: Path, space: Path) -> None:
    files.mkdir()
    pids = "-p", str(files / "pid"), "-r", str(files / "vrrp.pid")
    config = str(DEPLOY / "keepalived" / "keepalived.conf")
    command = ("nsenter", f"--net={space}", "keepalived", "-n", "-l", "-D", *pids, "-f", config)
    with (files / "log").open("wb") as log:
        await trio.run_process(command, stdout=log, stderr=subprocess.STDOUT)
