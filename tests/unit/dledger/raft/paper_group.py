"""What tests of the Raft paper and thesis share: a group driven by hand, and steps of it."""

from collections.abc import Sequence
from pathlib import Path

import cbor2

from dledger.commitlog.entry import parse_header, seal_no_op
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.mark import Anchor, load_anchor
from dledger.raft.journal import Frame
from dledger.raft.library import Role
from dledger.raft.member import RaftNode
from dledger.raft.membership import Member as Listed
from dledger.raft.membership import Members
from dledger.raft.wire import Kind, PeerFrame
from dledger.testing.crash_disk import CrashDisk
from tests.harness.raft_cluster import Cluster, Letter, Member

SEGMENT_BYTES = 1 << 16


def group(size: int = 3) -> Cluster:
    """Return a group whose disks are in memory."""
    return Cluster(Path("/memory"), size, disks=CrashDisk, segment_bytes=SEGMENT_BYTES)


def frame(kind: Kind, term: int, *fields: int, payload: bytes = b"") -> PeerFrame:
    """Return a frame as a peer would send it."""
    return PeerFrame(kind, term, 1, 1, list(fields), memoryview(payload))


def fill(cluster: Cluster, name: str, terms: Sequence[int]) -> None:
    """Give *name*, whose log is empty, one entry of each of *terms*; equal rows, equal bytes."""
    member = cluster.members[name]
    for index, term in enumerate(terms, start=1):
        data = seal_no_op(index, term, member.log.end_position, member.log.last_chain, 0)
        member.node.journal.add(Frame(memoryview(data), parse_header(data)), index, term)
    member.node.core.observe_term(max(terms, default=0))
    member.flush()


def terms(cluster: Cluster, name: str) -> list[int]:
    """Return the terms of all entries of *name*."""
    log = cluster.members[name].log
    return [log.term_at(index) for index in range(log.first_index, log.last_index + 1)]


def posted(cluster: Cluster, name: str, *kinds: Kind) -> list[Letter]:
    """Flush *name*, let it post what it has to send, and return those of *kinds*."""
    cluster.members[name].flush()
    cluster.collect(name)
    return [
        letter for letter in cluster.post if letter.sender == name and letter.frame.kind in kinds
    ]


def receivers(letters: Sequence[Letter]) -> list[str]:
    """Return to whom *letters* go, sorted."""
    return sorted(letter.receiver for letter in letters)


def isolate(cluster: Cluster, *names: str) -> None:
    """Cut *names* off from everybody."""
    for name in names:
        for other in cluster.names:
            cluster.cut |= {(name, other), (other, name)}


def campaign(cluster: Cluster, name: str) -> RaftNode:
    """Let *name* become a candidate whose requests for votes have not left yet."""
    node = cluster.node(name)
    cluster.clock.now_s += 1.0
    node.begin_election()
    node.settle()
    while node.core.role is not Role.CANDIDATE and not node.is_leader:
        assert cluster.step(), f"{name} found no member that would vote for it"
    return node


def listed(node: RaftNode) -> Members:
    """Return the list that *node* goes by."""
    members = node.roster.members
    assert members is not None
    return members


def as_listed(cluster: Cluster, name: str) -> Listed:
    """Return how *name* would stand in a list."""
    hello = cluster.node(name).contacts.hello("control")
    return Listed(name, hello.incarnation, "127.0.0.1", 1, hello.client_address)


def remove(cluster: Cluster, leader: str, name: str) -> None:
    """Let *leader* take the voter *name* off the list."""
    node = cluster.node(leader)
    voter = listed(node).voter(name)
    assert voter is not None
    node.changes.change(listed(node).without(voter))
    node.settle()


def add(cluster: Cluster, leader: str, name: str) -> None:
    """Let *leader* take *name* in as a learner."""
    node = cluster.node(leader)
    node.changes.change(listed(node).with_learner(as_listed(cluster, name)))
    node.settle()


class StoredGroup(Cluster):
    """A group in memory that can also be given snapshots and cut off its power."""

    def __init__(self, size: int = 3) -> None:
        self.installs: dict[str, tuple[str, bytes]] = {}
        super().__init__(Path("/memory"), size, disks=CrashDisk, segment_bytes=4096)

    def disk(self, name: str) -> CrashDisk:
        """Return the disk of *name*."""
        disk = self.disks[name]
        assert isinstance(disk, CrashDisk)
        return disk

    def start(self, name: str, *, restored_commit_index: int = 0) -> Member:
        """Start *name*; its snapshots hold the list of members and where the log begins."""
        member = super().start(name, restored_commit_index=restored_commit_index)
        self.members = dict(sorted(self.members.items()))
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


def decode_anchor(data: bytes) -> Anchor:
    """Return the anchor in *data*, through the file it is made for."""
    disk = CrashDisk()
    disk.replace("/anchor", data)
    return load_anchor(disk, "/anchor")
