"""Half messages that wait for their decision, and the decisions taken last. Pure.

A half message is named by its queue offset in the half topic: that queue is never deleted, so an
offset there names one message permanently.

Spec: docs/internals/state.md, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, unique
from typing import Final, NamedTuple

from dledger.commitlog.errors import InvariantBroken
from dledger.state.table import Form, Table

DECISIONS_KEPT: Final = 65_536
"""Newest decisions that are remembered, so that a decision sent twice is answered as the first
time: about a minute of a thousand transactions a second. Part of the state: all replicas forget
the same."""


@unique
class TransactionDecision(IntEnum):
    """What became of a half message."""

    COMMIT = 8
    """It is in its real queue."""
    ROLLBACK = 12
    """No consumer will ever see it."""
    GIVEN_UP = 16
    """There was no decision in time; a copy is in ``TRANS_CHECK_MAX_TIME_TOPIC``."""


class OpenHalf(NamedTuple):
    """A half message without a decision."""

    phy_offset: int
    store_time_ms: int
    checks: int = 0
    """How often its producers were asked."""
    checked_ms: int = 0
    """Store time of the newest of these checks."""


OPEN_HALVES: Final = Form[int, OpenHalf]("open_halves", int, OpenHalf)
DECISIONS: Final = Form[int, TransactionDecision](
    "decisions", int, TransactionDecision, in_order=True
)


@dataclass(slots=True)
class TransactionTable:
    """What is known of half messages by their queue offset; changed by `apply_entry` alone."""

    open: Table[int, OpenHalf] = field(default_factory=OPEN_HALVES.table)
    """In the order of the log: the first one holds the oldest bytes."""
    decided: Table[int, TransactionDecision] = field(default_factory=DECISIONS.table)
    """The newest `DECISIONS_KEPT`, in the order they were taken."""

    def begin(self, half_offset: int, phy_offset: int, store_time_ms: int) -> None:
        """A half message is stored."""
        self.open[half_offset] = OpenHalf(phy_offset, store_time_ms)

    def check(self, half_offset: int, checks: int, checked_ms: int) -> None:
        """Its producers are asked for the *checks*-th time.

        Raises InvariantBroken: it is not open, or was asked for another number of times before.
        """
        half = self.open.get(half_offset)
        if half is None or half.checks != checks - 1:
            raise InvariantBroken(f"check {checks} of half message {half_offset}, which is {half}")
        self.open[half_offset] = half._replace(checks=checks, checked_ms=checked_ms)

    def decide(self, half_offset: int, decision: TransactionDecision) -> None:
        """Write the decision.

        Raises InvariantBroken: the half message is not open: it would be decided twice.
        """
        if self.open.pop(half_offset, None) is None:
            known = self.decided.get(half_offset)
            raise InvariantBroken(
                f"{decision.name} of half message {half_offset}, which is "
                + ("not open" if known is None else f"decided as {known.name}")
            )
        self.decided[half_offset] = decision
        self.decided.drop_oldest(DECISIONS_KEPT)

    @property
    def oldest_position(self) -> int | None:
        """Where the oldest open half message stands in the log; None without any."""
        return next((half.phy_offset for half in self.open.values()), None)
