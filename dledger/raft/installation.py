"""A snapshot being taken in: a follower that is behind the leader's first kept entry.

The chunks are collected here; the owner puts the whole on disk and says when it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from commitlog.entry_log import EntryLog
from dledger.raft.core import RaftCore
from dledger.raft.journal import CommitLogJournal
from dledger.raft.owner import Owner
from dledger.raft.peers import Peers
from dledger.raft.promises import Promises
from dledger.raft.snapshot import Receiving
from dledger.raft.wire import Kind, PeerFrame

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Installation:
    """The snapshot that arrives, and whether one is being installed.

    Attributes:
        under_way: A whole snapshot has arrived and is not on disk yet: the log is not to be
            touched.
        count: Snapshots installed since the start.
    """

    owner: Owner
    core: RaftCore
    journal: CommitLogJournal
    promises: Promises
    peers: Peers
    under_way: bool = field(default=False, init=False)
    count: int = field(default=0, init=False)
    _receiving: Receiving = field(default_factory=Receiving, init=False)
    _installed_index: int = field(default=0, init=False)

    def take(self, leader: str, frame: PeerFrame) -> None:
        """Take one chunk from *leader*.

        Raises:
            RemoteProtocolError: No snapshot looks like this.
        """
        index, offset, total = frame.fields
        if self.under_way:
            return
        if index <= max(self.journal.commit_index, self._installed_index):
            # What is committed here, or what the log is filled up to again, goes further already:
            # appends will do. The last chunk may come twice, and a second time it would throw away
            # what came since. A log that merely is longer may be another one: its owner compares.
            self._reply(leader, index, total, self.journal.last_index + 1)
        elif self._receiving.take(index, offset, total, frame.payload):
            self.under_way = True
            self.owner.on_snapshot(leader, self._receiving.data())
        else:
            self._reply(leader, index, self._receiving.offset, 0)

    def finish(self, leader: str, entry_log: EntryLog, index: int) -> None:
        """The snapshot of *index* is on disk; *entry_log* begins anew, everything old is void."""
        self.journal.begin_anew(entry_log)
        self.core.begin_at(self.journal.anchor_index)
        self.promises.owe_nothing()
        self.under_way = False
        self._installed_index = index
        self.count += 1
        log.info("snapshot_installed", index=index, first_index=entry_log.first_index)
        if leader in self.peers:
            self._reply(leader, index, 0, self.journal.last_index + 1)

    def decline(self, leader: str, index: int, next_index: int) -> None:
        """The snapshot of *index* is not needed: entries from *next_index* on will do."""
        self.under_way = False
        if leader in self.peers:
            self._reply(leader, index, 0, next_index)

    def refuse(self) -> None:
        """The snapshot cannot be taken now. Not answered, so that the leader waits and asks."""
        self.under_way = False

    def _reply(self, leader: str, index: int, offset: int, next_index: int) -> None:
        self.peers.reply(leader, Kind.SNAPSHOT_REPLY, index, offset, next_index)
