"""What a member does on a leader's word: appends, heartbeats, snapshots.

Every append is checked and stripped before the library sees it (`dledger.raft.append`), and
acknowledged when the disk has it (`dledger.raft.promises`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import structlog

from commitlog.errors import DiskFullError, LogBusyError
from dledger.raft.append import Accepted, AppendRequest, Rejected, plan_append, split_frames
from dledger.raft.contacts import Contacts
from dledger.raft.core import Message, RaftCore
from dledger.raft.doubt import Doubt
from dledger.raft.election import ElectionTimer
from dledger.raft.failure import Failure
from dledger.raft.guards import Guards
from dledger.raft.installation import Installation
from dledger.raft.journal import CommitLogJournal
from dledger.raft.peers import Peers
from dledger.raft.promises import Promises
from dledger.raft.refusals import ContradictionError
from dledger.raft.settings import RaftSettings
from dledger.raft.wire import Kind, PeerFrame
from remoting.seams import Clock

log = structlog.get_logger(__name__)

HEARTBEAT: Final[Message] = {"commit_index": 0, "entries": [], "prevLogIdx": None, "prevLogTerm": 0}
"""An append the library takes as a sign of life only: it returns before it looks at the log."""


@dataclass(eq=False)
class Follower:
    """The member as follower. Frames that come here are of its own term or a newer one."""

    settings: RaftSettings
    guards: Guards
    clock: Clock
    core: RaftCore
    journal: CommitLogJournal
    timer: ElectionTimer
    peers: Peers
    doubt: Doubt
    promises: Promises
    installation: Installation
    contacts: Contacts
    failure: Failure
    _heard: tuple[int, str] = field(default=(0, ""), init=False)
    """The newest term somebody was heard to lead, and who."""
    _unanswered: tuple[str, int] | None = field(default=None, init=False)
    """Leader and term of an append that found the log's files being enlarged."""

    def on_append(self, peer: str, frame: PeerFrame) -> None:
        """Take what of an append is new."""
        if self.installation.under_way:
            self._heard_leader(peer, frame.term)
            return
        prev_index, prev_term, commit_index = frame.fields
        request = AppendRequest(
            frame.term, prev_index, prev_term, commit_index, split_frames(frame.payload)
        )
        self._heard_leader(peer, frame.term)
        plan = plan_append(self.journal, request, self.guards)
        if isinstance(plan, Rejected):
            self._step_heartbeat(peer, frame.term)
            self.peers.reply(peer, Kind.APPEND_REPLY, False, plan.next_index)
            return
        try:
            self.core.step(peer, plan.message)
        except DiskFullError as error:
            # What did not fit is not acknowledged; the leader sends it again.
            log.error("append_without_space", peer=peer, error=str(error))
            return
        except LogBusyError:
            # Answered with the next heartbeat: the space is there then, and no frame comes again
            # and again meanwhile.
            self._unanswered = (peer, frame.term)
            return
        except OSError as error:
            raise self.failure.of_disk(error) from error
        self.contacts.note_members()
        self.promises.owe(peer, plan.verified)
        self.doubt.verified(frame.term, plan.verified, commit_index)

    def on_heartbeat(self, peer: str, term: int, beat: int, commit_index: int) -> None:
        """Answer heartbeat *beat* of the leader of *term*, and commit what is known to be its."""
        self._heard_leader(peer, term)
        verified = 0 if self.installation.under_way else self.promises.verified(peer, term)
        if min(commit_index, verified) > self.core.known_commit_index:
            # As an append without entries that begins where this log is known to be the leader's.
            prev_term = self.journal.term_at(verified)
            request = AppendRequest(term, verified, prev_term, commit_index, ())
            plan = plan_append(self.journal, request, self.guards)
            assert isinstance(plan, Accepted)
            self.core.step(peer, plan.message)
        else:
            self._step_heartbeat(peer, term)
        self.doubt.verified(term, verified, commit_index)
        self._ask_again(peer, term)
        date_ms = self.clock.wall_ms()
        self.peers.send(peer, Kind.HEARTBEAT_REPLY, beat, date_ms, self.doubt.doubtful)

    def _ask_again(self, peer: str, term: int) -> None:
        if self._unanswered == (peer, term) and not self.installation.under_way:
            self.peers.reply(peer, Kind.APPEND_REPLY, False, self.journal.last_index + 1)
        self._unanswered = None

    def on_snapshot(self, peer: str, frame: PeerFrame) -> None:
        """Take a chunk of a snapshot."""
        self._heard_leader(peer, frame.term)
        self._step_heartbeat(peer, frame.term)
        self.installation.take(peer, frame)

    def _step_heartbeat(self, peer: str, term: int) -> None:
        self.core.step(peer, {"type": "append_entries", "term": term, **HEARTBEAT})

    def _heard_leader(self, peer: str, term: int) -> None:
        # The library would follow whoever speaks last.
        known_term, known_leader = self._heard
        leads = self.core.is_leader
        if (known_term == term and known_leader != peer) or (leads and term == self.core.term):
            other = self.settings.self_id if leads else known_leader
            raise ContradictionError(f"{peer} and {other} both lead term {term}")
        self._heard = (term, peer)
        self.timer.heard_leader(self.clock.monotonic())
