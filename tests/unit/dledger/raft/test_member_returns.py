"""Members that leave, come back or change within one leader's term: nothing old counts for them."""

from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from dledger.raft.leader import LEAVER_TIMEOUTS
from dledger.raft.member import RaftNode
from dledger.raft.membership import MEMBERS_MAX
from dledger.raft.wire import Kind
from tests.harness.present import present
from tests.harness.raft_cluster import Cluster, Letter
from tests.unit.dledger.raft.paper_group import add, group, isolate, listed, remove


def standing(node: RaftNode) -> str:
    """Return the list a node goes by, as ``name`` for voters and ``(name)`` for learners."""
    return " ".join(m.name if m.is_voter else f"({m.name})" for m in listed(node).members)


def leading(cluster: Cluster) -> RaftNode:
    """Return n0, which leads, as every member knows."""
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    return leader


def test_member_removed_twice_is_informed_twice() -> None:
    """The time of its first removal is no part of the second."""
    cluster = group(4)
    leader = leading(cluster)
    for _ in range(2):
        isolate(cluster, "n1")
        remove(cluster, "n0", "n1")
        cluster.run()
        cluster.heartbeat("n0")
        assert "n1" in leader.replicator.peers
        assert standing(leader) == "n0 n2 n3"
        cluster.cut.clear()
        add(cluster, "n0", "n1")
        cluster.run()
        cluster.pass_time("n0", LEAVER_TIMEOUTS * leader.settings.election_timeout_s + 1.0)
        assert standing(leader) == "n0 n1 n2 n3"


def test_followers_of_an_idle_leader_confirm_that_they_are_alive() -> None:
    cluster = group()
    leader = leading(cluster)
    cluster.pass_time("n0", 60)
    cluster.cut.add(("n0", "n1"))
    cluster.pass_time("n0", 5)
    rows = leader.status()["peers"]
    assert rows["n2"]["acked_ms_ago"] < 1_000
    assert rows["n1"]["acked_ms_ago"] >= 5_000


def test_former_leader_no_longer_calls_a_removed_member() -> None:
    cluster = group(4)
    leader = leading(cluster)
    isolate(cluster, "n1")
    remove(cluster, "n0", "n1")
    cluster.run()
    assert "n1" in leader.roster.expected()
    cluster.elect("n2")
    cluster.heartbeat("n2")
    assert standing(leader) == "n0 n2 n3"
    assert leader.roster.expected() == {"n2", "n3"}
    assert sorted(leader.status()["peers"]) == ["n2", "n3"]


def test_returned_learner_has_to_catch_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was removed it had everything; since then its disk is stuck."""
    cluster = group()
    leader = leading(cluster)
    cluster.join("n3")
    add(cluster, "n0", "n3")
    cluster.run()
    cluster.pass_time("n0", 0.3)
    learner = present(listed(leader).learner("n3"))
    deliver = cluster.deliver

    def lose_appends(letter: Letter) -> None:
        if letter.receiver != "n3" or letter.frame.kind is not Kind.APPEND:
            deliver(letter)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "deliver", lose_appends)
        leader.changes.change(listed(leader).without(learner))
        leader.settle()
        cluster.append("n0", b"x")
        cluster.run()
        cluster.pass_time("n0", 1.5)
        add(cluster, "n0", "n3")
        cluster.run()
        cluster.pass_time("n0", 5.0)
        assert standing(leader) == "n0 n1 n2 (n3)"
    cluster.pass_time("n0", 5.0)
    assert standing(leader) == "n0 n1 n2 n3"


def test_forgotten_acknowledgement_is_requested_again() -> None:
    """Its answer on the data link came first, and was forgotten with the hello."""
    cluster = group()
    leader = leading(cluster)
    isolate(cluster, "n2")
    cluster.members["n0"].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    assert cluster.members["n1"].log.durable_index == index
    hello = cluster.node("n1").contacts.hello("control")
    leader.link_up("n1", "control", replace(hello, doubtful=True))
    cluster.run()
    assert leader.commit_index < index
    cluster.members["n0"].flush()
    cluster.run()
    assert leader.commit_index == index


def test_learner_that_is_certain_again_is_promoted() -> None:
    """It reports so with its answers to heartbeats: no connection is made again."""
    cluster = group()
    leader = leading(cluster)
    cluster.join("n3")
    add(cluster, "n0", "n3")
    isolate(cluster, "n3")
    cluster.append("n0", b"x")
    cluster.run()
    cluster.cut.clear()
    cluster.node("n3").eligibility.doubtful = True
    cluster.link("n3")
    assert leader.roster.hellos["n3"].doubtful
    cluster.pass_time("n0", 5.0)
    assert standing(leader) == "n0 n1 n2 n3"


# -- a full group --------------------------------------------------------------------------


def full_group(tmp_path: Path) -> tuple[Cluster, RaftNode]:
    """Return a group of as many members as fit, a learner `nx` and n1, which was wiped, included.

    Nothing was done about either of them yet.
    """
    cluster = Cluster(tmp_path, MEMBERS_MAX - 1)
    leader = leading(cluster)
    cluster.join("nx")
    add(cluster, "n0", "nx")
    cluster.run()
    cluster.wipe("n1")
    return cluster, leader


def test_full_group_promotes_beside_a_wiped_voter(tmp_path: Path) -> None:
    cluster, leader = full_group(tmp_path)
    before = listed(leader).voter("n1")
    cluster.pass_time("n0", 3.0)
    assert listed(leader).voter("nx") is not None
    assert (listed(leader).voter("n1"), listed(leader).learner("n1")) == (before, None)


def test_full_group_replaces_a_removed_wiped_voter(tmp_path: Path) -> None:
    cluster, leader = full_group(tmp_path)
    with structlog.testing.capture_logs() as lines:
        cluster.pass_time("n0", 5.0)
    reasons = [line["reason"] for line in lines if line["event"] == "members_wait"]
    # Not with every heartbeat: before `nx` is promoted, and after it.
    assert reasons == 2 * [
        "n1 has lost its folder, and a group has at most 16 members: remove one, at best n1, then "
        "add it"
    ]
    remove(cluster, "n0", "n1")
    cluster.run()
    add(cluster, "n0", "n1")
    cluster.run()
    cluster.pass_time("n0", 5.0)
    again = present(listed(leader).voter("n1"))
    assert again.incarnation == cluster.node("n1").identity.incarnation
