"""The one entry of a service that is proposed and not applied yet: what its answer means.

A service of the leader that decides on applied state alone has at most one entry under way: queue
locks and POP. The answer to a proposal may come before the entry is applied here, and after the
leadership has ended; that is decided here, and the services act on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from dledger.group_api import Proposed

T = TypeVar("T")


class Fate(Enum):
    """What is known of an entry once its proposal is answered."""

    APPLIED = auto()
    """It is stored and applied here."""
    STORED = auto()
    """It is stored, and will be applied here in this term."""
    OUT_OF_SIGHT = auto()
    """It is stored, and this node has stopped to lead before it was applied."""
    UNKNOWN = auto()
    """It may still be stored."""
    NOT_STORED = auto()
    """It never will be stored."""


@dataclass(slots=True, eq=False)
class EntryUnderWay(Generic[T]):
    """The change under way.

    Attributes:
        newest_before: Index of the newest change of this service that was applied before it.
        proposed: The answer; None before there is one.
        is_uncertain: Whether it may be stored or not. It has arrived, or another one has, when a
            change behind *newest_before* is applied.
    """

    work: T
    newest_before: int
    proposed: Proposed | None = None
    is_uncertain: bool = False

    @property
    def waits_for_apply(self) -> bool:
        """Whether it is stored and no more is missing than its apply."""
        return self.proposed is not None and self.proposed.outcome == "stored"

    def answered(self, proposed: Proposed, applied_index: int, *, is_current: bool) -> Fate:
        """Take the answer in."""
        self.proposed = proposed
        if proposed.outcome == "unknown":
            self.is_uncertain = is_current
            return Fate.UNKNOWN
        if proposed.outcome != "stored":
            return Fate.NOT_STORED
        if proposed.index <= applied_index:
            return Fate.APPLIED
        return Fate.STORED if is_current else Fate.OUT_OF_SIGHT

    def has_arrived(self, applied_index: int, newest: int) -> bool:
        """Tell whether it need not be waited for any more."""
        if self.proposed is not None and self.waits_for_apply:
            return self.proposed.index <= applied_index
        return self.is_uncertain and newest > self.newest_before
