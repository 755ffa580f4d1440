"""What changed from one look at a cluster to the next: leaders, silent members; and lag lanes.

Brokers keep no history of their elections, so the time line holds what this console saw since it
began. What happens between one look and the next shows as one change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dledger.client.admin.admin import judge_group
from dledger.console.cluster_look import ClusterLook, Status, group_views, names_in

EVENTS_KEPT: Final = 200
"""Of the time line."""
LANE_LOOKS: Final = 60
"""Readings that a lag lane shows: two minutes."""
LANE_WIDTH: Final = 240
LANE_HEIGHT: Final = 24
LANE_FULL_ENTRIES: Final = 10
"""The least lag that a lane's height stands for: a lane of one entry is no mountain."""
LOOK_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed.

    Attributes:
        at_ms: When it was seen.
        group: The broker group; empty for a NameServer.
        kind: ``leader``, ``no leader``, ``silent``, ``back``, ``term``.
        text: What happened.
        cause: What is known of the reason; may be empty.
    """

    at_ms: int
    group: str
    kind: str
    text: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """The newest lags of a member, as points of a line.

    Attributes:
        points: For an SVG ``polyline`` of `LANE_WIDTH` times `LANE_HEIGHT`.
        most: The largest lag in it, entries.
    """

    points: str
    most: int


@dataclass(slots=True)
class ClusterWatch:
    """The newest look, the time line, and the newest lags.

    Attributes:
        look: The newest look; None before the first.
        events: The newest first.
    """

    look: ClusterLook | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    lags: dict[str, deque[int | None]] = field(default_factory=dict)
    _leaders: dict[str, tuple[str, int]] = field(default_factory=dict)

    def take(self, look: ClusterLook) -> None:
        """Take a new look in."""
        self.events.extendleft(changes_between(self.look, look, self._leaders))
        for name, members in look.groups.items():
            health = judge_group(name, members)
            if health.leader is not None:
                self._leaders[name] = (health.leader, health.term)
        rows = {row.address: row for view in group_views(look) for row in view.members}
        self.lags = {address: self.lags.get(address, deque(maxlen=LANE_LOOKS)) for address in rows}
        for address, row in rows.items():
            self.lags[address].append(row.lag if row.role not in ("no answer", "refused") else None)
        self.look = look

    def lanes(self) -> dict[str, Lane]:
        """Return the lag lane of each member by address."""
        return {address: lane(list(lags)) for address, lags in self.lags.items()}


def lane(lags: list[int | None]) -> Lane:
    """Return the line of some lags, the newest at the right; what is not known is left out."""
    known = [value for value in lags if value is not None]
    most = max(known, default=0)
    full = max(most, LANE_FULL_ENTRIES)
    step = LANE_WIDTH / (LANE_LOOKS - 1)
    points = [
        f"{LANE_WIDTH - (len(lags) - 1 - place) * step:.1f},"
        f"{LANE_HEIGHT - 2 - value * (LANE_HEIGHT - 4) / full:.1f}"
        for place, value in enumerate(lags)
        if value is not None
    ]
    return Lane(" ".join(points), most)


def changes_between(
    before: ClusterLook | None, after: ClusterLook, leaders: Mapping[str, tuple[str, int]]
) -> list[Event]:
    """Return what is different in *after*, the oldest first. Pure.

    Args:
        leaders: The newest leader and term seen of each group.
    """
    found: list[Event] = []
    for address, known in after.name_servers.items():
        if before is None or address not in before.name_servers:
            if known is None:
                found.append(Event(after.at_ms, "", "silent", f"NameServer {address} is silent"))
        elif (known is None) != (before.name_servers[address] is None):
            kind, word = ("silent", "is silent") if known is None else ("back", "answers again")
            found.append(Event(after.at_ms, "", kind, f"NameServer {address} {word}"))
    for group in after.groups:
        earlier = {} if before is None else before.groups.get(group, {})
        found += _silences(after, group, earlier)
        found += _leadership(after, group, earlier, leaders.get(group))
    return found


def _silences(look: ClusterLook, group: str, before: Mapping[str, Status | None]) -> list[Event]:
    found = []
    at_ms, after = look.at_ms, look.groups[group]
    names = names_in(before) | names_in(after)
    for address, said in after.items():
        if address not in before or (said is None) == (before[address] is None):
            continue
        name = names.get(address, address)
        if said is None:
            word = "refuses this console" if address in look.refused else "does not answer"
            found.append(Event(at_ms, group, "silent", f"{name} {word}"))
        else:
            found.append(Event(at_ms, group, "back", f"{name} answers again"))
    return found


def _leadership(
    look: ClusterLook,
    group: str,
    before: Mapping[str, Status | None],
    known: tuple[str, int] | None,
) -> list[Event]:
    at_ms, after = look.at_ms, look.groups[group]
    health = judge_group(group, after)
    if health.leader is None:
        had_one = bool(before) and judge_group(group, before).leader is not None
        if not had_one or not look.refused.isdisjoint(after):
            return []  # one that refuses may lead
        return [Event(at_ms, group, "no leader", "no member leads")]
    names = names_in(before) | names_in(after)
    name = names.get(health.leader, health.leader)
    if known is None:
        text = f"{name} leads in term {health.term}"
        return [Event(at_ms, group, "leader", text, "seen when the console began")]
    old_address, old_term = known
    if old_address == health.leader:
        if old_term == health.term:
            return []
        text = f"{name} leads again, in term {health.term} after {old_term}"
        return [Event(at_ms, group, "leader", text, "an election took place in between")]
    old = after.get(old_address)
    old_name = names.get(old_address, old_address)
    text = f"{name} leads in term {health.term}; before, {old_name} led in term {old_term}"
    if old is None and old_address in look.refused:
        cause = f"{old_name} refuses this console"
    elif old is None:
        cause = f"{old_name} does not answer: its process, machine or network failed"
    else:
        cause = f"{old_name} answers: it handed over, or lost its majority for a while"
    return [Event(at_ms, group, "leader", text, cause)]
