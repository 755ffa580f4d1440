"""Three replicas on loopback: NATS, RocketMQ and ours, each started, killed and stopped alike."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from dledger.cli.commands import open_admin
from dledger.cli.local_cluster import LocalCluster, local_cluster, namesrv_leaders
from dledger.cli.ports import free_ports, is_free
from dledger.output import CliError
from tools.bench.processes import Program, run_program
from tools.bench.tools import SOURCES, Tools

TOPIC: Final = "peers"
QUEUES: Final = 4
READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.2
GROUP: Final = "RaftNode00"
SEGMENT_BYTES: Final = 256 << 20

JAVA_OPENS: Final = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)
"""What RocketMQ's own start scripts open to it."""

BROKER_HEAP: Final = "2g"
"""RocketMQ's script gives 8 GiB, more than three brokers can have on one small machine."""


class Cluster(Protocol):
    """Three replicas that run.

    Attributes:
        address: For clients.
    """

    address: str

    def pids(self) -> list[int]:
        """Return the process ids of the brokers; a NameServer is none."""

    async def leader(self) -> str:
        """Return the name of the leader when all three replicas are in step."""

    async def kill(self, name: str) -> None:
        """Send SIGKILL to a replica and wait until it has ended."""

    async def restart(self, name: str) -> None:
        """Start a killed replica again."""


class _Programs:
    """Replicas that are programs of others."""

    def __init__(self, address: str, brokers: dict[str, Program]) -> None:
        self.address = address
        self.brokers = brokers

    def pids(self) -> list[int]:
        return [broker.pid for broker in self.brokers.values() if broker.running]

    async def kill(self, name: str) -> None:
        await self.brokers[name].kill()

    async def restart(self, name: str) -> None:
        self.brokers[name].start()

    async def listening(self, ports: list[int]) -> None:
        """Wait until each port takes connections.

        Raises:
            CliError: Not in time, or a replica has ended.
        """
        with trio.move_on_after(READY_TIMEOUT_S):
            while not all(map(_listens, ports)):
                self.check()
                await trio.sleep(POLL_S)
            return
        raise CliError(f"not all replicas listen within {READY_TIMEOUT_S:g} s")

    def check(self) -> None:
        for broker in self.brokers.values():
            if not broker.running:
                raise CliError(f"{broker.name} has ended: {broker.last_line()}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class _Nats(_Programs):
    def __init__(self, address: str, brokers: dict[str, Program], tools: Tools, log: Path) -> None:
        super().__init__(address, brokers)
        self._ask = [str(tools.nats_load), "leader", address, TOPIC, "1", "1", "1", "0", "0", "0"]
        self._log = log

    async def leader(self) -> str:
        lines = await run_program("the NATS client", self._ask, self._log, READY_TIMEOUT_S)
        return lines[-1].removeprefix("leader ")


@asynccontextmanager
async def nats(folder: Path, tools: Tools, *, sync_interval: str) -> AsyncIterator[Cluster]:
    """Run three NATS servers with JetStream.

    Args:
        sync_interval: ``always``: every write is flushed before its acknowledgement; empty: the
            default of NATS, every two minutes.
    """
    ports = free_ports(6)
    clients, peers = ports[:3], ports[3:]
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in peers)
    brokers: dict[str, Program] = {}
    for place in range(3):
        name = f"n{place}"
        sync = f", sync_interval: {sync_interval}" if sync_interval else ""
        config = folder / f"{name}.conf"
        config.write_text(
            f"server_name: {name}\n"
            f"listen: 127.0.0.1:{clients[place]}\n"
            f'jetstream {{ store_dir: "{folder / name}"{sync} }}\n'
            f"cluster {{ name: c, listen: 127.0.0.1:{peers[place]}, routes: [{routes}] }}\n"
        )
        argv = [str(tools.nats_server), "-c", str(config)]
        brokers[name] = Program(f"nats-server {name}", argv, folder / f"{name}.log")
    address = ",".join(f"nats://127.0.0.1:{port}" for port in clients)
    cluster = _Nats(address, brokers, tools, folder / "client.log")
    try:
        for broker in brokers.values():
            broker.start()
        await cluster.listening(clients)
        await cluster.leader()
        yield cluster
    finally:
        await _stop_all(brokers.values())


class _RocketMq(_Programs):
    def __init__(self, address: str, brokers: dict[str, Program], ports: dict[int, str]) -> None:
        super().__init__(address, brokers)
        self._names = ports

    async def leader(self) -> str:
        with trio.move_on_after(READY_TIMEOUT_S):
            while True:
                leader = (await namesrv_leaders(self.address)).get(GROUP, "")
                name = self._names.get(int(leader.rpartition(":")[2] or 0))
                if name is not None and self.brokers[name].running:
                    return name
                await trio.sleep(POLL_S)
        raise CliError(f"no leader at the NameServer within {READY_TIMEOUT_S:g} s")


