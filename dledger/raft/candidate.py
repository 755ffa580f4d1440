"""Elections: when this member becomes a candidate, and which candidate gets its vote.

A member asks first whether it *would* be elected, in a term that no member enters yet (pre-vote,
Raft thesis §9.6). Members that hear from a leader refuse, so a member that was cut off cannot
depose the leader when it returns, and terms do not grow while no candidate can win. When a leader's
process ends, all others notice at once: two candidates of the same moment would each vote for
itself and wait a whole timeout. So a member that grants a pre-vote delays its own election, and of
two that ask each other the one whose name sorts first continues.

Votes and acknowledgements must survive a crash. After an unclean stop with async flushes, or when a
torn log was cut, some may be lost: the member is `doubtful`, follows, and neither votes nor leads.
It is a full voter again once it holds, durably, an entry of a leader's own term that is committed:
then everything it had acknowledged in that log is there again.

When most members are `doubtful`, the hello of a member that lost nothing does not prove what that
one has: an entry may have come since, and a lost acknowledgement may have made a majority with it.
So with async flushes the votes of certain members must be a majority, or all voters must vote: a
member that votes takes nothing of earlier terms any more, and none of them then has what the
candidate lacks. Lists of members are flushed before they count, so the voters of a lost list cannot
be missed.

The library counts votes and decides which candidate leads. Votes wait for the disk
(`dledger.raft.acks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from dledger.commitlog.errors import DiskFullError, LogBusyError
from dledger.raft.acks import PendingAcks
from dledger.raft.library import Message
from dledger.raft.peers import RaftState
from dledger.raft.snapshot import Installation
from dledger.raft.wire import CERTAIN, TERM_MAX, Kind
from dledger.remoting.seams import Rng

log = structlog.get_logger(__name__)

# As a share of the timeout: longer than a vote on a busy disk, too short to be noticed.
GIVE_WAY = 0.2


@dataclass(slots=True)
class ElectionTimer:
    """The deadline by which this member must have a frame of a leader.

    Its random share is drawn when the timer restarts, not at every heartbeat.
    """

    timeout_s: float
    rng: Rng
    patience: float = 1.0
    deadline_s: float = 0.0
    leader_at_s: float = -1e9
    """When the last frame of a leader arrived."""
    candidate_at_s: float = -1e9
    """When this member last asked to be elected."""
    hurried: bool = False

    def restart(self, now_s: float) -> None:
        """Wait one timeout, up to twice as long, from now on."""
        self.patience = 1.0 + self.rng.random()
        self.deadline_s = now_s + self.timeout_s * self.patience

    def begin_election(self, now_s: float) -> None:
        """Restart for an election that begins now; after `lost_leader` the next follows sooner."""
        self.restart(now_s)
        self.candidate_at_s = now_s
        if self.hurried:
            self.hurried = False
            self.deadline_s = now_s + self.timeout_s * (0.25 + 0.5 * self.rng.random())

    def give_way(self, now_s: float) -> None:
        """Leave another candidate, which this member would elect, the time to win."""
        self.deadline_s = max(self.deadline_s, now_s + self.timeout_s * GIVE_WAY)

    def heard_leader(self, now_s: float) -> None:
        """Restart: a frame of this term's leader arrived."""
        self.hurried = False
        self.leader_at_s = now_s
        self.deadline_s = now_s + self.timeout_s * self.patience

    def lost_leader(self, now_s: float) -> None:
        """Shorten the wait: the leader's connections broke. The random share spreads candidates."""
        self.leader_at_s = -1e9
        self.hurried = True
        hurried = now_s + self.timeout_s * (0.05 + 0.15 * self.rng.random())
        self.deadline_s = min(self.deadline_s, hurried)

    def hears_leader(self, now_s: float) -> bool:
        """Whether a leader's frame arrived within the shortest timeout."""
        return now_s - self.leader_at_s < self.timeout_s

    def is_candidate(self, now_s: float) -> bool:
        """Whether this member asked to be elected a moment ago."""
        return now_s - self.candidate_at_s < self.timeout_s * GIVE_WAY


