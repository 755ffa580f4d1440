"""Whether this member's promises may be lost, and what it may do meanwhile.

Votes and acknowledgements are promises. After an unclean stop with async flushes, or when a torn
log was cut, some may be lost: the member is *doubtful*, follows, and neither votes nor leads. It
is a full voter again once it holds, durably, an entry of a leader's own term that is committed:
whatever it had promised in that log is there again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from dledger.raft.core import RaftCore
from dledger.raft.election import is_up_to_date, majority
from dledger.raft.journal import CommitLogJournal
from dledger.raft.roster import Roster

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Doubt:
    """What this member cannot vouch for.

    Attributes:
        doubtful: Promises may be lost. It votes when a leader has caught it up, or when most
            members are in doubt and all were heard.
        damaged: Promises are lost. It follows until a leader has refilled it, whatever the others
            say.
    """

    group: str
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    doubtful: bool
    damaged: bool
    _refilled_at: tuple[int, int] = field(default=(0, 0), init=False)

    @property
    def has_hole(self) -> bool:
        """Whether entries are damaged here that another voter may have: no promises until then."""
        return len(self.journal.log.damaged) > 0 and bool(self.roster.other_voters)

    def may_vote(self, last_term: int, last_index: int) -> bool:
        """Whether this member may vote for a candidate whose log ends there."""
        # Whether this member or the candidate stands in the list here does not matter: the
        # candidate counts only voters of its own list, which may be newer (thesis §4.1).
        if self.roster.members is None or self.damaged or self.has_hole:
            return False
        if not self.doubtful:
            return True
        # When most members lost promises together, the best log among *all* of them is what is
        # left: somebody whose doubt has no ground may hold what another one really lost.
        voters = self.roster.other_voters
        hellos = [self.roster.hellos[name] for name in voters if self.roster.is_voter(name)]
        doubtful = self.roster.is_self_voter + sum(1 for hello in hellos if hello.doubtful)
        return (
            doubtful >= majority(self.roster.voters)
            and len(hellos) == len(voters)
            and all(
                hello.last is not None and is_up_to_date(last_term, last_index, *hello.last)
                for hello in hellos
            )
        )

    def verified(self, term: int, verified: int, commit_index: int) -> None:
        """All up to *verified* is as the leader of *term*, which shows *commit_index*, has it."""
        if self.doubtful and verified >= commit_index > self.journal.anchor_index:
            self._refilled_at = (term, commit_index)

    def end_if_refilled(self, noop_index: int) -> None:
        """Be a full voter again once a leader's own entry is committed and all up to it is here.

        Args:
            noop_index: Where this member's own reign began; 0 while it does not lead.
        """
        core, journal = self.core, self.journal
        if core.is_leader:
            term, index = core.term, min(core.commit_index, journal.log.durable_index)
            ended = index >= noop_index > 0
        else:
            term, index = self._refilled_at
            ended = (
                term == core.term
                and journal.log.durable_index >= index > 0
                and journal.term_at(index) == term
            )
        if ended:
            log.info("doubt_ended", group=self.group, term=term, index=index)
            self.doubtful = self.damaged = False
