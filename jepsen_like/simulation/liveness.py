"""Progress without a minority: a group whose majority is sound and connected serves and changes.

After the faults (`go_on_without`) a leader and a change of the members are demanded before a
minority is back. Nothing is demanded where too few are there, or sure of what they acknowledged,
for any leader to be elected.

During the faults (`StallWatch`) there must be an acknowledgement now and then. That is looked at
when members send each other frames and when rows of clients begin or end, every `STALL_LOOK_S` at
most: it adds no event to a run, so the digest of a plan stays what it was. A majority counts as
sound and connected when each of its members runs, keeps what it acknowledged and has a disk without
faults, when the links between any two of them and to the clients are healthy, and when the voters
of each give them a majority. The leader must be one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Final

from dledger.jepsen_like.history.operation import F, Operation, Outcome
from dledger.jepsen_like.nemesis.members import can_do_without, majority

if TYPE_CHECKING:
    from dledger.group import Group
    from dledger.jepsen_like.nemesis.nemesis import Nemesis
    from dledger.jepsen_like.simulation.node import BrokerNode
    from dledger.jepsen_like.simulation.world import World

ELECTIONS_MAX: Final = 8
"""Of the longest election timeouts: more than for a whole group, for one vote less may be missed,
and one that was removed and not informed stands, too, until it receives from a leader."""

CHANGED_WITHIN_S: Final = 120.0
"""A change waits for a committed entry of the term, and for those that are to vote for it."""

LOOK_S: Final = 0.25


async def go_on_without(
    world: World, nemesis: Nemesis, away: Collection[str], election_s: float
) -> None:
    """Heal all but *away*, and demand that the others elect and change the members.

    Raises Violation: ``liveness``: They could, and did not in time.
    """
    await world.heal(clients=True, away=away)
    if not await _demanded(
        world,
        away,
        lambda: _leads(world, away) is not None,
        ELECTIONS_MAX * election_s,
        f"no leader without {', '.join(away)}",
    ):
        return
    world.sometimes["led_without_minority"] += 1
    leader = _leads(world, away)
    voters = leader.seen_voters if leader else ()
    removed = next((name for name in sorted(away) if name in voters), None)
    if removed is None or not nemesis.members.may_remove(removed, len(voters)):
        return

    if await _demanded(
        world,
        away,
        lambda: (leads := _leads(world, away)) is not None and removed not in leads.seen_voters,
        CHANGED_WITHIN_S,
        f"{removed} was not removed without {', '.join(away)}",
        partial(nemesis.members.remove, removed),
    ):
        world.sometimes["removed_without_minority"] += 1


async def _demanded(
    world: World,
    away: Collection[str],
    is_so: Callable[[], bool],
    within_s: float,
    text: str,
    ask: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Wait until something is so; where it could have been all the time, it is broken."""
    end_s, could = world.now_s + within_s, True
    while not is_so():
        if world.now_s > end_s:
            if could:
                world.violate("liveness", f"{text} within {within_s} s: {world.status()}")
            return False
        could = could and _could(world, away)
        if ask is not None:
            await ask()
        await world.sleep(LOOK_S)
    return True


def _leads(world: World, away: Collection[str]) -> BrokerNode | None:
    """Return which broker leads and serves among those that are there."""
    return next(
        (
            node
            for node in _there(world, away)
            if node.is_up and node.group is not None and node.group.leadership is not None
        ),
        None,
    )


def _could(world: World, away: Collection[str]) -> bool:
    there = [node.group for node in _there(world, away) if node.is_up and node.group is not None]
    lists = [voters for group in there if (voters := voter_keys(group)) is not None]
    return can_do_without((), lists, [member_key(group) for group in there if is_firm(group)])


def _there(world: World, away: Collection[str]) -> list[BrokerNode]:
    return [node for name, node in world.brokers.items() if name not in away]


def voter_keys(group: Group) -> list[str] | None:
    """Return the voters of the list that a member follows; None before there is one."""
    members = group.node.roster.members
    if members is None:
        return None
    return [str(member.key) for member in members.members if member.is_voter]


def member_key(group: Group) -> str:
    """Return the member that a broker is, as lists name it: a wiped one is another."""
    node = group.node
    return str((node.settings.self_id, node.identity.incarnation))


def is_firm(group: Group) -> bool:
    """Return whether a member keeps what it acknowledged, in its own list or not.

    One that follows a list without itself counts in the lists of others: it must not have that
    list before the others can go on with it.
    """
    raft = group.node
    return not (
        raft.eligibility.damaged
        or raft.eligibility.doubtful
        or raft.state.has_hole
        or group.store.refilling
    )


STALL_S: Final = 60.0
"""Several elections with their longest timeouts, and the deadlines of the sends before them."""

STALL_LOOK_S: Final = 2.0
"""Far below `STALL_S`, and seldom enough to cost nothing."""

ACKNOWLEDGED: Final = frozenset({F.SEND, F.HALF})
"""What producers do all the time."""


class StallWatch:
    """When producers of one run were acknowledged last, and since when they could have been."""

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
        if not self._is_on or now_s < self._looked_s + STALL_LOOK_S or world.is_over:
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