@asynccontextmanager
async def rocketmq(folder: Path, tools: Tools, *settings: str) -> AsyncIterator[Cluster]:
    """Run a NameServer and a DLedger group of three brokers of RocketMQ.

    Args:
        settings: More lines of ``broker.conf``.
    """
    namesrv_port, *peers = free_ports(4)
    ports = _broker_ports(3, {namesrv_port, *peers})
    (folder / "conf").mkdir()
    for name in ("namesrv", "broker", "tools"):
        for file in (f"rmq.{name}.logback.xml", f"logback_{name}.xml"):
            shutil.copy(SOURCES / "logback.xml", folder / "conf" / file)
    namesrv_config = folder / "namesrv.conf"
    namesrv_config.write_text(f"listenPort={namesrv_port}\nkvConfigPath={folder}/kv.json\n")
    namesrv = _java_program(tools, folder, "namesrv", "512m", namesrv_config)
    address = f"127.0.0.1:{namesrv_port}"
    group = ";".join(f"n{place}-127.0.0.1:{port}" for place, port in enumerate(peers))
    brokers: dict[str, Program] = {}
    for place, port in enumerate(ports):
        name = f"n{place}"
        home = folder / name
        home.mkdir()
        config = folder / f"{name}.conf"
        lines = (
            "brokerClusterName=DefaultCluster",
            f"brokerName={GROUP}",
            f"listenPort={port}",
            f"namesrvAddr={address}",
            "brokerIP1=127.0.0.1",
            f"storePathRootDir={home}/store",
            f"storePathCommitLog={home}/store/commitlog",
            "enableDLegerCommitLog=true",
            f"dLegerGroup={GROUP}",
            f"dLegerPeers={group}",
            f"dLegerSelfId={name}",
            "sendMessageThreadPoolNums=4",
            "autoCreateTopicEnable=true",
            *settings,
        )
        config.write_text("\n".join(lines) + "\n")
        brokers[name] = _java_program(tools, folder, name, BROKER_HEAP, config)
    cluster = _RocketMq(address, brokers, {port: f"n{place}" for place, port in enumerate(ports)})
    try:
        namesrv.start()
        await _Programs(address, {"namesrv": namesrv}).listening([namesrv_port])
        for broker in brokers.values():
            broker.start()
        await cluster.listening(ports)
        await cluster.leader()
        yield cluster
    finally:
        await _stop_all([*brokers.values(), namesrv])


def _java_program(tools: Tools, folder: Path, name: str, heap: str, config: Path) -> Program:
    main = "namesrv.NamesrvStartup" if name == "namesrv" else "broker.BrokerStartup"
    argv = [
        *("java", *JAVA_OPENS, f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseG1GC"),
        *(f"-Duser.home={folder / name}", f"-Drocketmq.home.dir={folder}"),
        *("-cp", f"{tools.jars}/*", f"org.apache.rocketmq.{main}", "-c", str(config)),
    ]
    environment = {"ROCKETMQ_HOME": str(folder)}
    return Program(f"rocketmq {name}", argv, folder / f"{name}.log", environment)


def _broker_ports(count: int, taken: set[int]) -> list[int]:
    """Return ports whose neighbours are free: a broker takes two below and one above it too."""
    found: list[int] = []
    for port in free_ports(50):
        wanted = {port, port - 2, port + 1}
        if not wanted & taken and all(map(is_free, wanted)):
            found.append(port)
            taken |= wanted
        if len(found) == count:
            return found
    raise CliError("too few ports are free")


class _Ours:
    def __init__(self, cluster: LocalCluster) -> None:
        self.address = cluster.namesrv_address
        self._cluster = cluster

    def pids(self) -> list[int]:
        return [
            broker.pid
            for broker in self._cluster.brokers.values()
            if broker.running and broker.pid is not None
        ]

    async def leader(self) -> str:
        return await self._cluster.wait_healthy()

    async def kill(self, name: str) -> None:
        await self._cluster.kill(name)

    async def restart(self, name: str) -> None:
        await self._cluster.start(name)


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[Cluster]:
    """Run a NameServer and three brokers of this project with their default flushes."""
    settings = {"store.mapped_file_size_commit_log": SEGMENT_BYTES}
    async with local_cluster(folder, settings=settings) as cluster:
        async with open_admin(cluster.namesrv_address) as admin:
            for topic in (TOPIC, f"{TOPIC}-drain"):
                await admin.create_topic(topic, queue_nums=QUEUES)
        yield _Ours(cluster)


async def _stop_all(programs: Iterable[Program]) -> None:
    """End programs whose data is not used again; a clean stop of RocketMQ takes ten seconds."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for program in programs:
                nursery.start_soon(program.kill)
