"""The simulated world as a nemesis sees it."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import trio

from dledger.jepsen_like.nemesis.ground import CannotBeDone
from dledger.jepsen_like.nemesis.strangers import NameThief, PeerGroup, PeerStranger, Wanted
from dledger.jepsen_like.plans.budget import LogEnd, Soundness
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.machine import Node, Process, State
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.platter import IDENTITY
from dledger.jepsen_like.simulation.sim_network import PEER_PORT
from dledger.jepsen_like.simulation.world import World
from dledger.jepsen_like.workloads.clients import WorkloadClients
from dledger.jepsen_like.workloads.recorder import BROKER, TOPIC
from dledger.processors.raft import MembershipChanges
from dledger.remoting.addresses import join_address

POINT_WAIT_S: Final = 10.0
"""How long a kill waits for the disk to do something."""

DOUBLES: Final = "doubles"
"""The machine with consumers under the names of others; there is none before it is needed."""

STRANGER: Final = "stranger"
"""The machine of a process that is no member."""

PEER_STRANGER: Final = "peer_stranger"
"""The machine of one at the peer ports."""

BURST: Final = "burst"
"""The machine of a client that takes an old leader for the leader."""

BURST_LOOK_S: Final = 0.1

THIEF_PORT: Final = 10911


class SimMachine:
    """A simulated machine; see `dledger.jepsen_like.nemesis.ground.Machine`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.name = node.name

    @property
    def is_up(self) -> bool:
        """Whether its process serves and runs."""
        return self._node.is_up

    @property
    def is_down(self) -> bool:
        """Whether it has no process."""
        return self._node.state is State.DOWN

    async def start(self) -> bool:
        """Start its process."""
        return await self._node.start()

    async def kill(self) -> None:
        """End its process at once."""
        self._node.kill()

    async def stop(self) -> bool:
        """End its process cleanly."""
        return await self._node.stop()

    def pause(self) -> None:
        """Stop its process where it is."""
        self._node.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._node.resume()


class SimMember(SimMachine):
    """A simulated broker; see `dledger.jepsen_like.nemesis.ground.Member`."""

    def __init__(self, node: BrokerNode) -> None:
        super().__init__(node)
        self._broker = node

    @property
    def seen_commit(self) -> int:
        """Newest commit index it has shown."""
        return self._broker.seen_commit

    async def restart_newer(self) -> None:
        """Say why not."""
        raise CannotBeDone("all simulated brokers are one program, of one version")

    async def power_cut(self) -> None:
        """End process and machine; unflushed sectors are lost by chance."""
        self._broker.power_cut()

    async def kill_at_point(self, skip: int, *, power: bool) -> str:
        """End the process inside the product's own disk call."""
        node, left, where = self._broker, skip, ""
        struck = trio.Event()

        def observe(kind: str, path: str) -> None:
            nonlocal left, where
            left -= 1
            if left < 0 and not struck.is_set():
                struck.set()
                where = f"{kind} {path}"
                if power:
                    node.power_cut()
                else:
                    node.kill()

        node.disk_watchers.append(observe)
        try:
            with trio.move_on_after(POINT_WAIT_S):
                await struck.wait()
        finally:
            node.disk_watchers.remove(observe)
        return where

    async def wipe(self) -> None:
        """Lose the disk."""
        self._broker.wipe()

    async def rot(self, bits: int) -> str:
        """Flip bits of the log."""
        found = self._broker.rot(bits=bits)
        return ", ".join(f"{posixpath.basename(path)}@{at}" for path, at in found)

    async def spoil_sectors(self, sectors: int) -> str:
        """Let reads of some sectors fail."""
        found = self._broker.spoil_sectors(sectors)
        return ", ".join(f"{posixpath.relpath(path, '/store')}@{at}" for path, at in found)

    async def rot_file(self, arg: int) -> str:
        """Let a file go bad; a process that refuses its identity gets an empty disk."""
        node = self._broker
        found = node.rot_file(arg)
        if found and IDENTITY in found[0][0]:
            with trio.CancelScope(shield=True):
                if await node.start():
                    text = f"{node.name} serves with a damaged identity"
                    node.world.violate("identity", text)
            node.wipe()
        return ", ".join(f"{posixpath.relpath(path, '/store')}@{at}" for path, at in found)

    async def tear_tail(self, size_bytes: int) -> str:
        """Write over the newest bytes of the log above the commit mark."""
        found = self._broker.tear_tail(size_bytes)
        return "" if found is None else f"{posixpath.basename(found[0])}@{found[1]}"

    async def lie_about_flushes(self, *, lies: bool) -> None:
        """Let flushes of the log make nothing durable."""
        self._broker.lie_about_flushes(lies=lies)

    async def undo_lied_flushes(self) -> str:
        """Lose what such flushes wrote."""
        return f"{self._broker.undo_lied_flushes()} sectors"

    async def begin_work_late(self, by_s: float) -> None:
        """Let blocking work begin late."""
        self._broker.begin_work_late(by_s)

    async def _no_descriptors(self, *_: object) -> NoReturn:
        """State why not."""
        raise CannotBeDone("descriptors are those of real processes")

    limit_files = flood = _no_descriptors

    async def fill_disk(self, left_bytes: int | None) -> None:
        """Let the disk be full; None heals."""
        self._broker.fill_disk(left_bytes)

    async def slow_disk(self, delay_s: float) -> None:
        """Let flushes take longer."""
        self._broker.slow_disk(delay_s)

    async def fail_flushes(self, number: int) -> None:
        """Let the next flushes fail, with their pages lost."""
        self._broker.fail_flushes(number)

    def jump_clock(self, by_ms: int) -> None:
        """Move the date."""
        self._broker.jump_clock(by_ms)

    def drift_clock(self, ppm: float) -> None:
        """Let the clocks drift."""
        self._broker.drift_clock(ppm)


