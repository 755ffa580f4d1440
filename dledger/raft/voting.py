"""Votes: when this member stands for election, and whom it gives its own.

The library counts votes and decides who leads; asked is before (pre-vote) and answered only what
`dledger.raft.doubt` allows. What rests on term and vote leaves through `dledger.raft.promises`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from commitlog.errors import DiskFullError, LogBusyError
from dledger.raft.bounds import TERM_MAX
from dledger.raft.clocks import Clocks
from dledger.raft.core import Message, RaftCore
from dledger.raft.doubt import Doubt
from dledger.raft.election import Ballot, ElectionTimer, is_up_to_date, majority
from dledger.raft.guards import Guards
from dledger.raft.installation import Installation
from dledger.raft.journal import CommitLogJournal
from dledger.raft.owner import Owner
from dledger.raft.peers import Peers
from dledger.raft.promises import Promises
from dledger.raft.roster import Roster
from dledger.raft.settings import RaftSettings
from dledger.raft.wire import Kind
from remoting.seams import Clock

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Voting:
    """The member as candidate and as voter."""

    settings: RaftSettings
    owner: Owner
    guards: Guards
    clock: Clock
    clocks: Clocks
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    timer: ElectionTimer
    peers: Peers
    doubt: Doubt
    promises: Promises
    installation: Installation
    _pre_ballot: Ballot = field(default_factory=lambda: Ballot(0), init=False)
    _ballot: Ballot = field(default_factory=lambda: Ballot(0), init=False)
    _transfer_term: int = field(default=0, init=False)

    # -- standing --------------------------------------------------------------------------

    def due_in(self) -> float:
        """Return seconds until this member should stand for election."""
        if self.core.is_leader:
            return self.settings.election_timeout_s
        return self.timer.deadline_s - self.clock.monotonic()

    def stand(self) -> bool:
        """The election timeout passed: ask whether this member would win, then stand.

        Returns:
            Whether it stands already: nobody is to be asked first. The event must end then.
        """
        self.timer.stand(self.clock.monotonic())
        self._pre_ballot = Ballot(0)
        if not self._may_stand() or not self.clocks.may_stand():
            return False
        voters = self.roster.other_voters
        if not self.guards.one_vote_per_voter or not voters:
            self._campaign()
            return True
        term, journal = self.core.term + 1, self.journal
        self._pre_ballot = Ballot(term, {self.settings.self_id})
        for name in voters:
            self.peers.send(name, Kind.PRE_VOTE, term, journal.last_index, journal.last_term)
        return False

    def on_timeout_now(self, peer: str, last_index: int) -> bool:
        """The leader asks this member to stand at once; nobody is asked first.

        Returns:
            Whether it stands: the event must end then.
        """
        if (
            peer != self.core.leader_id
            or last_index > self.journal.last_index
            or not self._may_stand()
        ):
            return False
        self._transfer_term = self.core.term + 1
        self._campaign()
        return True

    def _may_stand(self) -> bool:
        return (
            not self.core.is_leader
            and self.core.term < TERM_MAX
            and not self.installation.under_way
            and self.roster.is_self_voter
            and self.doubt.may_vote(self.journal.last_term, self.journal.last_index)
            and self.owner.may_lead()
            and self.journal.log.allocator.has_reserve
        )

    def _campaign(self) -> None:
        log.info("campaign", group=self.settings.group, term=self.core.term + 1)
        self._ballot = Ballot(self.core.term + 1)
        self.elect(self.core.campaign)

    def elect(self, act: Callable[[], None]) -> None:
        """Do what may make this member leader; one whose first entry does not fit is none."""
        try:
            act()
        except (DiskFullError, LogBusyError) as error:
            log.error("election_won_without_space", term=self.core.term, error=str(error))
            self.core.observe_term(self.core.term + 1)

    # -- what the library says -------------------------------------------------------------

    def library_says(self, peer: str, message: Message) -> None:
        """Take a message the library wants to send: votes wait for the disk."""
        match message["type"]:
            case "request_vote":
                transfer = message["term"] == self._transfer_term
                last = (message["last_log_index"], message["last_log_term"], transfer)
                self.promises.hold(peer, Kind.VOTE, message["term"], last)
            case "response_vote":
                self.timer.restart(self.clock.monotonic())
                self.promises.hold(peer, Kind.VOTE_REPLY, message["term"], ())
            case _:
                pass  # append replies are ours: they wait for the disk

    # -- what the others say ---------------------------------------------------------------

    def on_vote(
        self, peer: str, term: int, last_index: int, last_term: int, transfer: bool
    ) -> None:
        """*peer* stands in *term* and asks for this member's vote."""
        sticky = self.timer.hears_leader(self.clock.monotonic()) or self.core.is_leader
        if not self.doubt.may_vote(last_term, last_index) or (
            sticky and not transfer and self.guards.one_vote_per_voter
        ):
            return
        self.core.step(
            peer,
            {
                "type": "request_vote",
                "term": term,
                "last_log_index": last_index,
                "last_log_term": last_term,
            },
        )

    def on_vote_reply(self, peer: str, term: int) -> None:
        """*peer* votes for this member in *term*."""
        if self.guards.one_vote_per_voter and not (
            self.roster.is_voter(peer) and self._ballot.grant(term, peer)
        ):
            return
        self.elect(lambda: self.core.step(peer, {"type": "response_vote", "term": term}))

    def on_pre_vote(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        """*peer* asks whether it would get this member's vote in *term*."""
        now_s = self.clock.monotonic()
        own_last = (self.journal.last_term, self.journal.last_index)
        goes_first = (
            self.settings.self_id < peer
            and (last_term, last_index) == own_last
            and term == self._pre_ballot.term
            and self.timer.stands(now_s)
        )
        granted = (
            term > self.core.term
            and self.doubt.may_vote(last_term, last_index)
            and not self.core.is_leader
            and not self.timer.hears_leader(now_s)
            and not goes_first
            and is_up_to_date(last_term, last_index, *own_last)
        )
        if granted:
            self.timer.give_way(now_s)
        self.peers.send(peer, Kind.PRE_VOTE_REPLY, term, granted)

    def on_pre_vote_reply(self, peer: str, sender_term: int, term: int, granted: bool) -> bool:
        """*peer*, which is in *sender_term*, says whether it would vote for this member in *term*.

        Returns:
            Whether this member stands now: the event must end then.
        """
        if not granted:
            if self.roster.member(peer) is not None:
                self.core.observe_term(sender_term)
            return False
        if (
            not self.roster.is_voter(peer)
            or self.core.is_leader
            or term != self.core.term + 1
            or not self._pre_ballot.grant(term, peer)
            or len(self._pre_ballot.votes) != majority(self.roster.voters)
        ):
            return False
        self._campaign()
        return True
