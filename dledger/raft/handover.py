"""Leadership handed over: whom to, whether it is under way, and when to ask the target.

The rules are in `dledger.raft.transfer`; here they meet the clock and the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.raft.core import RaftCore
from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Peers
from dledger.raft.replicator import Replicator
from dledger.raft.roster import Roster
from dledger.raft.settings import RaftSettings
from dledger.raft.transfer import Transfer, choose_target
from dledger.raft.wire import Kind
from remoting.seams import Clock

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Handover:
    """The newest attempt to hand leadership over, if there was one."""

    settings: RaftSettings
    clock: Clock
    core: RaftCore
    journal: CommitLogJournal
    roster: Roster
    replicator: Replicator
    peers: Peers
    transfer: Transfer | None = field(default=None, init=False)

    @property
    def is_under_way(self) -> bool:
        """Whether leadership is being handed over: nothing is to be appended."""
        return self.transfer is not None and not self.transfer.is_over

    def leader_client_address(self) -> str | None:
        """Return where clients find the leader, if it is known and is not this node."""
        leader, transfer = self.core.leader_id, self.transfer
        if leader is None and transfer is not None and self.core.term == transfer.term + 1:
            leader = transfer.target
        return None if leader is None else self.roster.client_address(leader)

    def check_leads(self) -> None:
        """Let a leader pass.

        Raises:
            NotLeaderError: This member does not lead; it says where clients find who does.
        """
        if not self.core.is_leader:
            raise NotLeaderError(self.leader_client_address(), self.core.term)

    def begin(self, target: str | None) -> Transfer:
        """Start to hand leadership to *target*, or to the voter that has most.

        Raises:
            NotLeaderError: This member does not lead.
            ChangePendingError: A transfer is under way.
            ChangeRefusedError: There is no such voter that is connected.
        """
        self.check_leads()
        if self.is_under_way:
            raise ChangePendingError("leadership is being handed over already")
        able = {
            name: self.replicator.peers[name].match_index
            for name in self.roster.other_voters
            if self.roster.is_voter(name) and self.peers[name].is_connected
        }
        if target is None:
            target = choose_target(self._likely(able))
        if target is None or target not in able:
            raise ChangeRefusedError(f"{target or 'no other member'} is not a connected voter")
        timeout_s = self.settings.election_timeout_s
        now = self.clock.monotonic()
        self.transfer = Transfer(target, self.core.term, now + timeout_s, timeout_s)
        log.info("transfer_begins", target=target, term=self.core.term)
        return self.transfer

    def _likely(self, able: dict[str, int]) -> dict[str, int]:
        """Leave out those who would hardly win: in doubt, or asked in vain before."""
        last = self.transfer
        unlikely = {name for name in able if self.roster.hellos[name].doubtful}
        if last is not None and last.term == self.core.term:
            unlikely.add(last.target)
        return {name: match for name, match in able.items() if name not in unlikely} or able

    def drive(self) -> None:
        """Take the next step, if there is one to take now."""
        transfer = self.transfer
        if transfer is None or transfer.is_over:
            return
        progress = self.replicator.peers.get(transfer.target)
        last = self.journal.last_index
        ask = transfer.advance(
            self.clock.monotonic(),
            leads=self.core.is_leader,
            term=self.core.term,
            target_has_all=progress is not None
            and progress.match_index == last == self.core.commit_index,
        )
        if ask:
            self.peers.send(transfer.target, Kind.TIMEOUT_NOW, last)
        if transfer.is_over:
            log.info("transfer_ends", target=transfer.target, phase=transfer.phase.value)
