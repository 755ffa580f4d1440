"""Leadership transfer (Raft thesis §3.10).

Under load the target never has everything: the leader appends all the time. So the leader
stops appending, waits until the target has all entries and all are committed, sends the target
TIMEOUT_NOW, and appends again if it still leads a while later. ::

    CATCHING_UP ──target has everything──► ASKED ──another term──► DONE
         └──────────── time is over ────────┴────────────────────► FAILED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.raft.peers import RaftState
from dledger.raft.replicator import Replicator
from dledger.raft.wire import Kind

log = structlog.get_logger(__name__)


class Phase(StrEnum):
    """How far a transfer is."""

    CATCHING_UP = "catching_up"
    ASKED = "asked"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Transfer:
    """One attempt to transfer leadership. Pure."""

    target: str
    term: int
    """The term in which this node leads."""
    deadline_s: float
    """When to stop waiting for the target to catch up."""
    timeout_s: float
    """How long a target has to win after TIMEOUT_NOW."""
    phase: Phase = Phase.CATCHING_UP

    @property
    def is_over(self) -> bool:
        """Whether appending may continue, or another member leads."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    def advance(self, now_s: float, *, leads: bool, term: int, target_has_all: bool) -> bool:
        """Move to the next phase, if it is due.

        Args:
            leads: This node believes it leads, in *term*.
            target_has_all: The target acknowledged the last entry, and that is committed.
        Returns:
            Whether to send TIMEOUT_NOW to the target now.
        """
        if self.is_over:
            return False
        if not leads or term != self.term:
            # Without TIMEOUT_NOW another member was elected: not the wish, but the attempt is over.
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
    """Return the name with the highest match index; None when *matches* is empty."""
    return max(matches, key=lambda name: (matches[name], name), default=None)


@dataclass(eq=False)
class Transfers:
    """The transfers of one member; *newest*: the newest attempt; None before the first."""

    state: RaftState
    replicator: Replicator
    newest: Transfer | None = field(default=None, init=False)

    @property
    def is_under_way(self) -> bool:
        """Whether leadership is being transferred: this leader must append nothing."""
        return self.newest is not None and not self.newest.is_over

    def leader_client_address(self) -> str | None:
        """Return where clients find the leader, if it is known and is not this node."""
        core, newest = self.state.core, self.newest
        leader = core.leader_id
        if leader is None and newest is not None and core.term == newest.term + 1:
            leader = newest.target
        return None if leader is None else self.state.roster.client_address(leader)

    def check_leads(self) -> None:
        """Check that this member leads.

        Raises NotLeaderError: it does not; the error names the leader's client address.
        """
        core = self.state.core
        if not core.is_leader:
            raise NotLeaderError(self.leader_client_address(), core.term)

    def begin(self, target: str | None) -> Transfer:
        """Start to transfer leadership to *target*, or to the voter with the highest match index.

        `RaftNode.settle` must follow.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: A transfer is under way.
            ChangeRefusedError: There is no such voter that is connected.
        """
        self.check_leads()
        if self.is_under_way:
            raise ChangePendingError("leadership is being handed over already")
        state, roster = self.state, self.state.roster
        able = {
            name: self.replicator.peers[name].match_index
            for name in roster.other_voters
            if roster.is_voter(name) and state.peers[name].is_connected
        }
        if target is None:
            target = choose_target(self._likely(able))
        if target is None or target not in able:
            raise ChangeRefusedError(f"{target or 'no other member'} is not a connected voter")
        timeout_s = state.settings.election_timeout_s
        now = state.clock.monotonic()
        self.newest = Transfer(target, state.core.term, now + timeout_s, timeout_s)
        log.info("transfer_begins", target=target, term=state.core.term)
        return self.newest

    def _likely(self, able: dict[str, int]) -> dict[str, int]:
        """Leave out members that would hardly win: `doubtful` ones, and the term's last target."""
        last = self.newest
        unlikely = {name for name in able if self.state.roster.hellos[name].doubtful}
        if last is not None and last.term == self.state.core.term:
            unlikely.add(last.target)
        return {name: match for name, match in able.items() if name not in unlikely} or able

    def drive(self) -> None:
        """Advance the transfer under way, if there is one; called in every event."""
        transfer, state = self.newest, self.state
        if transfer is None or transfer.is_over:
            return
        progress = self.replicator.peers.get(transfer.target)
        last = state.journal.last_index
        is_due = transfer.advance(
            state.clock.monotonic(),
            leads=state.core.is_leader,
            term=state.core.term,
            target_has_all=progress is not None
            and progress.match_index == last == state.core.commit_index,
        )
        if is_due:
            state.peers.send(transfer.target, Kind.TIMEOUT_NOW, last)
        if transfer.is_over:
            log.info("transfer_ends", target=transfer.target, phase=transfer.phase.value)
