"""What a correct cluster must survive, and therefore what may be done to it.

Durability is guaranteed while a majority of voters keeps its disks. So data is destroyed (a wipe,
bit rot, bad sectors) on one voter at a time, while the others keep what they acknowledged; and on
the next only when the former is sound again: it votes, holds everything committed, and its files
are its peers'. A majority of every list of voters counts that a member follows now, since a list is
in force as soon as it is written.

A torn tail (`Kind.TORN_TAIL`) is a loss that passes for a write torn by a crash: its owner comes
back with a vote, so it is allowed only where that vote can elect no member that lacks anything
(`tail_is_spare`). A power failure may take a member's vote (docs/operate/operations.md), which a
list of even length cannot spare: its members are killed instead. Everything else may happen at any
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from dledger.jepsen_like.plans.plan import Kind

HURTING: Final = frozenset(
    {Kind.WIPE, Kind.BIT_ROT, Kind.TORN_TAIL, Kind.BAD_SECTOR, Kind.FILE_ROT, Kind.LYING_FLUSH}
)
"""Kinds after which a node does lack what it had acknowledged."""

DESTRUCTIVE: Final = HURTING | {Kind.FSYNC_ERROR}
"""Kinds after which a node may lack what it had acknowledged."""

TEARING: Final = frozenset({Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.FSYNC_ERROR, Kind.LYING_FLUSH})
"""Kinds after which a node may not be able to tell whether it lacks something."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """What the world knows of one voter.

    Attributes:
        is_caught_up: It knows as committed all that the leader does, too.
        is_intact: And its log bytes are those of its peers, as far as both reach.
    """

    is_up: bool
    keeps_promises: bool
    is_caught_up: bool
    is_intact: bool

    @property
    def is_sound(self) -> bool:
        """Whether the group could lose another one."""
        return self.is_up and self.is_caught_up and self.is_intact


@dataclass(frozen=True, slots=True)
class LogEnd:
    """How far the log of a broker that answers reaches."""

    last_index: int
    held_index: int


def others_of(node: str, lists: Iterable[Collection[str]], brokers: Iterable[str]) -> list[str]:
    """Return the voters beside *node*, of all *lists*; where there is no list, all *brokers*."""
    voters = {name for voters in lists for name in voters} or set(brokers)
    return sorted(voters - {node})


def newest_of(logs: Sequence[LogEnd | None]) -> int | None:
    """Return the newest entry any of these has; None when one of them does not say."""
    ends = [-1 if log is None else log.last_index for log in logs]
    return max(ends) if ends and min(ends) >= 0 else None


def tail_is_spare(newest_index: int, logs: Sequence[LogEnd | None]) -> bool:
    """Return whether no member needs a voter's newest bytes."""
    return all(log is not None and log.held_index >= newest_index for log in logs)


@dataclass(slots=True)
class Budget:
    """Remembers whose data was destroyed and has not come back.

    *under_way*: whose data is being destroyed at this moment, and by how many steps: what it shows
    of itself is over any moment now.
    """

    hurt: dict[str, Kind] = field(default_factory=dict)
    orders: int = 0
    under_way: Counter[str] = field(default_factory=Counter)

    def allows(
        self,
        kind: Kind,
        node: str,
        nodes: Mapping[str, Soundness],
        lists: Collection[Collection[str]] = (),
    ) -> bool:
        """Tell whether *kind* may be done to *node* now."""
        if kind in TEARING and any(len(voters) % 2 == 0 for voters in lists):
            return False
        if kind not in DESTRUCTIVE:
            return True
        self.note_sound(name for name, known in nodes.items() if known.is_sound)
        others = [name for name in nodes if name != node]
        if kind is Kind.FSYNC_ERROR:
            # It loses only what it had not acknowledged yet; but not beside a hurt one.
            return not any(name in self.hurt or self.under_way[name] for name in others)
        if self.hurt or self.orders or self.under_way.total():
            return False
        firm = {name for name in others if nodes[name].keeps_promises}
        return all(
            len(firm.intersection(voters)) > len(voters) // 2
            and firm.issuperset(name for name in voters if name != node)
            for voters in lists or [tuple(nodes)]
        )

    def note_hurt(self, kind: Kind, node: str) -> None:
        """Data of *node* was destroyed."""
        if kind in HURTING:
            self.hurt[node] = kind

    def note_sound(self, nodes: Iterable[str]) -> None:
        """These nodes hold everything again."""
        for node in nodes:
            if not self.under_way[node]:
                self.hurt.pop(node, None)

    @contextmanager
    def destroying(self, node: str) -> Iterator[None]:
        """Take *node* for hurt, whatever it shows, while the block destroys its data."""
        self.under_way[node] += 1
        try:
            yield
        finally:
            self.under_way[node] -= 1
