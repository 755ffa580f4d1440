"""Changes of the members: orders to the leader, some of them while a minority is away.

A majority of the voters must be able to change the members and to elect without the others: the
members that a change leaves behind, the leader that made it, or one that lost its power. Which may
be away (`choose`), and which can go on then (`can_do_without`), are pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio

from dledger.commitlog.errors import MQError
from dledger.jepsen_like.history.operation import Event
from dledger.jepsen_like.nemesis.ground import CannotBeDone, Ground
from dledger.jepsen_like.nemesis.links import Links
from dledger.jepsen_like.nemesis.nodes import Nodes
from dledger.jepsen_like.plans.plan import Kind, Step

LEAST_VOTERS: Final = 3
"""Of fewer none is removed while another one is away."""


class Change(IntEnum):
    """What is asked of the leader meanwhile."""

    REMOVE_ABSENT = 0
    REMOVE_PRESENT = 1
    ADD_MISSING = 2
    REMOVE_AND_LEAD_NO_MORE = 3
    """One that is there is removed, and the leader goes away with the change."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The absent members and the change asked for.

    Attributes:
        away: Voters that go before the change is asked for.
        removed: Member that the change removes; empty: it adds the missing one.
        leader_goes: Whether the leader goes, too, as soon as the change was asked for.
    """

    away: tuple[str, ...]
    removed: str = ""
    leader_goes: bool = False


def majority(voters: int) -> int:
    """Return how many of *voters* decide."""
    return voters // 2 + 1


def choose(
    change: Change, leader: str, voters: Collection[str], order: Callable[[list[str]], None]
) -> Chosen | None:
    """Return the members that go away: a majority of the voters before and after a change stays.

    None: there are too few *voters*, the list in force. The member that leads is not removed.
    *order* shuffles names in place.
    """
    others = [name for name in sorted(voters) if name != leader]
    order(others)
    size = len(voters)
    if leader not in voters:
        return None
    if change is Change.ADD_MISSING:
        return Chosen(tuple(others[: size - majority(size)]))
    if size < LEAST_VOTERS:
        return None
    if change is Change.REMOVE_ABSENT:
        away = tuple(others[: size - majority(size)])
        return Chosen(away, away[0])
    # The one that is removed counts before the change only, one that is away in neither list.
    goes = change is Change.REMOVE_AND_LEAD_NO_MORE
    spare = size - 1 - majority(size - 1) - goes
    return None if spare < 0 else Chosen(tuple(others[1 : 1 + spare]), others[0], goes)


def can_do_without(
    away: Collection[str], lists: Iterable[Sequence[str]], firm: Collection[str]
) -> bool:
    """Return whether members that run and hold all they acknowledged decide in every list.

    *lists*: the voters, as each member that is there last had them.
    """
    there = set(firm) - set(away)
    every = list(lists)
    return bool(every) and all(
        len(there.intersection(voters)) >= majority(len(voters)) for voters in every
    )


ORDER_S: Final = 60.0
"""How long an order to the group is waited for."""

ADD_TRIES: Final = 60
"""So often a group that lacks members is asked to add them again."""

ADD_LOOK_S: Final = 2.0
"""Pause between two of these orders."""

LEADER_GOES_S: Final = (0.0, 0.001, 0.002, 0.005, 0.01, 0.05)
"""Seconds a leader that goes away with a change has to write it and send it to a member."""


class MemberChanges:
    """The orders of one run."""

    def __init__(self, ground: Ground, nodes: Nodes, links: Links) -> None:
        self._ground = ground
        self._nodes = nodes
        self._links = links
        self.away: Counter[str] = Counter()

    async def transfer(self, step: Step, event: Event) -> None:
        """Ask the leader to give the leadership to a member."""
        node = self._nodes.one(step, event)
        if node.name == self._ground.leading():
            raise CannotBeDone("no other member can move it")
        await self.order(event, step.kind, node.name)

    async def add_members(self, step: Step, event: Event) -> None:
        """Add every broker that is no member."""
        await self.add_missing(event)

    async def add_missing(self, event: Event | None = None) -> bool:
        """Add every broker that is no member; tell whether all are members now."""
        missing = self._ground.missing_members()
        if missing is None:
            return False
        event = event or Event(self._nodes.now_ns, self._nodes.now_ns, "add_missing")
        for name in missing:
            await self.order(event, Kind.MEMBER_ADD, name)
        return not missing

    async def remove(self, name: str) -> None:
        """Ask the leader to remove *name*; a refusal or an unknown end is no failure."""
        await self.order(
            Event(self._nodes.now_ns, self._nodes.now_ns, "remove"), Kind.MEMBER_REMOVE, name
        )

    async def remove_member(self, step: Step, event: Event) -> None:
        """Remove one, and add it again later; sometimes with another disk."""
        node = self._nodes.one(step, event)
        self._nodes.check_disks(Kind.WIPE, node)
        await self.order(event, step.kind, node.name)
        await self._ground.sleep(step.for_ms / 1000)
        # Much may have happened to others meanwhile.
        if step.arg % 2 and not event.detail and self._nodes.allows(Kind.WIPE, node):
            await self._nodes.lose_folder(node)
            await node.start()
        await self.add_missing(event)

    async def change_without_minority(self, step: Step, event: Event) -> None:
        """Ask for a change while a minority is away and others may be down; no fault is healed."""
        leader, change = self._ground.leading(), Change(step.arg // 2 % len(Change))
        voters = next((v for v in self._ground.voters() if leader in v), ())
        order = self._nodes.rng.shuffle
        chosen = choose(change, leader or "", voters, order)
        if chosen is None:  # three are enough for the simplest one
            change = Change.REMOVE_ABSENT
            chosen = choose(change, leader or "", voters, order)
        if chosen is None or +self.away:  # two minorities may be a majority
            raise CannotBeDone(f"{len(voters)} voters are too few, or some are away")
        if chosen.removed and not self.may_remove(chosen.removed, len(voters)):
            raise CannotBeDone("what is left of a small list must keep its disks")
        event.node = ",".join(chosen.away)
        event.detail = f"{change.name.lower()} {chosen.removed}".strip()
        cut_off = step.arg % 2 == 1
        gone = list(chosen.away)
        await self._go_away(gone, cut_off=cut_off)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask, chosen)
            if chosen.leader_goes and leader is not None:
                await self._ground.sleep(
                    LEADER_GOES_S[self._nodes.rng.randrange(len(LEADER_GOES_S))]
                )
                await self._go_away([leader], cut_off=cut_off)
                gone.append(leader)
            await self._ground.sleep(step.for_ms / 1000)
            nursery.cancel_scope.cancel()
        await self._come_back(gone, cut_off=cut_off)
        await self._add_again()

    def may_remove(self, name: str, voters: int) -> bool:
        """Return whether the list without *name* can do with what its members hold."""
        return voters > LEAST_VOTERS or self._nodes.allows(Kind.WIPE, self._ground.brokers[name])

    async def _ask(self, chosen: Chosen) -> None:
        event = Event(self._nodes.now_ns, self._nodes.now_ns, "minority")
        with suppress(CannotBeDone):
            if chosen.removed:
                await self.order(event, Kind.MEMBER_REMOVE, chosen.removed)
            else:
                await self.add_missing(event)
            if not event.detail:
                self._ground.sometimes["change_without_minority"] += 1

    async def _add_again(self) -> None:
        """Add the removed member as soon as a member leads: else too few are left."""
        for _ in range(ADD_TRIES):
            with suppress(CannotBeDone):
                if await self.add_missing():
                    return
            await self._ground.sleep(ADD_LOOK_S)

    async def _go_away(self, names: list[str], *, cut_off: bool) -> None:
        self.away.update(names)
        for name in names:
            if cut_off:
                self._links.cut(self._links.around(name))
            else:
                self._nodes.held_down[name] += 1
                await self._nodes.machine(name).kill()

    async def _come_back(self, names: list[str], *, cut_off: bool) -> None:
        self.away -= Counter(names)
        for name in names:
            if cut_off:
                self._links.mend(self._links.around(name))
        if not cut_off:
            self._nodes.held_down.subtract(names)
            await self._nodes.down([self._nodes.machine(name) for name in names], 0)

    async def replace_member(self, step: Step, event: Event) -> None:
        """A wiped node under an old name: it takes its own former place."""
        await self._nodes.wipe(step, event)
        if not event.detail:
            await self.order(event, step.kind, event.node)

    async def order(self, event: Event, kind: Kind, name: str, *, asked: str = "") -> None:
        """Give an order to the leader; that it is refused, or its end unknown, is no failure."""
        if not asked and not self._ground.leads_now():
            event.detail = "skipped: no member leads"
            return
        with trio.move_on_after(ORDER_S):
            self._nodes.budget.orders += 1
            try:
                await self._ground.order(kind, name, asked=asked)
            except MQError as error:
                event.detail = f"refused: {type(error).__name__}: {error}"
            finally:
                self._nodes.budget.orders -= 1
