"""What tests of the Raft paper and thesis share: a group driven by hand, and steps of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dledger.commitlog.entry import parse_header, seal_no_op
from dledger.raft.journal import Frame
from dledger.raft.library import Role
from dledger.raft.member import RaftNode
from dledger.raft.membership import Member as Listed
from dledger.raft.membership import Members
from dledger.raft.wire import Kind, PeerFrame
from dledger.testing.crash_disk import CrashDisk
from tests.harness.raft_cluster import Cluster, Letter

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
