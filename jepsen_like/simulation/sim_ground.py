"""The simulated world as a nemesis sees it."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from dledger.jepsen_like.nemesis.ground import CannotBeDone
from dledger.jepsen_like.nemesis.strangers import NameThief, PeerGroup, PeerStranger, Wanted
from dledger.jepsen_like.plans.budget import LogEnd, Soundness
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.machine import Node, Process
from dledger.jepsen_like.simulation.node import BrokerNode, ClientNode
from dledger.jepsen_like.simulation.sim_network import PEER_PORT
from dledger.jepsen_like.simulation.world import World
from dledger.jepsen_like.workloads.clients import WorkloadClients
from dledger.jepsen_like.workloads.recorder import BROKER, TOPIC
from dledger.processors.raft import MembershipChanges
from dledger.remoting.addresses import join_address

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
        self.brokers = world.brokers
        self.name_servers = world.name_servers
        self.proxies: dict[str, Node] = {}

    @property
    def elapsed_s(self) -> float:
        """Virtual time of the run."""
        return self._world.elapsed_s

    @property
    def clients(self) -> Mapping[str, ClientNode]:
        """Client machines there are by now."""
        return {
            name: node
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
            node.kill_now()
        seen = made[0].seen
        self.sometimes.update({f"{what}_{how}": number for how, number in seen.items()})
        return ", ".join(f"{how} {number}" for how, number in sorted(seen.items()))

    async def end_doubles(self) -> None:
        """End them."""
        await self._world.client(DOUBLES).kill()

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
            if machine.instance is not None:
                broker = leader.config.broker.broker_name
                machine.instance.leaders.learn(broker, leader.endpoint, leader.group.node.term)

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
