"""What a correct cluster must survive, and therefore what may be done to it.

Durability is promised while a majority of voters keeps its disks. So data is destroyed (a wipe, bit
rot) on one voter at a time, while the others keep what they promised, however far behind they are;
and on the next only when the former is sound again: it votes, holds everything committed, and its
files are what its peers' are. A majority of every list of voters counts that a member follows now:
a list is in force as soon as it is written, long before it is committed, so an order that is under
way forbids it, too.

A power failure may leave a log torn before entries that survived, and what cannot be told from a
broken promise takes a member's vote (docs/operations.md). A list of even length has no vote to
spare for that: its members are killed instead. Everything else (kills, cuts, pauses, power
failures of all nodes, full disks, clocks) may happen at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from jepsen_like.plans.plan import Kind

DESTRUCTIVE: Final = frozenset({Kind.WIPE, Kind.BIT_ROT, Kind.FSYNC_ERROR})
"""Kinds after which a node may lack what it had promised."""

TEARING: Final = frozenset({Kind.POWER_CUT, Kind.POWER_CUT_ALL, Kind.FSYNC_ERROR})
"""Kinds after which a node may not be able to tell whether it lacks something."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """What the world knows of one voter.

    Attributes:
        is_up: Its process runs and is not paused.
        keeps_promises: It is free of doubt and of damage it knows of, and votes.
        is_caught_up: It has applied all that is committed, too.
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


@dataclass(slots=True)
class Budget:
    """Remembers whose data was destroyed and has not come back.

    Attributes:
        hurt: By what.
        orders: Changes of the members that are under way.
    """

    hurt: dict[str, Kind] = field(default_factory=dict)
    orders: int = 0

    def allows(
        self,
        kind: Kind,
        node: str,
        nodes: Mapping[str, Soundness],
        lists: Collection[Collection[str]] = (),
    ) -> bool:
        """Tell whether *kind* may be done to *node* now.

        Args:
            kind: What is to be done.
            node: To whom.
            nodes: What is known of every broker, member or not.
            lists: The voters, as each member last had them; none: all *nodes*.
        """
        if kind in TEARING and any(len(voters) % 2 == 0 for voters in lists):
            return False
        if kind not in DESTRUCTIVE:
            return True
        self.note_sound(name for name, known in nodes.items() if known.is_sound)
        others = [name for name in nodes if name != node]
        if kind is Kind.FSYNC_ERROR:
            # It loses only what it had not promised yet; but not beside a hurt one.
            return not any(name in self.hurt for name in others)
        if self.hurt or self.orders:
            return False
        firm = {name for name in others if nodes[name].keeps_promises}
        return all(
            len(firm.intersection(voters)) > len(voters) // 2
            and firm.issuperset(name for name in voters if name != node)
            for voters in lists or [tuple(nodes)]
        )

    def note_hurt(self, kind: Kind, node: str) -> None:
        """Data of *node* was destroyed."""
        if kind in (Kind.WIPE, Kind.BIT_ROT):
            self.hurt[node] = kind

    def note_sound(self, nodes: Iterable[str]) -> None:
        """These nodes hold everything again."""
        for node in nodes:
            self.hurt.pop(node, None)
