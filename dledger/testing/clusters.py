"""A NameServer and brokers on loopback ports, for tests: in this process, or in processes.

::

    async with embedded_cluster(topics={"Orders": 4}) as cluster:
        async with cluster.client() as client, Producer(client, "orders") as producer:
            await producer.send(Message("Orders", b"one"))
        await cluster.kill(cluster.leader())

They are the product's own daemons on the machine's sockets and files; what is a test's is their
clock, which follows trio's, and a network that can be parted.

`process_cluster` is the same in processes of its own: there a kill is a SIGKILL.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio
import trio.testing

from dledger.broker import Broker, World, serve_broker
from dledger.cli.local_cluster import LocalCluster, local_cluster
from dledger.cli.ports import free_ports
from dledger.client.admin.admin import Admin
from dledger.client.connect import connect
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.client_state import part_of
from dledger.commitlog.disk import OsDisk
from dledger.namesrv.config import NamesrvConfig
from dledger.namesrv.server import serve_namesrv
from dledger.remoting.addresses import join_address
from dledger.remoting.log import brokers_log_here
from dledger.remoting.machine import AdaptiveExecutor, SystemRng
from dledger.remoting.seams import Rng
from dledger.remoting.tcp import TcpNetwork
from dledger.settings.config import BrokerConfig, load_config
from dledger.testing.doubles import PartedNetwork, Partition, VirtualClock

# ---------------------------------------------------------------------------------- in this process


READY_TIMEOUT_S: Final = 30.0
"""How long a cluster may take to have a leader that every client finds."""

LOOK_S: Final = 0.02

ADVANCE_STEP_S: Final = 0.05
"""Time passes in steps shorter than a heartbeat, so that no member is missed in between."""

SETTLE_S: Final = 0.0005
"""Real time a step waits until nothing moves: loopback needs less."""

SMALL: Final[Mapping[str, object]] = {
    "store.mapped_file_size_commit_log": 16 << 20,
    "store.scrub_bytes_per_s": 1 << 20,
}
"""Settings fit for a folder that is thrown away."""


@dataclass(slots=True, eq=False)
class _Member:
    name: str
    config: BrokerConfig
    rng: Rng
    broker: Broker | None = None
    stop: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


class _ClusterOfTests:
    """What both kinds of clusters have."""

    name_server_addr: str

    def client(self, config: ClientConfig | None = None) -> ClientInstance:
        """Return a client of this cluster, not yet open."""
        return connect(self.name_server_addr, config)

    async def create_topic(self, topic: str, *, queue_nums: int = 4) -> None:
        """Create a topic; it can be written and read when this returns."""
        async with self.client() as client:
            await Admin(client).create_topic(topic, queue_nums=queue_nums)


class EmbeddedCluster(_ClusterOfTests):
    """The cluster that `embedded_cluster` runs."""

    can_partition: Final = True

    def __init__(
        self,
        members: Sequence[_Member],
        name_server_addr: str,
        partition: Partition,
        nursery: trio.Nursery,
        clock: VirtualClock,
    ) -> None:
        self.name_server_addr = name_server_addr
        self._members = {member.name: member for member in members}
        self._partition = partition
        self._nursery = nursery
        self._clock = clock

    @property
    def brokers(self) -> tuple[str, ...]:
        """Names of all brokers, running or not."""
        return tuple(self._members)

    def broker(self, name: str) -> Broker:
        """Return a running broker.

        Raises:
            RuntimeError: It does not run.
        """
        broker = self._members[name].broker
        if broker is None:
            raise RuntimeError(f"{name} does not run")
        return broker

    def find_leader(self) -> str | None:
        """Return the broker that leads and serves, in the newest term; None without one."""
        leading = [
            (member.broker.group.leadership.term, name)
            for name, member in self._members.items()
            if member.broker is not None and member.broker.group.leadership is not None
        ]
        return max(leading)[1] if leading else None

    async def leader(self, *, other_than: str | None = None) -> str:
        """Return the name of the leader as soon as there is one.

        Raises:
            trio.TooSlowError: Not within `READY_TIMEOUT_S`.
        """
        return await self._eventually(
            lambda: found if (found := self.find_leader()) != other_than else None
        )

    async def start(self, name: str) -> None:
        """Start a broker that does not run, on its folder and ports.

        Raises:
            RuntimeError: It runs.
        """
        member = self._members[name]
        if member.broker is not None:
            raise RuntimeError(f"{name} runs already")
        member.stop, member.scope, member.ended = trio.Event(), trio.CancelScope(), trio.Event()
        await self._nursery.start(self._run, member)

    async def kill(self, name: str) -> None:
        """End a broker as a crash does: nothing is answered, nothing flushed."""
        member = self._members[name]
        if member.broker is not None:
            member.scope.cancel()
            await member.ended.wait()

    async def stop(self, name: str) -> None:
        """Stop a broker cleanly."""
        member = self._members[name]
        if member.broker is not None:
            member.stop.set()
            await member.ended.wait()

    async def restart(self, name: str) -> None:
        """Stop a broker cleanly if it runs, and start it again."""
        await self.stop(name)
        await self.start(name)

    async def partition(self, sides: Sequence[Iterable[str]]) -> None:
        """Cut brokers of different *sides* off from each other; ``"namesrv"`` may be named, too.

        Clients, and nodes that are named nowhere, talk to all.
        """
        await self._partition.part(sides)

    def heal(self) -> None:
        """End the partition."""
        self._partition.heal()

    async def advance(self, seconds: float) -> None:
        """Let *seconds* pass for everybody without waiting for them.

        Raises:
            RuntimeError: Time is not the test's: it needs trio's MockClock (``mock_clock`` of
                pytest-trio).
        """
        clock = trio.lowlevel.current_clock()
        if not isinstance(clock, trio.testing.MockClock):
            raise RuntimeError(  # noqa: TRY004  # no argument has a wrong type
                "advance needs trio's MockClock: ask for the fixture mock_clock"
            )
        left_s = seconds
        while left_s > 0:
            step_s = min(ADVANCE_STEP_S, left_s)
            left_s -= step_s
            clock.jump(step_s)
            await trio.testing.wait_all_tasks_blocked(SETTLE_S)

    async def _run(
        self, member: _Member, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with member.scope:
                async with trio.open_nursery() as nursery:
                    member.broker = await nursery.start(self._serve, member)
                    task_status.started()
        finally:
            member.broker = None
            member.ended.set()

    async def _serve(self, member: _Member, task_status: trio.TaskStatus[Broker]) -> None:
        await serve_broker(
            member.config,
            World(
                self._clock,
                member.rng,
                PartedNetwork(member.name, self._partition, TcpNetwork()),
                OsDisk(),
                AdaptiveExecutor(),
            ),
            stop=member.stop,
            task_status=task_status,
        )

    async def _start_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for name in self._members:
                nursery.start_soon(self.start, name)

    async def _stop_all(self) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for name in self._members:
                    nursery.start_soon(self.stop, name)

    async def _eventually(self, look: Callable[[], str | None]) -> str:
        with trio.fail_after(READY_TIMEOUT_S):
            while (found := look()) is None:
                await self._clock.sleep(LOOK_S)
            return found


@asynccontextmanager
async def embedded_cluster(
    *,
    brokers: int = 3,
    topics: Mapping[str, int] | None = None,
    settings: Mapping[str, object] | None = None,
    folder: Path | None = None,
    seed: int | None = None,
) -> AsyncIterator[EmbeddedCluster]:
    """Run a cluster while the block runs; entered when a leader serves and the topics are there.

    Args:
        topics: Topics to create, with their number of queues.
        settings: ``table.name`` to value, for every broker; see docs/reference/configuration.md.
        folder: Where data is kept, and used again; else a folder that is removed at the end.
        seed: Of the brokers' random numbers; sockets and threads stay as they are.
    Raises:
        trio.TooSlowError: No leader within `READY_TIMEOUT_S`.
    Cancellation: The brokers are stopped cleanly first.
    """
    with tempfile.TemporaryDirectory(prefix="dledger-") as scratch, brokers_log_here():
        try:
            async with _running(folder or Path(scratch), brokers, settings or {}, seed) as cluster:
                for topic, queue_nums in (topics or {}).items():
                    await cluster.create_topic(topic, queue_nums=queue_nums)
                yield cluster
        except BaseExceptionGroup as group:
            raise _alone(group) from None


@asynccontextmanager
async def _running(
    base: Path, brokers: int, settings: Mapping[str, object], seed: int | None
) -> AsyncIterator[EmbeddedCluster]:
    clock, partition = VirtualClock.from_today(), Partition()
    async with trio.open_nursery() as nursery:
        namesrv = NamesrvConfig.load(
            options={"server.listen_port": 0, "namesrv.kv_config_path": str(base / "kvConfig.json")}
        )

        async def serve_names(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
            await serve_namesrv(
                namesrv,
                clock=clock,
                rng=SystemRng(),
                network=TcpNetwork(),
                disk=OsDisk(),
                task_status=task_status,
            )

        host, port = await nursery.start(serve_names)
        partition.owners[(host, port)] = "namesrv"
        members = _members(base, brokers, join_address(host, port), settings, seed)
        for member in members:
            for address in _addresses(member.config):
                partition.owners[address] = member.name
        cluster = EmbeddedCluster(members, join_address(host, port), partition, nursery, clock)
        await cluster._start_all()
        try:
            await cluster.leader()
            yield cluster
        finally:
            cluster.heal()
            await cluster._stop_all()
        nursery.cancel_scope.cancel()


def _alone(error: BaseException) -> BaseException:
    """Return the one error in groups of one: a test expects its own as it raised it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _members(
    base: Path, count: int, namesrv: str, settings: Mapping[str, object], seed: int | None
) -> list[_Member]:
    ports = free_ports(2 * count)
    names = [f"n{number}" for number in range(count)]
    peers = ";".join(f"{name}-127.0.0.1:{ports[2 * at + 1]}" for at, name in enumerate(names))
    members = []
    for at, name in enumerate(names):
        options: dict[str, object] = {
            "broker.cluster_name": "DefaultCluster",
            "broker.broker_name": "broker-a",
            "broker.broker_ip1": "127.0.0.1",
            "broker.namesrv_addr": namesrv,
            "server.listen_host": "127.0.0.1",
            "server.listen_port": ports[2 * at],
            "store.path_root_dir": str(base / name),
            "raft.group": "broker-a",
            "raft.self_id": name,
            "raft.peers": peers,
            **SMALL,
            **settings,
        }
        rng: Rng = SystemRng() if seed is None else random.Random(f"{seed} {name}")
        members.append(_Member(name, load_config(options=options), rng))
    return members


