"""Changes of the members while a minority is away, and the leaders possible without it. Pure.

A majority of the voters must be able to change the members and to elect without the others: the
members that a change leaves behind, the leader that made it, or one that lost its power.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

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

    Args:
        leader: The member that leads; it is not removed.
        voters: The list in force.
        order: Shuffles names in place.
    Returns:
        None: There are too few voters for this change.
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

    Then the one of them with the longest log can be elected in the list it follows: all of them
    give it their votes.

    Args:
        lists: The voters, as each member that is there last had them.
        firm: Members that run, vote and hold all they acknowledged.
    """
    there = set(firm) - set(away)
    every = list(lists)
    return bool(every) and all(
        len(there.intersection(voters)) >= majority(len(voters)) for voters in every
    )
