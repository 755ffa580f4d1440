"""What a member does with a leader's frames: appends, heartbeats, snapshots.

The library deletes everything after the previous index of an append, matching or not, and
believes any commit index. So a late or duplicated append would cut acknowledged entries
(verification: F.1-2). Here every append is checked and rewritten before the library sees it:
entries that are present already are stripped, only a real conflict is left to truncate, and the
commit index is capped at what this very message verified (Raft §5.3, figure 2, receiver rules 3 to
5). It is acknowledged when it is on disk (`dledger.raft.acks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from dledger.broker_errors import ChangeRefusedError
from dledger.commitlog.entry import (
    KIND_CONFIG,
    EntryHeader,
    config_body,
    parse_header,
    verify_frame,
)
from dledger.commitlog.errors import (
    CorruptEntryError,
    DiskFullError,
    LogBusyError,
    RemoteProtocolError,
)
from dledger.raft.acks import PendingAcks
from dledger.raft.candidate import ElectionTimer, VoteEligibility
from dledger.raft.contacts import Contacts
from dledger.raft.journal import CommitLogJournal, Frame
from dledger.raft.library import Message
from dledger.raft.membership import Members
from dledger.raft.peers import ContradictionError, RaftState
from dledger.raft.settings import Guards
from dledger.raft.snapshot import Installation
from dledger.raft.wire import Kind, PeerFrame

log = structlog.get_logger(__name__)

HEARTBEAT: Final[Message] = {"commit_index": 0, "entries": [], "prevLogIdx": None, "prevLogTerm": 0}
"""An append that for the library is a heartbeat only: it returns before it reads the log."""


@dataclass(eq=False)
class Follower:
    """The member as follower. Frames that arrive here are of its own term or a newer one."""

    state: RaftState
    timer: ElectionTimer
    eligibility: VoteEligibility
    acks: PendingAcks
    installation: Installation
    contacts: Contacts
    _leader: tuple[int, str] = field(default=(0, ""), init=False)
    """The newest term with a known leader, and that leader."""
    _unanswered: tuple[str, int] | None = field(default=None, init=False)
    """Leader and term of an append that arrived while the log's files were being enlarged."""

    def on_append(self, peer: str, frame: PeerFrame) -> None:
        """Append what is new."""
        state = self.state
        if self.installation.under_way:
            self._heard_leader(peer, frame.term)
            return
        prev_index, prev_term, commit_index = frame.fields
        request = AppendRequest(
            frame.term, prev_index, prev_term, commit_index, split_frames(frame.payload)
        )
        self._heard_leader(peer, frame.term)
        plan = plan_append(state.journal, request, state.guards)
        if isinstance(plan, Rejected):
            self._step_heartbeat(peer, frame.term)
            state.peers.reply(peer, Kind.APPEND_REPLY, False, plan.next_index)
            return
        try:
            state.core.step(peer, plan.message)
        except DiskFullError as error:
            # What did not fit is not acknowledged; the leader sends it again.
            log.error("append_without_space", peer=peer, error=str(error))
            return
        except LogBusyError:
            # Answered with the next heartbeat: the space is there then, and no frame is sent again
            # and again meanwhile.
            self._unanswered = (peer, frame.term)
            return
        except OSError as error:
            raise state.failure.of_disk(error) from error
        self.contacts.note_members()
        self.acks.defer_ack(peer, plan.verified)
        self.eligibility.verified(frame.term, plan.verified, commit_index)

    def on_heartbeat(self, peer: str, term: int, heartbeat: int, commit_index: int) -> None:
        """Answer *heartbeat* of the leader of *term*, and commit what is known to be its log."""
        state = self.state
        self._heard_leader(peer, term)
        verified = 0 if self.installation.under_way else self.acks.verified_index(peer, term)
        if min(commit_index, verified) > state.core.known_commit_index:
            # As an append without entries that begins where this log is known to be the leader's.
            prev_term = state.journal.term_at(verified)
            request = AppendRequest(term, verified, prev_term, commit_index, ())
            plan = plan_append(state.journal, request, state.guards)
            assert isinstance(plan, Accepted)
            state.core.step(peer, plan.message)
        else:
            self._step_heartbeat(peer, term)
        self.eligibility.verified(term, verified, commit_index)
        self._request_unanswered(peer, term)
        state.peers.send(peer, Kind.HEARTBEAT_REPLY, heartbeat, self.eligibility.doubtful)

    def _request_unanswered(self, peer: str, term: int) -> None:
        if self._unanswered == (peer, term) and not self.installation.under_way:
            next_index = self.state.journal.last_index + 1
            self.state.peers.reply(peer, Kind.APPEND_REPLY, False, next_index)
        self._unanswered = None

    def on_snapshot(self, peer: str, frame: PeerFrame) -> None:
        """Add a chunk of a snapshot."""
        self._heard_leader(peer, frame.term)
        self._step_heartbeat(peer, frame.term)
        self.installation.on_chunk(peer, frame)

    def _step_heartbeat(self, peer: str, term: int) -> None:
        self.state.core.step(peer, {"type": "append_entries", "term": term, **HEARTBEAT})

    def _heard_leader(self, peer: str, term: int) -> None:
        # The library would follow the last sender of a term.
        state = self.state
        known_term, known_leader = self._leader
        leads = state.core.is_leader
        if (known_term == term and known_leader != peer) or (leads and term == state.core.term):
            other = state.settings.self_id if leads else known_leader
            raise ContradictionError(f"{peer} and {other} both lead term {term}")
        self._leader = (term, peer)
        self.timer.heard_leader(state.clock.monotonic())


@dataclass(slots=True)
class AppendRequest:
    """An append as it travelled."""

    term: int
    prev_index: int
    prev_term: int
    commit_index: int
    frames: Sequence[Frame]


