"""The cluster under test: NameServers and brokers as processes of the runner.

On loopback all processes get the ports of the runner's proxy; in a network of the run's own every
process has a namespace and real ports. Every broker has a clock the runner steers, and a data
folder that may be a file system of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from dledger.cli.local_cluster import SECRET_FILE, LocalCluster, Node, settings_document
from dledger.cli.ports import free_ports
from dledger.cli.secret_file import make_secret
from dledger.jepsen_like.chaos.broker_child import ClockFile
from dledger.jepsen_like.chaos.namespaces import LOOPBACK, Host
from dledger.jepsen_like.chaos.proxy import Target
from dledger.jepsen_like.plans.plan import Plan, Settings
from dledger.jepsen_like.workloads.transactions import broker_settings

GROUP: Final = "chaos"
CLIENTS: Final = "clients"
"""The proxy's name for all that connect to a broker as a client."""

MESSAGE_BYTES_MAX: Final = 1 << 20
EXPIRY_REGISTRATIONS: Final = 4
"""Missed registrations after which a broker is unlisted; RocketMQ's ratio."""

SCAN_MS_MIN: Final = 100
SCRUB_BYTES_PER_S: Final = 32 << 20
"""A log of a run is read through within seconds, so that rot is found while it matters."""


@dataclass(slots=True)
class Ports:
    """The ports of a process: those it listens on, and those that others connect to.

    *peer*, *peer_dialled*: for members.
    """

    host: Host
    client: int
    client_dialled: Mapping[str, int]
    peer: int = 0
    peer_dialled: int = 0

    def client_address(self, source: str) -> str:
        """Return the ``host:port`` that *source* connects to as a client."""
        return f"{self.host.address}:{self.client_dialled[source]}"

    @property
    def peer_address(self) -> str:
        """The ``host:port`` that members connect to."""
        return f"{self.host.address}:{self.peer_dialled}"


@dataclass(slots=True)
class ChaosCluster(LocalCluster):
    """All processes of a run. Get it from `lay_out`; nothing runs yet.

    *name_servers*: by name; the first is `namesrv`.
    """

    name_servers: dict[str, Node] = field(default_factory=dict)
    ports: dict[str, Ports] = field(default_factory=dict)
    clocks: dict[str, ClockFile] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """Every process."""
        return [*self.name_servers.values(), *self.brokers.values(), *self.proxies.values()]

    @property
    def namesrv_addresses(self) -> tuple[str, ...]:
        """``host:port`` of each NameServer, for clients."""
        return self.namesrv_addresses_for(CLIENTS)

    def namesrv_addresses_for(self, source: str) -> tuple[str, ...]:
        """``host:port`` of each NameServer, for *source*."""
        return tuple(self.ports[name].client_address(source) for name in self.name_servers)

    def targets(self) -> dict[int, Target]:
        """Return what the proxy stands for: port to listen on, and the process behind it."""
        found: dict[int, Target] = {}
        for name, ports in self.ports.items():
            host = ports.host.address
            if name in self.brokers:
                found[ports.peer_dialled] = Target(name, host, ports.peer, None)
            for source, port in ports.client_dialled.items():
                found[port] = Target(name, host, ports.client, source)
        return found

    def be_ahead(self, name: str, versions: int) -> None:
        """Let a broker speak a protocol *versions* newer from its next start on."""
        node = self.brokers[name]
        node.arguments = (*node.arguments[:-1], str(versions))

    async def stop_all(self) -> None:
        """Stop brokers and proxies at the same time, then the NameServers.

        Cancellation: Runs even when cancelled.
        """
        with trio.CancelScope(shield=True):
            for node in self.nodes:
                if node.running and node.process is not None:
                    node.process.send_signal(signal.SIGCONT)
            async with trio.open_nursery() as nursery:
                for name in (*self.proxies, *self.brokers):
                    nursery.start_soon(self.stop, name)
            for name in self.name_servers:
                await self.stop(name)

    def _node(self, name: str) -> Node:
        return self.name_servers.get(name) or self.brokers.get(name) or self.proxies[name]


def broker_names(plan: Plan) -> list[str]:
    """Return the names of the brokers that *plan* asks for."""
    return [f"n{number}" for number in range(plan.members)]


def name_server_names(plan: Plan) -> list[str]:
    """Return the names of its NameServers."""
    return [f"ns{number}" for number in range(plan.name_servers)]


def proxy_names(plan: Plan) -> list[str]:
    """Return the names of the proxies of the gRPC protocol that its clients go through."""
    return [f"proxy{number}" for number in range(plan.workload.proxies)]


