"""Three replicas of a group in one process, on virtual time, with real files."""

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.record import decode_record, pack_host
from dledger.commitlog.seams import Disk
from dledger.group import Group
from dledger.raft.identity import GroupSecret, Identity
from dledger.raft.settings import RaftSettings
from dledger.remoting.seams import Executor, Network
from dledger.settings.tables import RaftTable, StoreTable
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from dledger.testing.doubles import (
    InlineExecutor,
    MemoryNetwork,
    PartedNetwork,
    Partition,
    VirtualClock,
)
from tests.harness.raft_cluster import batch

SEGMENT_BYTES = 1 << 20

LATENCY_S = 0.0005
"""One way, so that virtual time passes and tasks interleave."""


@dataclass
class Replica:
    """A running replica and what is needed to end it."""

    name: str
    group: Group
    clock: VirtualClock
    scope: trio.CancelScope

    def kill(self) -> None:
        """End all tasks at once and give the folder back without a clean close."""
        self.scope.cancel()
        self.group.store.close(clean=False)


class Groups:
    """A broker group of several replicas."""

    def __init__(
        self, root: Path, nursery: trio.Nursery, size: int = 3, disks: Callable[[], Disk] = OsDisk
    ) -> None:
        self.root = root
        self.disks: dict[str, Disk] = defaultdict(disks)
        self.executors: dict[str, Executor] = defaultdict(InlineExecutor)
        self.sync_flush = True
        self.nursery = nursery
        self.network = MemoryNetwork(latency_s=LATENCY_S)
        self.partition = Partition()
        self._isolated: set[str] = set()
        self.rng = random.Random(7)
        self.names = [f"n{number}" for number in range(size)]
        self.replicas: dict[str, Replica] = {}
        self.skews_ms: dict[str, int] = {}
        self.settings = RaftTable(propose_timeout_ms=3_000)
        self.sync_replication = True
        self.secrets: dict[str, GroupSecret] = {}

    def open_store(self, name: str) -> ReplicaStore:
        """Open the folder of a replica that does not run."""
        return ReplicaStore(
            self.disks[name],
            StoreTable(
                path_root_dir=str(self.root / name), mapped_file_size_commit_log=SEGMENT_BYTES
            ),
            StateTables,
        )

    async def start(self, name: str) -> Replica:
        """Start (again) the replica *name* on its folder."""
        disk, clock = self.disks[name], VirtualClock(self.skews_ms.get(name, 0))
        store = self.open_store(name)
        identity = Identity(
            disk, store.paths.identity, cluster="C", group="G", name=name, rng=self.rng
        )
        group = Group(
            store,
            identity,
            RaftSettings(
                cluster="C",
                group="G",
                self_id=name,
                peers={peer: ("127.0.0.1", 40911 + i) for i, peer in enumerate(self.names)},
                client_address=f"{name}:10911",
                sync_flush=self.sync_flush,
                secret=self.secrets.get(name),
            ),
            self.settings,
            store_host=pack_host("127.0.0.1", 10911),
            clock=clock,
            rng=self.rng,
            network=self.network_of(name),
            executor=self.executors[name],
            sync_replication=self.sync_replication,
        )
        scope = trio.CancelScope()

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await group.run(task_status=task_status)

        await self.nursery.start(run)
        self.replicas[name] = Replica(name, group, clock, scope)
        return self.replicas[name]

    def network_of(self, name: str) -> Network:
        """Return the network as the replica *name* has it."""
        return PartedNetwork(name, self.partition, self.network)

    async def isolate(self, name: str) -> None:
        """Cut *name* off from all others; those that were isolated before stay so."""
        self._isolated.add(name)
        rest = [other for other in self.names if other not in self._isolated]
        await self.partition.part([*([one] for one in self._isolated), rest])

    def heal(self) -> None:
        """Let all replicas connect again."""
        self._isolated.clear()
        self.partition.heal()

    async def leader(self, *, among: list[str] | None = None) -> Replica:
        """Wait for a replica that may act, and return it."""
        with trio.fail_after(60):
            while True:
                for name in among or list(self.replicas):
                    if self.replicas[name].group.leadership is not None:
                        return self.replicas[name]
                await trio.sleep(0.01)
        raise AssertionError("unreachable")

    async def settle(self) -> None:
        """Wait until all replicas have applied the same index."""
        with trio.fail_after(60):
            while len({r.group.state.applied_index for r in self.replicas.values()}) > 1 or any(
                r.group.store.refilling for r in self.replicas.values()
            ):
                await trio.sleep(0.05)

    def others(self, name: str) -> list[str]:
        """Return the names of all other replicas."""
        return [other for other in self.names if other != name]

    async def fill(self, bodies: Iterable[bytes]) -> Replica:
        """Let the leader store messages in ``T``, an entry each; return it."""
        leader = await self.leader()
        for body in bodies:
            await leader.group.submit(batch(body))
        return leader

    async def checkpointed(self) -> None:
        """Let every replica write checkpoints, and remove what they allow to be removed."""
        await trio.sleep(3 * self.settings.checkpoint_interval_ms / 1000)


@asynccontextmanager
async def running_groups(
    root: Path, size: int = 3, *, disks: Callable[[], Disk] = OsDisk
) -> AsyncIterator[Groups]:
    """Run replicas until the block ends.

    Args:
        disks: Makes the disk of each replica.
    """
    async with trio.open_nursery() as nursery:
        groups = Groups(root, nursery, size, disks)
        for name in groups.names:
            await groups.start(name)
        yield groups
        nursery.cancel_scope.cancel()
    for replica in groups.replicas.values():
        if not replica.scope.cancel_called:
            replica.group.store.close(clean=False)


def crash_disk(groups: Groups, name: str) -> CrashDisk:
    """Return the disk of a replica of groups on such disks."""
    disk = groups.disks[name]
    assert isinstance(disk, CrashDisk)
    return disk


def bodies(group: Group, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    """Read a queue back through consume queue and log."""
    units = group.queues.queue(topic, queue_id).read(0, group.state.max_offset(topic, queue_id))
    return [
        bytes(decode_record(group.log.record_at(int(unit["phy_offset"]))).body) for unit in units
    ]