@dataclass(slots=True)
class Ballot:
    """The members that granted one request: a pre-vote or a vote, in one term."""

    term: int
    votes: set[str] = field(default_factory=set)
    uncertain: set[str] = field(default_factory=set)
    """Those of `votes` whose members may have lost, to a power cut, what they acknowledged."""

    def grant(self, term: int, voter: str, *, is_uncertain: bool = False) -> bool:
        """Count *voter*; false when it is for another term or was counted before."""
        if term != self.term or voter in self.votes:
            return False
        self.votes.add(voter)
        if is_uncertain:
            self.uncertain.add(voter)
        return True

    def is_won(self, voters: int) -> bool:
        """Whether the votes elect: a majority of *voters* that is certain, or all of them."""
        certain = len(self.votes) - len(self.uncertain)
        return certain >= majority(voters) or len(self.votes) >= voters


def is_up_to_date(last_term: int, last_index: int, own_last_term: int, own_last_index: int) -> bool:
    """Return whether a candidate's log is at least as new as one's own (Raft §5.4.1)."""
    return (last_term, last_index) >= (own_last_term, own_last_index)


def majority(voters: int) -> int:
    """Return how many of *voters* are a majority."""
    return voters // 2 + 1


@dataclass(eq=False)
class VoteEligibility:
    """Whether this member may vote, and for whom.

    Attributes:
        doubtful: Votes or acknowledgements may be lost. It votes when a leader has caught it up, or
            when most members are `doubtful` and all have sent their hello.
        damaged: Acknowledged entries are lost. It follows until a leader has refilled it, whatever
            the others hold.
    """

    state: RaftState
    doubtful: bool
    damaged: bool
    _refilled_at: tuple[int, int] = field(default=(0, 0), init=False)

    def may_vote(self, last_term: int, last_index: int) -> bool:
        """Whether this member may vote for a candidate whose log ends there."""
        # Whether this member or the candidate is in the list here does not matter: the
        # candidate counts only voters of its own list, which may be newer (thesis §4.1).
        roster = self.state.roster
        if roster.members is None or self.damaged or self.state.has_hole:
            return False
        if not self.doubtful:
            return True
        # When most members lost acknowledged entries together, the best log among *all* of them is
        # what is left: a member that lost nothing may hold entries that others did lose.
        voters = roster.other_voters
        hellos = [roster.hellos[name] for name in voters if roster.is_voter(name)]
        doubtful = roster.is_self_voter + sum(1 for hello in hellos if hello.doubtful)
        return (
            doubtful >= majority(roster.voters)
            and len(hellos) == len(voters)
            and all(is_up_to_date(last_term, last_index, *hello.last) for hello in hellos)
        )

    def verified(self, term: int, verified: int, commit_index: int) -> None:
        """Record that all up to *verified* equals the log of the leader of *term*.

        Args:
            commit_index: What that leader has committed.
        """
        if self.doubtful and verified >= commit_index > self.state.journal.anchor_index:
            self._refilled_at = (term, commit_index)

    def end_if_refilled(self) -> None:
        """Vote again once a leader's own entry is committed and all up to it is durable here."""
        core, journal = self.state.core, self.state.journal
        if core.is_leader:
            term, index = core.term, min(core.commit_index, journal.log.durable_index)
            ended = index >= self.state.noop_index > 0
        else:
            term, index = self._refilled_at
            ended = (
                term == core.term
                and journal.log.durable_index >= index > 0
                and journal.term_at(index) == term
            )
        if ended:
            log.info("doubt_ended", group=self.state.settings.group, term=term, index=index)
            self.doubtful = self.damaged = False


