"""No acknowledgement for long, although a majority is sound and connected: nothing would be lost.

Looked at when members send each other frames and when rows of clients begin or end, every
`LOOK_S` at most: it adds no task and no event to a run, so the digest of a plan stays what it was.

A majority counts as sound and connected when each of its members runs, keeps what it acknowledged
and has a disk without faults, when the links between any two of them and between each and the
clients are as they should be, and when the list of voters of each gives them a majority. The leader
must be one of them: a leader that the others hear and clients do not keeps its office by right.
"""

from __future__ import annotations

from itertools import combinations, permutations
from typing import TYPE_CHECKING, Final

from jepsen_like.history.operation import F, Operation, Outcome
from jepsen_like.nemesis.minority import majority
from jepsen_like.simulation.minority_away import is_firm, member_key, voter_keys

if TYPE_CHECKING:
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.world import World

STALL_S: Final = 60.0
"""Several elections with their longest timeouts, and the deadlines of the sends before them."""

LOOK_S: Final = 2.0
"""Far below `STALL_S`, and seldom enough to cost nothing."""

ACKNOWLEDGED: Final = frozenset({F.SEND, F.HALF})
"""What producers do all the time."""


class StallWatch:
    """When producers of one run were acknowledged last, and since when they could have been.

    Args:
        clients: Name of the machine that producers run on.
    Attributes:
        looks: How often the cluster was looked at.
        longest_s: Longest time without an acknowledgement, while there could have been one.
    """

    def __init__(self, world: World, clients: str) -> None:
        self._world = world
        self._clients = clients
        self._sends = world.network.on_members_send
        self._looked_s = self._could_since_s = self._acknowledged_s = world.now_s
        self._is_on = False
        self.looks = 0
        self.longest_s = 0.0

    def begin(self) -> None:
        """Look from now on, until `end`."""
        self._could_since_s = self._acknowledged_s = self._world.now_s
        self._is_on = True
        self._sends = self._world.network.on_members_send
        self._world.network.on_members_send = self._on_members_send

    def end(self) -> None:
        """Look no more: producers are about to end."""
        self._is_on = False

    def note(self, op: Operation) -> None:
        """Take note of a row that was called now, or has ended now."""
        if op.outcome == Outcome.OK and op.f in ACKNOWLEDGED:
            self._acknowledged_s = self._world.now_s
        self._look()

    def _on_members_send(self, source: str, target: str, data: bytes) -> None:
        self._sends(source, target, data)
        self._look()

    def _look(self) -> None:
        world, now_s = self._world, self._world.now_s
        if not self._is_on or now_s < self._looked_s + LOOK_S or world.is_over:
            return
        self._looked_s = now_s
        self.looks += 1
        if not could_acknowledge(world, self._clients):
            self._could_since_s = now_s
            return
        silent_s = now_s - max(self._could_since_s, self._acknowledged_s)
        self.longest_s = max(self.longest_s, silent_s)
        if silent_s > STALL_S:
            world.violate(
                "stalled",
                f"no send was acknowledged for {silent_s:.0f} s, while a majority was sound and "
                f"connected: {world.status()}",
            )


def could_acknowledge(world: World, clients: str) -> bool:
    """Return whether a majority is sound and connected, and no other member leads."""
    machine = world.clients.get(clients)
    if machine is None or not machine.is_up:
        return False
    if not any(
        node.is_up and _hear_each_other(world, (clients, node.name))
        for node in world.name_servers.values()
    ):
        return False
    sound = [
        node
        for node in world.brokers.values()
        if _is_sound(node) and _hear_each_other(world, (clients, node.name))
    ]
    if any(node.leads and node not in sound for node in world.brokers.values()):
        return False
    leaders = {node.name for node in sound if node.leads}
    # Not only the whole of them: a link between two of five may be cut.
    return any(
        leaders <= {node.name for node in chosen}
        and _hear_each_other(world, [node.name for node in chosen])
        and _decide(chosen)
        for size in range(len(sound), 0, -1)
        for chosen in combinations(sound, size)
    )


def _is_sound(node: BrokerNode) -> bool:
    disk, group = node.disk, node.group
    return (
        node.is_up
        and group is not None
        and is_firm(group)
        and disk.capacity_bytes is None
        and not disk.delay_s
        and not disk.flush_failures
    )


def _hear_each_other(world: World, names: tuple[str, ...] | list[str]) -> bool:
    links = world.network.links
    return all(links[pair].is_plain and not links[pair].is_cut for pair in permutations(names, 2))


def _decide(chosen: tuple[BrokerNode, ...]) -> bool:
    there = {member_key(node.group) for node in chosen if node.group is not None}
    lists = [voter_keys(node.group) for node in chosen if node.group is not None]
    return all(
        voters is not None and len(there.intersection(voters)) >= majority(len(voters))
        for voters in lists
    )