@dataclass(slots=True)
class Accepted:
    """Deliver *message* to the library; then all up to *verified* is as the leader has it."""

    message: dict[str, Any]
    verified: int


@dataclass(slots=True)
class Rejected:
    """The entry before is missing or different; the leader should continue at *next_index*."""

    next_index: int


def split_frames(payload: memoryview) -> list[Frame]:
    """Cut a payload into entries, checking sizes only.

    Raises:
        RemoteProtocolError: The payload is not a row of whole entries.
    """
    frames: list[Frame] = []
    offset = 0
    while offset < len(payload):
        try:
            header = parse_header(payload, offset)
        except CorruptEntryError as error:
            raise RemoteProtocolError(f"an append carried a bad entry: {error}") from error
        end = offset + header.size
        if end > len(payload):
            raise RemoteProtocolError("an append ended inside an entry")
        frames.append(Frame(payload[offset:end], header))
        offset = end
    return frames


def plan_append(
    journal: CommitLogJournal, request: AppendRequest, guards: Guards
) -> Accepted | Rejected:
    """Decide which part of *request* the library gets. Changes nothing.

    Raises:
        RemoteProtocolError: An entry's CRC, chain, position or order is wrong; drop the
            connection, nothing was changed.
        ContradictionError: The leader's log contradicts entries committed here, or both have
            another entry of one term at one index; nothing was changed.
    """
    if not guards.idempotent_append:
        return _as_it_came(journal, request)
    prev, commit = request.prev_index, journal.commit_index
    frames = list(request.frames)
    if prev < journal.anchor_index:
        # Below the first kept entry everything is committed, so it counts as matching.
        frames = [frame for frame in frames if frame.header.index > journal.anchor_index]
        prev = journal.anchor_index
        if not frames:
            return _nothing_new(journal, request, prev)
    elif prev > journal.last_index:
        return Rejected(journal.last_index + 1)
    elif journal.term_at(prev) != request.prev_term:
        if prev <= commit:
            raise ContradictionError(
                f"leader has term {request.prev_term} at committed index {prev}, "
                f"here it is {journal.term_at(prev)}"
            )
        return Rejected(max(commit + 1, journal.first_index_of_term(prev)))
    _check_chain(journal, prev, frames)
    _check_terms(request)
    verified = frames[-1].header.index if frames else prev
    new = _strip_present(journal, frames)
    if not new:
        return _nothing_new(journal, request, verified)
    first = new[0].header.index
    if first <= commit:
        raise ContradictionError(f"leader replaces index {first}, committed here up to {commit}")
    return Accepted(_message(journal, request, first - 1, new, verified), verified)


def _check_chain(journal: CommitLogJournal, prev: int, frames: Sequence[Frame]) -> None:
    if not frames:
        return
    index, chain = prev, journal.log.chain_at(prev)
    term, end = journal.term_at(prev), None
    for frame in frames:
        header = frame.header
        if header.index != index + 1 or header.term < term:
            raise RemoteProtocolError(f"entry {header.index} of term {header.term} out of order")
        if end is not None and header.position < end:
            raise RemoteProtocolError(f"entry {header.index} overlaps the one before it")
        _verify(frame.data, header, chain)
        frame.verified_after = chain
        index, term, chain = header.index, header.term, header.chain
        end = header.position + header.size


def _check_terms(request: AppendRequest) -> None:
    # They never fall from entry to entry, so the last one has the highest.
    if request.frames and request.frames[-1].header.term > request.term:
        last = request.frames[-1].header
        raise RemoteProtocolError(f"entry {last.index} is of a later term than its leader")


def _verify(data: memoryview, header: EntryHeader, chain: int) -> None:
    try:
        verify_frame(data, header, chain)
    except CorruptEntryError as error:
        raise RemoteProtocolError(f"an append carried a bad entry: {error}") from error
    if header.kind == KIND_CONFIG:
        _check_members(data, header)


def _check_members(data: memoryview, header: EntryHeader) -> None:
    try:
        Members.decode(config_body(data, header)).check_usable()
    except (CorruptEntryError, ChangeRefusedError) as error:
        raise RemoteProtocolError(f"an append carried a bad list of members: {error}") from error


def _strip_present(journal: CommitLogJournal, frames: Sequence[Frame]) -> Sequence[Frame]:
    for at, frame in enumerate(frames):
        header = frame.header
        if header.index > journal.last_index or journal.term_at(header.index) != header.term:
            return frames[at:]
        if journal.log.chain_at(header.index) != header.chain:
            raise ContradictionError(
                f"two different entries at index {header.index} in term {header.term}"
            )
    return ()


def _nothing_new(journal: CommitLogJournal, request: AppendRequest, verified: int) -> Accepted:
    # Naming our own last entry keeps the library from cutting the suffix it cannot judge.
    return Accepted(_message(journal, request, journal.last_index, (), verified), verified)


def _message(
    journal: CommitLogJournal,
    request: AppendRequest,
    prev: int,
    frames: Sequence[Frame],
    verified: int,
) -> dict[str, Any]:
    return {
        "type": "append_entries",
        "term": request.term,
        "commit_index": min(request.commit_index, verified),
        "entries": [(frame, frame.header.index, frame.header.term) for frame in frames],
        "prevLogIdx": prev,
        "prevLogTerm": journal.term_at(prev),
    }


def _as_it_came(journal: CommitLogJournal, request: AppendRequest) -> Accepted | Rejected:
    prev = request.prev_index
    if prev > journal.last_index or journal.term_at(prev) != request.prev_term:
        return Rejected(prev)
    verified = request.frames[-1].header.index if request.frames else prev
    message = _message(journal, request, prev, request.frames, verified)
    message["commit_index"] = request.commit_index
    return Accepted(message, verified)
