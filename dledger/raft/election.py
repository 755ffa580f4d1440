"""When to stand for election, and whether to let somebody else (Raft thesis §9.6, pre-vote).

A member asks first whether it *would* be elected, in a term nobody enters yet. Those who hear a
leader say no, so a member that was cut off cannot depose one by coming back, and terms do not
grow while nobody can win. When a leader's process ends, all others notice at once: two that stand
at the same moment would each vote for itself and wait a whole timeout. So who has said yes gives
way for a moment, and of two that ask each other the one whose name sorts first goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remoting.seams import Rng

# As a share of the timeout: longer than a vote on a busy disk, shorter than anyone would notice.
GIVE_WAY = 0.2


@dataclass(slots=True)
class ElectionTimer:
    """The deadline by which this member must have heard a leader.

    The share of chance in it is drawn when the timer restarts, not at every sign of life.
    """

    timeout_s: float
    rng: Rng
    patience: float = 1.0
    deadline_s: float = 0.0
    heard_s: float = -1e9
    stood_s: float = -1e9
    hurried: bool = False

    def restart(self, now_s: float) -> None:
        """Wait one timeout, up to twice as long, from now on."""
        self.patience = 1.0 + self.rng.random()
        self.deadline_s = now_s + self.timeout_s * self.patience

    def stand(self, now_s: float) -> None:
        """Begin to wait: this member asks now, and once more if it hurried."""
        self.restart(now_s)
        self.stood_s = now_s
        if self.hurried:
            self.hurried = False
            self.deadline_s = now_s + self.timeout_s * (0.25 + 0.5 * self.rng.random())

    def give_way(self, now_s: float) -> None:
        """Another may be elected as far as this member goes: leave it the time to be."""
        self.deadline_s = max(self.deadline_s, now_s + self.timeout_s * GIVE_WAY)

    def heard_leader(self, now_s: float) -> None:
        """A leader of this term spoke."""
        self.hurried = False
        self.heard_s = now_s
        self.deadline_s = now_s + self.timeout_s * self.patience

    def lost_leader(self, now_s: float) -> None:
        """The leader's connections broke: do not wait for the timeout, but do not all rush."""
        self.heard_s = -1e9
        self.hurried = True
        hurried = now_s + self.timeout_s * (0.05 + 0.15 * self.rng.random())
        self.deadline_s = min(self.deadline_s, hurried)

    def hears_leader(self, now_s: float) -> bool:
        """Whether a leader spoke within the shortest timeout."""
        return now_s - self.heard_s < self.timeout_s

    def stands(self, now_s: float) -> bool:
        """Whether this member asked to be elected just now."""
        return now_s - self.stood_s < self.timeout_s * GIVE_WAY


@dataclass(slots=True)
class Ballot:
    """Who said yes to one question: a pre-vote or a vote, in one term."""

    term: int
    votes: set[str] = field(default_factory=set)

    def grant(self, term: int, voter: str) -> bool:
        """Count *voter*; false when it is for another term or was counted before."""
        if term != self.term or voter in self.votes:
            return False
        self.votes.add(voter)
        return True


def is_up_to_date(last_term: int, last_index: int, own_last_term: int, own_last_index: int) -> bool:
    """Tell whether a candidate's log is at least as new as one's own (Raft §5.4.1)."""
    return (last_term, last_index) >= (own_last_term, own_last_index)


def majority(voters: int) -> int:
    """Return how many of *voters* are a majority."""
    return voters // 2 + 1
