"""After the faults: a leader and a change of the members are demanded before a minority is back.

Healed as a whole first, a group that cannot go on without its minority appears as one that can.
Nothing is demanded where too few are there, or sure of what they acknowledged, for any leader to be
elected: then it is as after any plan, and all come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from jepsen_like.nemesis.minority import can_do_without

if TYPE_CHECKING:
    from dledger.group import Group
    from jepsen_like.nemesis.nemesis import Nemesis
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.world import World

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

    Raises:
        Violation: ``liveness``: They could, and did not in time.
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
    removed = next((name for name in sorted(away) if leader and name in leader.seen_voters), None)
    if removed is None:
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
    """Wait until something is so; where it could have been all the time and is not, it is broken.

    Args:
        ask: What makes it so, tried again and again.
    """
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
