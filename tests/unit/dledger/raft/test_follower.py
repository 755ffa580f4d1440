"""Followers hear of commits by heartbeats (Raft §5.3: what a leader has verified is its log)."""

from dledger.raft.member import RaftNode
from dledger.raft.wire import Kind
from tests.harness.raft_cluster import Cluster


def heartbeat_alone(cluster: Cluster, leader: str, follower: str) -> RaftNode:
    """Let one heartbeat pass and nothing else; return the members that received it."""
    cluster.post = []
    cluster.node(leader).leader.send_heartbeats()
    cluster.collect(leader)
    beats = [
        letter
        for letter in cluster.post
        if letter.receiver == follower and letter.frame.kind is Kind.HEARTBEAT
    ]
    assert len(beats) == 1
    cluster.post = []
    cluster.deliver(beats[0])
    return cluster.node(follower)


def test_heartbeat_commits_only_verified_entries(cluster: Cluster) -> None:
    """An old leader's own tail stands where the new leader has committed something else."""
    old = cluster.elect("n0")
    cluster.append("n0", b"everybody's")
    cluster.heartbeat("n0")
    committed = old.commit_index
    cluster.cut = {("n0", "n1"), ("n0", "n2"), ("n1", "n0"), ("n2", "n0")}
    tail = cluster.append("n0", b"n0's own")
    cluster.run()
    new = cluster.elect("n1")
    cluster.append("n1", b"the group's")
    cluster.heartbeat("n1")
    assert new.commit_index > tail
    cluster.cut = set()
    heartbeat_alone(cluster, "n1", "n0")
    assert not old.is_leader
    assert (old.core.known_commit_index, old.journal.last_index) == (committed, tail)
    cluster.link("n0")
    cluster.run()
    cluster.heartbeat("n1")
    assert old.commit_index == new.commit_index
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1


def test_a_member_that_starts_again_waits_for_an_append(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    index = cluster.append("n0", b"x")
    cluster.heartbeat("n0")
    cluster.stop("n1")
    node = cluster.start("n1").node
    assert (node.journal.last_index, node.core.known_commit_index) == (index, 0)
    node.contacts.on_hello(leader.contacts.hello("control"))
    heartbeat_alone(cluster, "n0", "n1")
    assert node.core.known_commit_index == 0
    cluster.link("n1")
    cluster.run()
    assert node.commit_index == leader.commit_index == index


def test_a_heartbeat_that_comes_late_takes_no_commit_back(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    leader.leader.send_heartbeats()
    cluster.collect("n0")
    late = next(letter for letter in cluster.post if letter.receiver == "n1")
    cluster.post = []
    index = cluster.append("n0", b"x")
    cluster.run()
    cluster.heartbeat("n0")
    assert cluster.node("n1").commit_index == index
    cluster.deliver(late)
    assert cluster.node("n1").core.known_commit_index == index