class SimGround:
    """A `dledger.jepsen_like.nemesis.ground.Ground` over a `World`.

    Attributes:
        network, sometimes: The world's.
        brokers, name_servers: By name.
        proxies: None: a proxy is a process.
    """

    def __init__(self, world: World, workload: WorkloadClients) -> None:
        self._world = world
        self.workload = workload
        self.network = world.network
        self.sometimes = world.sometimes
        self.brokers = {name: SimMember(node) for name, node in world.brokers.items()}
        self.name_servers = {name: SimMachine(node) for name, node in world.name_servers.items()}
        self.proxies: dict[str, SimMachine] = {}

    @property
    def elapsed_s(self) -> float:
        """Virtual time of the run."""
        return self._world.elapsed_s

    @property
    def clients(self) -> Mapping[str, SimMachine]:
        """Client machines there are by now."""
        return {
            name: SimMachine(node)
            for name, node in self._world.clients.items()
            if name not in (DOUBLES, STRANGER, PEER_STRANGER, BURST)
        }

    async def start_doubles(self) -> None:
        """Start consumers under the names of those there are, on a machine of their own."""
        await self._world.client(DOUBLES).run(self.workload.run_doubles)

    async def steal_name(self, for_s: float, identity: str) -> str:
        """Run a thief of the broker name on a machine of its own."""

        def thief(machine: ClientNode, process: Process) -> NameThief:
            address = join_address(machine.address, THIEF_PORT)
            wanted = Wanted("Sim", BROKER, address, (TOPIC,), identity)
            servers = [server.endpoint for server in self._world.name_servers.values()]
            return NameThief(process.network, process.clock, wanted, servers)

        return await self._let_loose(STRANGER, "thief", thief, for_s)

    async def attack_peers(self, for_s: float) -> str:
        """Run a stranger at the peer ports on a machine of its own."""
        brokers = self._world.brokers
        group = PeerGroup("Sim", "sim", {n: (b.address, PEER_PORT) for n, b in brokers.items()})
        rng = rng_stream(self._world.seed, "peer stranger")

        def stranger(machine: ClientNode, process: Process) -> PeerStranger:
            address = (machine.address, PEER_PORT)
            return PeerStranger(process.network, process.clock, rng, group, address)

        return await self._let_loose(PEER_STRANGER, "stranger", stranger, for_s)

    async def _let_loose(
        self,
        name: str,
        what: str,
        make: Callable[[ClientNode, Process], NameThief | PeerStranger],
        for_s: float,
    ) -> str:
        """Run a process that is no member on the machine *name*; return what became of it."""
        node = self._world.client(name)
        if node.process is not None:
            raise CannotBeDone(f"there is a {what} already")
        made: list[NameThief | PeerStranger] = []

        async def run(machine: ClientNode) -> None:
            assert machine.process is not None
            made.append(make(machine, machine.process))
            await made[0].run()

        await node.run(run)
        try:
            await self._world.sleep(for_s)
        finally:
            node.kill()
        seen = made[0].seen
        self.sometimes.update({f"{what}_{how}": number for how, number in seen.items()})
        return ", ".join(f"{how} {number}" for how, number in sorted(seen.items()))

    async def end_doubles(self) -> None:
        """End them."""
        self._world.client(DOUBLES).kill()

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await self._world.sleep(seconds)

    async def sleep_until(self, elapsed_s: float) -> None:
        """Let virtual time pass up to a moment of the run."""
        await self._world.sleep_until(elapsed_s)

    def leading(self) -> str | None:
        """Return the leader of now, or the last one."""
        node = self._world.leader() or self._world.last_leader
        return None if node is None else node.name

    def leads_now(self) -> bool:
        """Whether a member leads."""
        return self._world.leader() is not None

    def voters(self) -> Sequence[tuple[str, ...]]:
        """The lists that members follow, or followed when they ended."""
        return sorted({node.seen_voters for node in self._world.brokers.values()} - {()})

    def soundness(self, name: str) -> Soundness:
        """What the world knows of a broker; it may look inside."""
        node, leader = self._world.brokers[name], self._world.leader()
        group = node.group
        if not node.is_up or group is None:
            return Soundness(False, keeps_promises=False, is_caught_up=False, is_intact=False)
        raft = group.node
        firm = raft.roster.is_self_voter and not (
            raft.eligibility.damaged or raft.eligibility.doubtful or raft.state.has_hole
        )
        if leader is None or leader.group is None:
            return Soundness(True, firm, is_caught_up=False, is_intact=False)
        caught_up = firm and raft.commit_index >= leader.group.node.commit_index
        return Soundness(True, firm, caught_up, caught_up and is_intact(node, leader))

    async def look(self) -> None:
        """Nothing: the world is looked at directly."""

    def log_end(self, name: str) -> LogEnd | None:
        """How far a broker's log reaches; None when it does not run."""
        node = self._world.brokers[name]
        if not node.is_up or node.group is None:
            return None
        journal = node.group.node.journal
        held = min(node.group.node.commit_index, journal.stable_index)
        return LogEnd(journal.last_index, held)

    async def role_change(self) -> str:
        """Wait for the next change of role, and return the member that has begun to lead."""
        return await self._world.checks.next_leader()

    async def read_at(self, name: str, reads: int) -> None:
        """Read at once, on a machine of its own, with the address of an old leader."""
        world, address = self._world, self._world.brokers[name].endpoint
        node = world.client(BURST)
        if node.process is not None:
            raise CannotBeDone("another burst is under way")

        async def read(machine: ClientNode) -> None:
            assert machine.instance is not None
            await self.workload.read_at(machine.instance, address, reads)
            node.install(_rest)

        await node.run(read)
        while node.process is not None:
            await world.sleep(BURST_LOOK_S)

    def tell_leader(self, name: str) -> None:
        """Let running clients know that *name* leads, as its registration does."""
        leader = self._world.brokers[name]
        if leader.group is None:
            return
        for machine in self.clients.values():
            instance = self._world.clients[machine.name].instance
            if instance is not None:
                broker = leader.config.broker.broker_name
                instance.leaders.learn(broker, leader.endpoint, leader.group.node.term)

    async def order(self, kind: Kind, name: str, *, asked: str = "") -> None:
        """Give the leader an order, from inside its process."""
        leader, node = self._world.leader(), self._world.brokers[name]
        if asked:
            leader = self._world.brokers[asked]
        if leader is None or leader.group is None or leader.process is None:
            raise CannotBeDone("no member leads")
        orders = MembershipChanges(leader.group, leader.process.clock)
        match kind:
            case Kind.TRANSFER:
                await orders.transfer(name)
            case Kind.MEMBER_REMOVE:
                await orders.remove(name)
            case Kind.MEMBER_REPLACE:
                await orders.replace(name, (node.address, PEER_PORT))
            case _:
                await orders.add(name, (node.address, PEER_PORT))

    def missing_members(self) -> Sequence[str] | None:
        """Brokers that the leader's list lacks."""
        leader = self._world.leader()
        if leader is None or leader.group is None:
            return None
        members = leader.group.node.roster.members
        names = () if members is None else members.names
        return [name for name in self.brokers if name not in names]


async def _rest(_: ClientNode) -> None:
    """Do nothing: what a machine runs when it is started again at the end."""
    await trio.sleep_forever()


def is_intact(node: BrokerNode, other: BrokerNode) -> bool:
    """Tell whether two replicas' log files have the same bytes as far as both are applied.

    Those of *node* can be read, too; of a leader, compared with itself, that is all.
    """
    ours, theirs = node.group, other.group
    if ours is None or theirs is None:
        return False
    end = min(ours.state.applied_end_position, theirs.state.applied_end_position)
    for path, inode in sorted(node.disk.names.items()):
        folder, name = posixpath.split(path)
        peer = other.disk.names.get(path)
        if not folder.endswith("/commitlog") or not name.isdecimal() or peer is None:
            continue
        size = min(len(inode.content), max(0, end - int(name)))
        if inode.is_unreadable(0, size):
            return False
        if inode.readable[:size] != peer.readable[:size]:
            return False
    return True