def _addresses(config: BrokerConfig) -> list[tuple[str, int]]:
    own = config.self_peer
    return [(config.server.listen_host, config.server.listen_port), (own.host, own.port)]


# -------------------------------------------------------------------------- in processes of its own


class ProcessCluster(_ClusterOfTests):
    """The cluster that `process_cluster` runs."""

    can_partition: Final = False

    def __init__(self, cluster: LocalCluster) -> None:
        self.name_server_addr = cluster.namesrv_address
        self._cluster = cluster

    @property
    def brokers(self) -> tuple[str, ...]:
        """Names of all brokers, running or not."""
        return tuple(self._cluster.brokers)

    async def leader(self, *, other_than: str | None = None) -> str:
        """Return the name of the leader as soon as there is one.

        Raises:
            MQError: None in time.
        """
        return await self._cluster.wait_leader(other_than=other_than)

    start = part_of("_cluster", LocalCluster.start)
    kill = part_of("_cluster", LocalCluster.kill)
    stop = part_of("_cluster", LocalCluster.stop)
    restart = part_of("_cluster", LocalCluster.restart)

    async def partition(self, sides: Sequence[Iterable[str]]) -> None:
        """Refuse: what parts processes needs root and belongs to ``dledger-chaos``."""
        raise NotImplementedError("processes cannot be parted here: use embedded_cluster")

    def heal(self) -> None:
        """Do nothing: there is no partition."""


@asynccontextmanager
async def process_cluster(
    *,
    brokers: int = 3,
    topics: Mapping[str, int] | None = None,
    settings: Mapping[str, object] | None = None,
    folder: Path | None = None,
) -> AsyncIterator[ProcessCluster]:
    """Run a cluster of processes while the block runs; they have ended when it is left.

    Args:
        brokers: How many.
        topics: Topics to create, with their number of queues.
        settings: ``table.name`` to value, for every broker; see docs/reference/configuration.md.
        folder: Where data is kept, and used again; else a folder that is removed at the end.
    Raises:
        MQError: It did not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="dledger-") as scratch:
        async with local_cluster(
            folder or Path(scratch), brokers=brokers, settings=settings
        ) as local:
            cluster = ProcessCluster(local)
            for topic, queue_nums in (topics or {}).items():
                await cluster.create_topic(topic, queue_nums=queue_nums)
            yield cluster
