"""Handing leadership over (Raft thesis §3.10).

Under load the target never has everything: something is appended all the time. So the leader
stops appending, waits until the target has all of it and all of it is committed, tells the target
to stand for election at once, and goes on if it still leads a while later. ::

    CATCHING_UP ──target has everything──► ASKED ──another term──► DONE
         └──────────── time is over ────────┴────────────────────► FAILED

Pure: `dledger.raft.handover` drives it after every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """How far a transfer is."""

    CATCHING_UP = "catching_up"
    ASKED = "asked"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Transfer:
    """One attempt to hand leadership over."""

    target: str
    term: int
    """The term in which this node leads."""
    deadline_s: float
    """When to give up waiting for the target to catch up."""
    timeout_s: float
    """How long an asked target has to win."""
    phase: Phase = Phase.CATCHING_UP

    @property
    def is_over(self) -> bool:
        """Whether appending may go on, or somebody else leads."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    def advance(self, now_s: float, *, leads: bool, term: int, target_has_all: bool) -> bool:
        """Take note of how things are.

        Args:
            leads: This node believes it leads, in *term*.
            target_has_all: The target acknowledged the last entry, and that is committed.
        Returns:
            Whether the target is to be asked now to stand for election.
        """
        if self.is_over:
            return False
        if not leads or term != self.term:
            # Without having asked, somebody else was elected: not what was wanted, but it is over.
            self.phase = Phase.DONE if self.phase is Phase.ASKED else Phase.FAILED
            return False
        if self.phase is Phase.CATCHING_UP and target_has_all:
            self.phase = Phase.ASKED
            self.deadline_s = now_s + self.timeout_s
            return True
        if now_s >= self.deadline_s:
            self.phase = Phase.FAILED
        return False


def choose_target(matches: dict[str, int]) -> str | None:
    """Return the name that has most; None when there is nobody."""
    return max(matches, key=lambda name: (matches[name], name), default=None)