@dataclass(eq=False)
class Candidate:
    """The member as candidate and as voter."""

    state: RaftState
    timer: ElectionTimer
    eligibility: VoteEligibility
    acks: PendingAcks
    installation: Installation
    _pre_ballot: Ballot = field(default_factory=lambda: Ballot(0), init=False)
    _ballot: Ballot = field(default_factory=lambda: Ballot(0), init=False)
    _held_back: list[str] = field(default_factory=list, init=False)
    """Voters of `_ballot` whose votes the library does not know yet: it would count a majority."""
    _logged: tuple[list[str], list[str]] | None = field(default=None, init=False)
    _transfer_term: int = field(default=0, init=False)

    # -- as candidate ----------------------------------------------------------------------

    def due_in(self) -> float:
        """Return seconds until this member should begin an election."""
        if self.state.core.is_leader:
            return self.state.settings.election_timeout_s
        return self.timer.deadline_s - self.state.clock.monotonic()

    def begin_election(self) -> bool:
        """The election timeout passed: send pre-votes, or campaign where none are needed.

        Returns:
            Whether this member campaigns already. The event must end then.
        """
        state = self.state
        self.timer.begin_election(state.clock.monotonic())
        self._pre_ballot = Ballot(0)
        if self.eligibility.doubtful:
            self._log_waiting()
        if not self._may_campaign():
            return False
        voters = state.roster.other_voters
        if not state.guards.one_vote_per_voter or not voters:
            self._campaign()
            return True
        term, journal = state.core.term + 1, state.journal
        self._pre_ballot = self._own_ballot(term)
        for name in voters:
            state.peers.send(name, Kind.PRE_VOTE, term, journal.last_index, journal.last_term)
        return False

    def on_timeout_now(self, peer: str, last_index: int) -> bool:
        """Campaign at once, without pre-votes: the leader transfers its leadership here.

        Returns:
            Whether this member campaigns: the event must end then.
        """
        state = self.state
        if (
            peer != state.core.leader_id
            or last_index > state.journal.last_index
            or not self._may_campaign()
        ):
            return False
        self._transfer_term = state.core.term + 1
        self._campaign()
        return True

    def _may_campaign(self) -> bool:
        state = self.state
        return (
            not state.core.is_leader
            and state.core.term < TERM_MAX
            and not self.installation.under_way
            and state.roster.is_self_voter
            and self.eligibility.may_vote(state.journal.last_term, state.journal.last_index)
            and state.owner.may_lead()
            and state.journal.log.allocator.has_reserve
        )

    def _own_ballot(self, term: int) -> Ballot:
        settings = self.state.settings
        is_uncertain = self.eligibility.doubtful and not settings.sync_flush
        ballot = Ballot(term)
        ballot.grant(term, settings.self_id, is_uncertain=is_uncertain)
        return ballot

    def _is_uncertain(self, peer: str) -> bool:
        # Its frames are taken only from a connection of the start that this hello is of, and a
        # process that is certain stays so. That it became certain comes with its pre-vote.
        return self.state.roster.hellos[peer].is_uncertain

    def _log_waiting(self) -> None:
        """Log what an election with this `doubtful` member waits for, when that has changed."""
        roster, peers = self.state.roster, self.state.peers
        others = roster.other_voters
        facts = (
            [name for name in others if name in roster.hellos and roster.hellos[name].doubtful],
            [name for name in others if name not in peers or not peers[name].is_connected],
        )
        if facts != self._logged:
            self._logged = facts
            doubtful, away = facts
            log.warning(
                "doubtful_without_leader",
                group=self.state.settings.group,
                voters=roster.voters,
                doubtful=[self.state.settings.self_id, *doubtful],
                away=away,
            )

    def _campaign(self) -> None:
        core = self.state.core
        log.info("campaign", group=self.state.settings.group, term=core.term + 1)
        self._ballot = self._own_ballot(core.term + 1)
        self._held_back.clear()
        self.elect(core.campaign)

    def elect(self, act: Callable[[], None]) -> None:
        """Call *act*, which may elect this member; it steps down if its no-op does not fit."""
        core = self.state.core
        try:
            act()
        except (DiskFullError, LogBusyError) as error:
            log.error("election_won_without_space", term=core.term, error=str(error))
            core.observe_term(core.term + 1)

    def on_library_message(self, peer: str, message: Message) -> None:
        """Send a message of the library; votes wait for the disk."""
        match message["type"]:
            case "request_vote":
                transfer = message["term"] == self._transfer_term
                last = (message["last_log_index"], message["last_log_term"], transfer)
                self.acks.defer_vote(peer, Kind.VOTE, message["term"], last)
            case "response_vote":
                self.timer.restart(self.state.clock.monotonic())
                self.acks.defer_vote(peer, Kind.VOTE_REPLY, message["term"], ())
            case _:
                pass  # append replies are ours: they wait for the disk

    def on_vote_reply(self, peer: str, term: int) -> None:
        """Count the vote of *peer* in *term*."""
        state = self.state
        if not state.guards.one_vote_per_voter:
            self._count_vote(peer, term)
            return
        is_uncertain = self._is_uncertain(peer)
        if not (
            state.roster.is_voter(peer)
            and self._ballot.grant(term, peer, is_uncertain=is_uncertain)
        ):
            return
        self._held_back.append(peer)
        if self._ballot.uncertain and not self._ballot.is_won(state.roster.voters):
            return
        while self._held_back:
            self._count_vote(self._held_back.pop(0), term)

    def _count_vote(self, peer: str, term: int) -> None:
        self.elect(lambda: self.state.core.step(peer, {"type": "response_vote", "term": term}))

    def on_pre_vote_reply(self, peer: str, sender_term: int, term: int, granted: int) -> bool:
        """Count the pre-vote of *peer*, which is in *sender_term*, for *term*.

        Returns:
            Whether this member campaigns now: the event must end then.
        """
        state = self.state
        if not granted:
            if state.roster.member(peer) is not None:
                state.core.observe_term(sender_term)
            return False
        if (
            not state.roster.is_voter(peer)
            or state.core.is_leader
            or term != state.core.term + 1
            or self._pre_ballot.is_won(state.roster.voters)
            or not self._pre_ballot.grant(term, peer, is_uncertain=self._is_uncertain(peer))
            or not self._pre_ballot.is_won(state.roster.voters)
        ):
            return False
        self._campaign()
        return True

    # -- as voter --------------------------------------------------------------------------

    def on_vote(
        self, peer: str, term: int, last_index: int, last_term: int, transfer: bool
    ) -> None:
        """Decide about a vote for *peer*, a candidate in *term*."""
        state = self.state
        sticky = self.timer.hears_leader(state.clock.monotonic()) or state.core.is_leader
        if not self.eligibility.may_vote(last_term, last_index) or (
            sticky and not transfer and state.guards.one_vote_per_voter
        ):
            return
        state.core.step(
            peer,
            {
                "type": "request_vote",
                "term": term,
                "last_log_index": last_index,
                "last_log_term": last_term,
            },
        )

    def on_pre_vote(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        """Answer *peer* whether it would get this member's vote in *term*."""
        state = self.state
        now_s = state.clock.monotonic()
        own_last = (state.journal.last_term, state.journal.last_index)
        goes_first = (
            state.settings.self_id < peer
            and (last_term, last_index) == own_last
            and term == self._pre_ballot.term
            and self.timer.is_candidate(now_s)
        )
        granted = (
            term > state.core.term
            and self.eligibility.may_vote(last_term, last_index)
            and not state.core.is_leader
            and not self.timer.hears_leader(now_s)
            and not goes_first
            and is_up_to_date(last_term, last_index, *own_last)
        )
        if granted:
            self.timer.give_way(now_s)
        grant = CERTAIN if granted and not self.eligibility.doubtful else granted
        state.peers.send(peer, Kind.PRE_VOTE_REPLY, term, grant)
