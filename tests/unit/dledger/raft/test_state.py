"""The state of a member, and the callbacks of its owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from commitlog.errors import FlushFailedError, InvariantBroken
from dledger.raft.identity import Hello
from dledger.raft.leader import could_commit
from dledger.raft.membership import Member, Members
from dledger.raft.state import Failure, Owner
from tests.harness.raft_cluster import Cluster

LIST = Members.of(Member(name, f"{name}-1") for name in ("n0", "n1", "n2", "n3", "n4"))


def hello(name: str, incarnation: str = "", *, doubtful: bool = False) -> Hello:
    return Hello("C", "G", name, incarnation or f"{name}-1", {}, doubtful, "", "control")


@pytest.mark.parametrize(
    ("connected", "can"),
    [
        ([], False),
        ([hello("n1")], False),
        ([hello("n1"), hello("n2")], True),
        ([hello("n1"), hello("n2", doubtful=True)], False),
        ([hello("n1"), hello("n2", "n2-2")], False),
        ([hello("n1"), hello("guest")], False),
        ([hello("n1"), hello("n2", doubtful=True), hello("n3")], True),
    ],
)
def test_list_commits_with_a_majority_that_votes(connected: list[Hello], can: bool) -> None:
    """Name and incarnation count, the leader counts itself, doubt does not."""
    assert could_commit(LIST, connected) is can


def test_owner_without_hooks_is_not_called() -> None:
    owner = Owner(lambda: None)
    assert owner.may_lead()
    assert not owner.on_suspect(7)
    with pytest.raises(InvariantBroken, match="no tables to send"):
        owner.take_snapshot()
    with pytest.raises(InvariantBroken, match="3 bytes from n1"):
        owner.on_snapshot("n1", b"abc")


def test_end_of_events_runs_after_the_owner(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node, seen = cluster.elect("n0"), list[tuple[int, int]]()
    inner = node.owner.on_settled

    def looking_on() -> None:
        inner()
        seen.append((node.commit_index, len(cluster.members["n0"].committed)))

    node.owner.on_settled = looking_on
    index = cluster.append("n0", b"x")
    cluster.run()
    assert seen[-1] == (index, index)
    assert all(commit == applied for commit, applied in seen)


def test_what_the_owner_answers_may_change_while_the_node_runs(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    node = cluster.node("n0")
    node.owner.may_lead = lambda: False
    cluster.clock.now_s += 10.0
    node.begin_election()
    cluster.run()
    assert not node.is_leader
    node.owner.may_lead = lambda: True
    assert cluster.elect("n0").is_leader


def test_disk_failure_is_no_connection_error() -> None:
    failure = Failure()
    raised = failure.of_disk(OSError(5, "input/output error"))
    assert failure.error is raised
    assert isinstance(raised, FlushFailedError)
    assert not isinstance(raised, OSError)
