"""Members of a Raft group that a scenario moves step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import cbor2

from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.mark import Anchor, load_anchor
from dledger.raft.membership import Members
from dledger.raft.peers import Outgoing
from dledger.testing.crash_disk import CrashDisk
from tests.harness.raft_cluster import Cluster, Letter, Member

SEGMENT_BYTES: Final = 4096
"""Small, so that a few large entries fill one."""


class ScenarioError(Exception):
    """A command that means nothing here; the scenario is wrong, not the group."""


class ScenarioCluster(Cluster):
    """A group in memory that can also be given snapshots, paused, and cut off its power."""

    def __init__(self, size: int = 3, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.lost: list[Letter] = []
        self.paused: set[str] = set()
        self.installs: dict[str, tuple[str, bytes]] = {}
        super().__init__(Path("/memory"), size, disks=CrashDisk, segment_bytes=segment_bytes)

    def disk(self, name: str) -> CrashDisk:
        """Return the disk of *name*."""
        disk = self.disks[name]
        assert isinstance(disk, CrashDisk)
        return disk

    def start(self, name: str, *, restored_commit_index: int = 0) -> Member:
        """Start *name*; its snapshots hold the list of members and where the log begins."""
        member = super().start(name, restored_commit_index=restored_commit_index)
        self.members = dict(sorted(self.members.items()))
        if member.log.first_index > 1:
            raise ScenarioError(f"{name} has no tables to start with: its log has lost its begin")
        member.node.owner.take_snapshot = lambda: self._take_snapshot(member)
        member.node.owner.on_snapshot = lambda leader, data: self._offered(name, leader, data)
        return member

    @staticmethod
    def _take_snapshot(member: Member) -> tuple[int, bytes]:
        node, log = member.node, member.log
        known, anchor = node.journal.members, log.anchor_at(log.first_index)
        assert known.members is not None
        assert known.index <= node.commit_index, "a snapshot holds what is committed"
        index = node.commit_index
        return index, cbor2.dumps([index, anchor.encode(), known.index, known.members.encode()])

    def _offered(self, name: str, leader: str, data: bytes) -> None:
        self.installs[name] = (leader, data)

    def install(self, name: str) -> None:
        """Finish the installation that waits on *name*, as a disk does after a while."""
        leader, data = self.installs.pop(name)
        member = self.members[name]
        index, encoded, list_index, members = cbor2.loads(data)
        root, disk = str(member.root), self.disks[name]
        anchor = decode_anchor(encoded)
        member.log.close(clean=False)
        EntryLog.begin_at(disk, root, anchor)
        member.log = EntryLog.open(disk, root, segment_bytes=self.segment_bytes, trusted=None)
        member.log.allocator.reserve_next()
        member.node.journal.members.reset(list_index, Members.decode(members))
        member.node.installed(leader, member.log, index)

    def retain(self, name: str, index: int) -> None:
        """Forget what stands in segments of *name* before the one that holds *index*."""
        member = self.members[name]
        log = member.log
        base = log.position_at(index) // self.segment_bytes
        first = next(
            at
            for at in range(log.first_index, index + 1)
            if log.position_at(at) // self.segment_bytes == base
        )
        log.drop_before(log.anchor_at(first))
        member.node.journal.anchor_moved()

    def end(self, name: str, disk: CrashDisk) -> None:
        """Kill *name*; *disk* is what it leaves."""
        self.disks[name] = disk
        self.installs.pop(name, None)
        del self.members[name]
        self.post = [letter for letter in self.post if name not in (letter.sender, letter.receiver)]
        for member in self.members.values():
            for channel in ("control", "data"):
                member.node.link_down(name, channel)

    def reconnect(self, one: str, other: str) -> None:
        """Make the connections between two members again."""
        for name, peer in ((one, other), (other, one)):
            for channel in ("control", "data"):
                self.node(name).link_up(peer, channel, self.node(peer).contacts.hello(channel))

    def _note(self, name: str) -> None:
        member = self.members.get(name)
        if member is None:
            return
        noted = member.committed[-1][0] if member.committed else 0
        for index in range(max(noted + 1, member.log.first_index), member.node.commit_index + 1):
            member.committed.append((index, member.log.chain_at(index)))

    def _post(
        self, sender: str, receiver: str, outgoing: Outgoing, views: list[memoryview]
    ) -> None:
        cut, self.cut = self.cut, set()
        super()._post(sender, receiver, outgoing, views)
        self.cut = cut
        if (sender, receiver) in cut or receiver not in self.members:
            self.lost.append(self.post.pop())


def decode_anchor(data: bytes) -> Anchor:
    """Return the anchor in *data*, through the file it is made for."""
    disk = CrashDisk()
    disk.replace("/anchor", data)
    return load_anchor(disk, "/anchor")