def lay_out(
    folder: Path,
    plan: Plan,
    *,
    hosts: Mapping[str, Host] | None = None,
    stores: Mapping[str, Path] | None = None,
    settings: Mapping[str, object] | None = None,
    tree: Path | None = None,
) -> ChaosCluster:
    """Write the configuration of the cluster that *plan* asks for.

    *stores*: data folder of each broker.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names, server_names = broker_names(plan), name_server_names(plan)
    ports = _ports(names, server_names, hosts)
    name_servers = {
        name: _name_server(folder, name, ports[name], plan.settings) for name in server_names
    }
    cluster = ChaosCluster(folder, name_servers["ns0"], name_servers=name_servers, ports=ports)
    for name in names:
        clock = cluster.clocks[name] = ClockFile(folder / f"{name}.clock")
        store = (stores or {}).get(name, folder / name)
        values = {**_values(cluster, name, store, plan), **(settings or {})}
        config = folder / f"{name}.toml"
        config.write_text(settings_document(values))
        host, arguments = ports[name].host, (str(config), str(clock.path), "0")
        cluster.brokers[name] = Node(
            name,
            f"{host.watch_address}:{ports[name].client}",
            log_path=folder / f"{name}.log",
            store_path=store,
            config_path=config,
            group=GROUP,
            tree=tree,
            **_program(host, "dledger.jepsen_like.chaos.broker_child", arguments),
        )
    for name, port in zip(proxy_names(plan), free_ports(plan.workload.proxies), strict=True):
        cluster.proxies[name] = _proxy(cluster, name, port)
    return cluster


def _proxy(cluster: ChaosCluster, name: str, port: int) -> Node:
    """Return a proxy on the machine of the clients: it is one towards brokers."""
    address = f"{LOOPBACK.address}:{port}"
    name_servers = ";".join(cluster.namesrv_addresses)
    arguments = ("proxy", "--namesrv", name_servers, "--listen", address, "--log-form", "json")
    return Node(name, address, arguments, cluster.folder / f"{name}.log")


def _ports(
    names: Sequence[str], server_names: Sequence[str], hosts: Mapping[str, Host] | None
) -> dict[str, Ports]:
    """Return where everybody listens; a proxy gets a port for every pair it has to tell apart."""
    sources = [CLIENTS, *names]
    reported = 0 if hosts else len(server_names) * len(sources) + 2 * len(names)
    free = iter(free_ports(len(server_names) + 2 * len(names) + reported))
    found: dict[str, Ports] = {}
    for name in (*server_names, *names):
        dialled_by = sources if name in server_names else [CLIENTS]
        port, peer = next(free), next(free) if name in names else 0
        if hosts:
            found[name] = Ports(hosts[name], port, dict.fromkeys(dialled_by, port), peer, peer)
        else:
            client_dialled = {source: next(free) for source in dialled_by}
            found[name] = Ports(LOOPBACK, port, client_dialled, peer, next(free) if peer else 0)
    return found


def _program(host: Host, module: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return what a node on *host* is started with."""
    if host.namespace is None:
        return {"module": module, "arguments": arguments}
    inside = "dledger.jepsen_like.chaos.namespaces"
    return {"module": inside, "arguments": (str(host.namespace), module, *arguments)}


def _listen_host(host: Host) -> str:
    """Loopback and no more; inside a namespace both addresses it has."""
    return host.address if host.namespace is None else "0.0.0.0"


def _name_server(folder: Path, name: str, ports: Ports, settings: Settings) -> Node:
    config = folder / f"{name}.toml"
    config.write_text(
        settings_document(
            {
                "server.listen_host": _listen_host(ports.host),
                "server.listen_port": ports.client,
                "namesrv.kv_config_path": str(folder / name / "kvConfig.json"),
                "namesrv.broker_expiry_ms": EXPIRY_REGISTRATIONS * settings.register_ms,
                "namesrv.scan_interval_ms": max(SCAN_MS_MIN, settings.register_ms // 3),
            }
        )
    )
    return Node(
        name,
        f"{ports.host.watch_address}:{ports.client}",
        log_path=folder / f"{name}.log",
        config_path=config,
        **_program(ports.host, "dledger", ("namesrv", "-c", str(config))),
    )


def _secret_for(cluster: ChaosCluster, host: Host) -> str:
    """Return the file of the secret that members share; empty on loopback, where none is needed."""
    if host.namespace is None:
        return ""
    secret = cluster.folder / SECRET_FILE
    if not secret.exists():
        make_secret(secret)
    return str(secret)


def _values(cluster: ChaosCluster, name: str, store: Path, plan: Plan) -> dict[str, Any]:
    ports, settings = cluster.ports[name], plan.settings
    peers = ";".join(f"{peer}-{at.peer_address}" for peer, at in cluster.ports.items() if at.peer)
    return {
        "broker.cluster_name": "Chaos",
        "broker.broker_name": GROUP,
        "broker.namesrv_addr": ";".join(cluster.namesrv_addresses_for(name)),
        "broker.broker_ip1": ports.host.address,
        "broker.advertised_port": ports.client_dialled[CLIENTS],
        "server.listen_host": _listen_host(ports.host),
        "server.listen_port": ports.client,
        # In namespaces the runner, which changes members, is another machine.
        "server.open_admin": True,
        "client.register_interval_ms": settings.register_ms,
        "broker.lock_lease_ms": settings.lock_lease_ms,
        "store.path_root_dir": str(store),
        "store.mapped_file_size_commit_log": settings.segment_bytes,
        "store.mapped_file_size_consume_queue": 20 * settings.queue_units,
        "store.max_message_size": min(MESSAGE_BYTES_MAX, settings.segment_bytes // 4),
        "store.message_delay_level": settings.delay_levels,
        "store.flush_disk_type": "SYNC_FLUSH" if settings.sync_flush else "ASYNC_FLUSH",
        "store.keep_bytes": settings.keep_segments * settings.segment_bytes,
        "store.scrub_bytes_per_s": SCRUB_BYTES_PER_S,
        "raft.group": GROUP,
        "raft.self_id": name,
        "raft.peers": peers,
        "raft.secret_file": _secret_for(cluster, ports.host),
        "raft.listen_port": ports.peer,
        "raft.election_timeout_ms": settings.election_ms,
        "raft.heartbeat_interval_ms": settings.heartbeat_ms,
        "raft.append_bytes": settings.append_bytes,
        "raft.max_entry_bytes": settings.segment_bytes // 2,
        "raft.checkpoint_interval_ms": settings.checkpoint_ms,
        **broker_settings(plan.workload),
    }
