"""The cluster under test: NameServers and brokers as processes of the runner, on loopback.

Members and clients are told the ports of the runner's proxy, never those a broker has bound, so
every link goes through it. Every broker has a clock the runner steers, and a data folder that may
be a file system of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from dledger.cli.local_cluster import LocalCluster, Node, free_ports, settings_document
from jepsen_like.chaos.proxy import Target
from jepsen_like.chaos.steered_clock import ClockFile
from jepsen_like.plans.plan import Plan

GROUP: Final = "chaos"
CLIENTS: Final = "clients"
"""Under this name the proxy knows everybody who speaks to a broker as a client."""

MESSAGE_BYTES_MAX: Final = 1 << 20
SCRUB_BYTES_PER_S: Final = 32 << 20
"""A log of a run is read through within seconds, so that rot is found while it matters."""


@dataclass(slots=True)
class Ports:
    """Where one broker listens, and where others are told it does."""

    client: int
    client_told: int
    peer: int
    peer_told: int


@dataclass(slots=True)
class ChaosCluster(LocalCluster):
    """All processes of a run. Get it from `lay_out`; nothing runs yet.

    Attributes:
        name_servers: By name; the first is `namesrv`.
        ports: Of each broker.
        clocks: Of each broker.
    """

    name_servers: dict[str, Node] = field(default_factory=dict)
    ports: dict[str, Ports] = field(default_factory=dict)
    clocks: dict[str, ClockFile] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """Every process."""
        return [*self.name_servers.values(), *self.brokers.values()]

    @property
    def namesrv_addresses(self) -> tuple[str, ...]:
        """``host:port`` of each NameServer, for clients."""
        return tuple(node.address for node in self.name_servers.values())

    def targets(self) -> dict[int, Target]:
        """Return what the proxy stands for: port to listen on, and who is behind it."""
        found: dict[int, Target] = {}
        for name, ports in self.ports.items():
            found[ports.peer_told] = Target(name, "127.0.0.1", ports.peer, None)
            found[ports.client_told] = Target(name, "127.0.0.1", ports.client, CLIENTS)
        return found

    async def stop_all(self) -> None:
        """Stop the brokers at the same time, then the NameServers. Runs even when cancelled."""
        with trio.CancelScope(shield=True):
            for node in self.nodes:
                if node.running and node.process is not None:
                    node.process.send_signal(signal.SIGCONT)
            async with trio.open_nursery() as nursery:
                for name in self.brokers:
                    nursery.start_soon(self.stop, name)
            for name in self.name_servers:
                await self.stop(name)

    def _node(self, name: str) -> Node:
        return self.name_servers.get(name) or self.brokers[name]


def lay_out(
    folder: Path,
    plan: Plan,
    *,
    stores: Mapping[str, Path] | None = None,
    settings: Mapping[str, object] | None = None,
    mutant: int = 0,
) -> ChaosCluster:
    """Write the configuration of the cluster that *plan* asks for.

    Args:
        folder: Holds configuration, logs and, unless *stores* says otherwise, data.
        stores: Data folder of each broker.
        settings: Over those of the plan, ``table.name`` to value.
        mutant: Opaque number of a change every broker is started with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"n{number}" for number in range(plan.members)]
    ports = iter(free_ports(plan.name_servers + 4 * len(names)))
    name_servers = {
        node.name: node
        for node in (_name_server(folder, f"ns{i}", next(ports)) for i in range(plan.name_servers))
    }
    cluster = ChaosCluster(folder, name_servers["ns0"], name_servers=name_servers)
    cluster.ports = {
        name: Ports(next(ports), next(ports), next(ports), next(ports)) for name in names
    }
    for name in names:
        clock = cluster.clocks[name] = ClockFile(folder / f"{name}.clock")
        store = (stores or {}).get(name, folder / name)
        values = {**_values(cluster, name, store, plan), **(settings or {})}
        config = folder / f"{name}.toml"
        config.write_text(settings_document(values))
        cluster.brokers[name] = Node(
            name,
            f"127.0.0.1:{cluster.ports[name].client}",
            (str(config), str(clock.path), str(mutant)),
            folder / f"{name}.log",
            store_path=store,
            config_path=config,
            module="jepsen_like.chaos.broker_child",
        )
    return cluster


def _name_server(folder: Path, name: str, port: int) -> Node:
    config = folder / f"{name}.toml"
    config.write_text(
        settings_document(
            {
                "server.listen_host": "127.0.0.1",
                "server.listen_port": port,
                "namesrv.kv_config_path": str(folder / name / "kvConfig.json"),
            }
        )
    )
    arguments = ("namesrv", "-c", str(config))
    return Node(name, f"127.0.0.1:{port}", arguments, folder / f"{name}.log", config_path=config)


def _values(cluster: ChaosCluster, name: str, store: Path, plan: Plan) -> dict[str, Any]:
    ports, settings = cluster.ports[name], plan.settings
    peers = ";".join(f"{peer}-127.0.0.1:{p.peer_told}" for peer, p in cluster.ports.items())
    return {
        "broker.cluster_name": "Chaos",
        "broker.broker_name": GROUP,
        "broker.namesrv_addr": ";".join(cluster.namesrv_addresses),
        "broker.advertised_port": ports.client_told,
        "server.listen_host": "127.0.0.1",
        "server.listen_port": ports.client,
        "client.register_interval_ms": settings.register_ms,
        "store.path_root_dir": str(store),
        "store.mapped_file_size_commit_log": settings.segment_bytes,
        "store.mapped_file_size_consume_queue": 20 * settings.queue_units,
        "store.max_hash_slot_num": 65_536,
        "store.max_index_num": 262_144,
        "store.max_message_size": min(MESSAGE_BYTES_MAX, settings.segment_bytes // 4),
        "store.message_delay_level": settings.delay_levels,
        "store.flush_disk_type": "SYNC_FLUSH" if settings.sync_flush else "ASYNC_FLUSH",
        "store.keep_bytes": settings.keep_segments * settings.segment_bytes,
        "store.scrub_bytes_per_s": SCRUB_BYTES_PER_S,
        "raft.group": GROUP,
        "raft.self_id": name,
        "raft.peers": peers,
        "raft.listen_port": ports.peer,
        "raft.election_timeout_ms": settings.election_ms,
        "raft.heartbeat_interval_ms": settings.heartbeat_ms,
        "raft.append_bytes": settings.append_bytes,
        "raft.max_entry_bytes": settings.segment_bytes // 2,
        "raft.checkpoint_interval_ms": settings.checkpoint_ms,
    }
