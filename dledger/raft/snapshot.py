"""Snapshots, from the leader's disk to a follower that is behind the first kept entry.

A snapshot is the state tables at one index and where the kept log begins; the log itself is the
data and follows as ordinary appends (internals/consensus.md). It travels in chunks over the
data link, one at a time, each answered; a follower that misses one answers with the offset to
continue at. The follower collects the chunks; its owner writes the whole to disk and reports back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import structlog

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import RemoteProtocolError
from dledger.raft.acks import PendingAcks
from dledger.raft.peers import RaftState
from dledger.raft.wire import Kind, PeerFrame

log = structlog.get_logger(__name__)

CHUNK_BYTES: Final = 1 << 20
"""One chunk: a few milliseconds of a link."""

SNAPSHOT_BYTES_MAX: Final = 1 << 30
"""More is refused: tables of that size mean millions of queues."""


@dataclass(slots=True)
class Sending:
    """Leader: one snapshot and how far the follower has it."""

    index: int
    data: bytes
    offset: int = 0
    """Everything before it was answered."""

    def chunk(self) -> memoryview:
        """Return what comes next."""
        return memoryview(self.data)[self.offset : self.offset + CHUNK_BYTES]


@dataclass(slots=True)
class Receiving:
    """Follower: what has arrived of the newest snapshot offered."""

    index: int = 0
    total: int = 0
    parts: list[memoryview] = field(default_factory=list)
    offset: int = 0

    def add_chunk(self, index: int, offset: int, total: int, chunk: memoryview) -> bool:
        """Add one chunk; return whether the snapshot is whole now.

        A chunk that does not follow is dropped: the answer names the offset to continue at.

        Raises RemoteProtocolError: no snapshot has such a chunk.
        """
        if not 0 < total <= SNAPSHOT_BYTES_MAX or offset + len(chunk) > total:
            raise RemoteProtocolError(f"a chunk at {offset} of a snapshot of {total} bytes")
        if (index, total) != (self.index, self.total):
            self.index, self.total, self.offset = index, total, 0
            self.parts.clear()
        if offset == self.offset and len(chunk):
            self.parts.append(chunk)
            self.offset += len(chunk)
        return self.offset == self.total

    def pop_data(self) -> bytes:
        """Return the whole snapshot and forget it."""
        data = b"".join(self.parts)
        self.index = self.total = self.offset = 0
        self.parts.clear()
        return data


@dataclass(eq=False)
class Installation:
    """Follower: the snapshot that arrives, and whether one is being installed.

    Attributes:
        under_way: A whole snapshot has arrived and is not on disk yet: the log must not change.
        count: Snapshots installed since the start.
    """

    state: RaftState
    acks: PendingAcks
    under_way: bool = field(default=False, init=False)
    count: int = field(default=0, init=False)
    _receiving: Receiving = field(default_factory=Receiving, init=False)
    _installed_index: int = field(default=0, init=False)

    def on_chunk(self, leader: str, frame: PeerFrame) -> None:
        """Add one chunk from *leader*, and hand the whole snapshot to the owner.

        Raises RemoteProtocolError: no snapshot has such a chunk.
        """
        index, offset, total = frame.fields
        journal = self.state.journal
        if self.under_way:
            return
        if index <= max(journal.commit_index, self._installed_index):
            # What is committed here, or what the log is refilled to, covers it already: appends
            # are enough. The last chunk may arrive twice, and a second installation would drop
            # what came since. A log that merely is longer may be another one: its owner compares.
            self._reply(leader, index, total, journal.last_index + 1)
        elif self._receiving.add_chunk(index, offset, total, frame.payload):
            self.under_way = True
            self.state.owner.on_snapshot(leader, self._receiving.pop_data())
        else:
            self._reply(leader, index, self._receiving.offset, 0)

    def finish(self, leader: str, entry_log: EntryLog, index: int) -> None:
        """Continue on *entry_log*: the snapshot of *index* is on disk, the old log is void."""
        journal = self.state.journal
        journal.replace_log(entry_log)
        self.state.core.begin_at(journal.anchor_index)
        self.acks.clear_acks()
        self.under_way = False
        self._installed_index = index
        self.count += 1
        log.info("snapshot_installed", index=index, first_index=entry_log.first_index)
        if leader in self.state.peers:
            self._reply(leader, index, 0, journal.last_index + 1)

    def decline(self, leader: str, index: int, next_index: int) -> None:
        """Ask *leader* for entries from *next_index* on: the snapshot of *index* is not needed."""
        self.under_way = False
        if leader in self.state.peers:
            self._reply(leader, index, 0, next_index)

    def refuse(self) -> None:
        """Drop the snapshot. Without an answer the leader waits and offers one again."""
        self.under_way = False

    def _reply(self, leader: str, index: int, offset: int, next_index: int) -> None:
        self.state.peers.reply(leader, Kind.SNAPSHOT_REPLY, index, offset, next_index)
