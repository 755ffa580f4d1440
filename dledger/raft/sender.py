"""What a data link carries next: entries, a snapshot's chunks, copies for who repairs.

Sending is pulled: a link asks when its socket takes more (0001-rooms.md). Bytes that are suspect
do not leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from commitlog.damage import check_entries
from commitlog.errors import CorruptEntryError, CorruptStoreError
from dledger.raft.core import RaftCore
from dledger.raft.journal import CommitLogJournal
from dledger.raft.owner import Owner
from dledger.raft.peers import Outgoing, Peers, PeerState
from dledger.raft.repair import FETCH_BYTES
from dledger.raft.replicator import Append, Replicator
from dledger.raft.snapshot import Sending
from dledger.raft.wire import Kind

log = structlog.get_logger(__name__)

FrameWithBytes = tuple[Outgoing, list[memoryview]]
"""A frame and the log bytes that follow its head: views that pin their segment."""


@dataclass(eq=False)
class Sender:
    """Decides what each data link sends."""

    owner: Owner
    core: RaftCore
    journal: CommitLogJournal
    replicator: Replicator
    peers: Peers

    def next_frame(self, peer: str) -> FrameWithBytes | None:
        """Decide what the data link to *peer* sends next; None when there is nothing now."""
        state = self.peers.of(peer)
        if state.wanted is not None:
            return self._copy(state)
        if not self.core.is_leader or peer not in self.replicator.peers:
            return None
        if self.replicator.needs_snapshot(peer):
            return self._chunk(peer)
        return self._append(state)

    # -- entries ---------------------------------------------------------------------------

    def _append(self, state: PeerState) -> FrameWithBytes | None:
        peer = state.name
        # A single voter's library commits before the flush; nobody else may hear of that.
        commit = self.core.commit_index
        is_probe = self.replicator.peers[peer].probing
        append = self.replicator.next_append(peer, commit)
        if append is None:
            return None
        views = self._entries(append)
        # A follower that is sent bad bytes drops the connection; what follows is a probe.
        if not views and not append.is_empty:
            return None
        if is_probe and views and not self._are_sound(append.first, views):
            return None
        size = sum(map(len, views))
        self.replicator.sent(peer, self._last_in(append, size), size)
        fields = (append.prev_index, append.prev_term, append.commit_index)
        return Outgoing(Kind.APPEND, self.core.term, fields), views

    def _entries(self, append: Append) -> list[memoryview]:
        if append.is_empty:
            return []
        try:
            return self.journal.log.frames(append.first, append.max_bytes, append.last)
        except CorruptEntryError as error:
            log.error("append_of_damaged_entry", error=str(error))
            return []

    def _last_in(self, append: Append, size: int) -> int:
        last = append.first - 1
        while size > 0:
            last += 1
            size -= self.journal.log.size_at(last)
        return last

    def _are_sound(self, first: int, views: list[memoryview]) -> bool:
        entry_log = self.journal.log
        checked = check_entries(entry_log, first, entry_log.last_index, sum(map(len, views)))
        damaged = [index for index in checked.suspects if self.owner.on_suspect(index)]
        return not damaged

    # -- snapshots -------------------------------------------------------------------------

    def _chunk(self, peer: str) -> FrameWithBytes | None:
        progress = self.replicator.peers[peer]
        if progress.probe_out or not self.replicator.may_offer_snapshot(peer):
            return None
        if progress.snapshot is None:
            progress.snapshot = Sending(*self.owner.take_snapshot())
            self.replicator.offered(peer, progress.snapshot.index)
            log.info("snapshot_offered", peer=peer, index=progress.snapshot.index)
        sending = progress.snapshot
        progress.probe_out = True
        fields = (sending.index, sending.offset, len(sending.data))
        return Outgoing(Kind.SNAPSHOT, self.core.term, fields), [sending.chunk()]

    # -- copies ----------------------------------------------------------------------------

    def fetch(self, peer: str, first: int, last: int) -> None:
        """Ask *peer* for entries that are damaged here."""
        self.peers.reply(peer, Kind.FETCH, first, last)

    def on_fetch(self, peer: str, first: int, last: int) -> None:
        """*peer* asks for entries; what is whole of them goes next."""
        state = self.peers.of(peer)
        state.wanted = (first, last)
        state.data_wake.set()

    def _copy(self, state: PeerState) -> FrameWithBytes:
        first, last = state.wanted or (0, 0)
        state.wanted = None
        views: list[memoryview] = []
        last = self.journal.log.damaged.whole_until(first, min(last, self.core.commit_index))
        if self.journal.log.first_index <= first <= last:
            try:
                views = self.journal.log.frames(first, FETCH_BYTES, last)
            except (CorruptEntryError, CorruptStoreError) as error:
                log.warning("cannot_help_with_repair", peer=state.name, error=str(error))
            if views and not self._are_sound(first, views):
                views = []
        return Outgoing(Kind.FETCH_REPLY, self.core.term, (first,)), views
