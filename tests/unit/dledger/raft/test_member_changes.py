"""Members come and go in groups driven by hand: which count, when, and what a cut undoes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.raft.leader import CLOSE_BYTES, LEAVER_TIMEOUTS
from dledger.raft.member import RaftNode
from dledger.raft.membership import Member, Members
from dledger.raft.wire import Kind, PeerFrame
from tests.harness.present import present
from tests.harness.raft_cluster import Cluster, Letter


def standing(node: RaftNode) -> str:
    """Return the list a node goes by, as ``name`` for voters and ``(name)`` for learners."""
    members = present(node.roster.members)
    return " ".join(m.name if m.is_voter else f"({m.name})" for m in members.members)


def listed(node: RaftNode) -> Members:
    return present(node.roster.members)


def member_of(cluster: Cluster, name: str) -> Member:
    hello = cluster.node(name).contacts.hello("control")
    return Member(name, hello.incarnation, "127.0.0.1", 1, hello.client_address)


def add_learner(cluster: Cluster, leader: RaftNode, name: str) -> None:
    cluster.join(name)
    leader.changes.change(listed(leader).with_learner(member_of(cluster, name)))
    leader.settle()
    cluster.run()


def voter(node: RaftNode, name: str) -> Member:
    return present(listed(node).voter(name))


def remove(cluster: Cluster, leader: RaftNode, name: str) -> None:
    leader.changes.change(listed(leader).without(voter(leader, name)))
    leader.settle()
    cluster.run()


def isolate(cluster: Cluster, name: str) -> None:
    for other in cluster.names:
        cluster.cut |= {(name, other), (other, name)}


def counted(node: RaftNode) -> list[str]:
    """Return whom the library counts besides the node itself."""
    library: Any = node.core._library
    return sorted(other.id for other in library.otherNodes)


def timeout_now(term: int, last: int) -> PeerFrame:
    return PeerFrame(Kind.TIMEOUT_NOW, term, 1, 1, [last], memoryview(b""))


def test_the_first_leader_puts_the_agreed_voters_into_the_log(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    for node in map(cluster.node, cluster.names):
        assert node.journal.members.index == leader.state.noop_index + 1
        assert standing(node) == "n0 n1 n2"
        assert listed(node) == listed(leader)
    found = voter(leader, "n1")
    assert (found.host, found.port, found.client_address) == ("127.0.0.1", 1, "n1:10911")
    second = cluster.elect("n1")
    assert second.journal.last_index == second.state.noop_index


def test_a_restarted_member_goes_by_the_newest_list_in_its_log(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    add_learner(cluster, leader, "n3")
    cluster.stop("n1")
    node = cluster.start("n1").node
    assert standing(node) == "n0 n1 n2 (n3)"


def test_a_learner_gets_everything_and_is_counted_nowhere(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    add_learner(cluster, leader, "n3")
    index = cluster.append("n0", b"x")
    cluster.run()
    assert cluster.members["n3"].log.durable_index == index
    isolate(cluster, "n1")
    isolate(cluster, "n2")
    alone = cluster.append("n0", b"y")
    cluster.run()
    assert leader.replicator.peers["n3"].match_index == alone
    assert leader.commit_index == index


def test_a_learner_never_stands_for_election(cluster: Cluster) -> None:
    add_learner(cluster, cluster.elect("n0"), "n3")
    cluster.clock.now_s += 10.0
    node = cluster.node("n3")
    node.begin_election()
    node.settle()
    cluster.collect("n3")
    assert [letter.frame.kind for letter in cluster.post] == []
    node.receive("n0", timeout_now(node.term, 0))
    assert not node.is_leader
    assert node.term == 1


def test_caught_up_learner_is_promoted(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    for number in range(20):
        cluster.append("n0", str(number).encode())
    add_learner(cluster, leader, "n3")
    assert standing(leader) == "n0 n1 n2 (n3)"
    cluster.pass_time("n0", 0.5)
    assert standing(leader) == "n0 n1 n2 (n3)"
    cluster.pass_time("n0", 1.0)
    for name in cluster.names:
        assert standing(cluster.node(name)) == "n0 n1 n2 n3"
    # Four voters: two are no majority any more, three are.
    isolate(cluster, "n1")
    isolate(cluster, "n2")
    index = cluster.append("n0", b"two of four")
    cluster.run()
    assert leader.commit_index == index - 1
    cluster.cut = set()
    isolate(cluster, "n1")
    cluster.pass_time("n0", 0.5)
    assert leader.commit_index == index


def test_stuck_learner_is_not_promoted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = cluster.elect("n0")
    for _ in range(24):
        cluster.append("n0", bytes(1 << 16))
        cluster.run()
    deliver = cluster.deliver

    def lose_after_the_first_append(letter: Letter) -> None:
        if letter.receiver != "n3" or not cluster.members["n3"].log.last_index:
            deliver(letter)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "deliver", lose_after_the_first_append)
        add_learner(cluster, leader, "n3")
        cluster.pass_time("n0", 5.0)
        lag_bytes = present(leader.replicator.lag_bytes("n3"))
        assert 0 < lag_bytes < CLOSE_BYTES
        assert standing(leader) == "n0 n1 n2 (n3)"
    cluster.pass_time("n0", 3.0)
    assert standing(leader) == "n0 n1 n2 n3"


def test_wiped_voter_is_watched_as_a_learner(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had before it was a learner is no proof that its disk still takes entries."""
    leader = cluster.elect("n0")
    cluster.append("n0", b"kept")
    cluster.run()
    cluster.wipe("n1")
    cluster.pass_time("n0", 0.6)
    assert standing(leader) == "n0 n1 n2"
    last = cluster.members["n1"].log.last_index
    assert last == leader.journal.last_index
    deliver = cluster.deliver

    def lose_appends(letter: Letter) -> None:
        if letter.receiver != "n1" or letter.frame.kind is not Kind.APPEND:
            deliver(letter)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "deliver", lose_appends)
        cluster.append("n0", b"lost")
        cluster.run()
        cluster.pass_time("n0", 5.0)
        assert cluster.members["n1"].log.last_index == last
        assert standing(leader) in ("n0 n1 (n1) n2", "n0 (n1) n1 n2")
    cluster.pass_time("n0", 5.0)
    assert standing(leader) == "n0 n1 n2"


def test_promoted_learner_grants_its_vote(tmp_path: Path) -> None:
    """The list with n1 as a voter is on n0 and n2; n1 still takes itself for a learner."""
    cluster = Cluster(tmp_path, 2)
    leader = cluster.elect("n0")
    add_learner(cluster, leader, "n2")
    cluster.cut = {("n0", "n2")}
    learner = present(listed(leader).learner("n2"))
    leader.changes.change(listed(leader).promoted(learner))
    leader.settle()
    cluster.run()
    assert standing(cluster.node("n1")) == "n0 n1 n2"
    assert standing(cluster.node("n2")) == "n0 n1 (n2)"
    cluster.stop("n0")
    cluster.cut = set()
    second = cluster.elect("n1")
    cluster.run()
    assert second.commit_index == second.journal.last_index
    assert standing(cluster.node("n2")) == "n0 n1 n2"


def test_a_candidate_counts_no_vote_of_a_learner(cluster: Cluster) -> None:
    add_learner(cluster, cluster.elect("n0"), "n3")
    isolate(cluster, "n0")
    isolate(cluster, "n2")
    cluster.clock.now_s += 10.0
    cluster.node("n1").begin_election()
    cluster.run()
    assert not cluster.node("n1").is_leader


def test_majority_shrinks_with_the_removal_entry(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    remove(cluster, leader, "n2")
    assert standing(leader) == "n0 n1"
    assert leader.commit_index == leader.journal.last_index
    cluster.heartbeat("n0")
    assert "n2" not in leader.replicator.peers
    isolate(cluster, "n2")
    index = cluster.append("n0", b"x")
    cluster.run()
    assert leader.commit_index == index
    # n2 was informed, and does not stand any more.
    assert standing(cluster.node("n2")) == "n0 n1"
    cluster.clock.now_s += 10.0
    cluster.node("n2").begin_election()
    cluster.collect("n2")
    assert cluster.post == []


def test_a_group_shrinks_to_one_and_grows_again(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    remove(cluster, leader, "n1")
    remove(cluster, leader, "n2")
    assert standing(leader) == "n0"
    cluster.members["n0"].flushes_by_itself = False
    index = cluster.append("n0", b"alone")
    cluster.collect("n0")
    assert leader.commit_index < index
    cluster.members["n0"].flush()
    assert leader.commit_index == index
    cluster.members["n0"].flushes_by_itself = True
    for name in ("n1", "n2"):
        leader.changes.change(listed(leader).with_learner(member_of(cluster, name)))
        leader.settle()
        cluster.run()
        cluster.pass_time("n0", 2.0)
    assert standing(leader) == "n0 n1 n2"
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1


def test_single_voter_publishes_commits_after_its_flush(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    leader = cluster.elect("n0")
    add_learner(cluster, leader, "n1")
    cluster.members["n0"].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    leader.leader.send_heartbeats()
    cluster.run()
    assert cluster.members["n1"].log.durable_index == index
    assert cluster.node("n1").core.known_commit_index < index
    cluster.members["n0"].flush()
    leader.leader.send_heartbeats()
    cluster.run()
    assert cluster.node("n1").commit_index == index


def test_one_change_at_a_time_and_only_on_committed_ground(cluster: Cluster) -> None:
    cluster.join("n3")
    cluster.cut = {("n0", "n3"), ("n3", "n0")}
    leader = cluster.elect("n0")
    learner = member_of(cluster, "n3")
    with pytest.raises(NotLeaderError):
        cluster.node("n1").changes.change(listed(leader).with_learner(learner))
    with pytest.raises(ChangeRefusedError, match="transfer its leadership first"):
        leader.changes.change(listed(leader).without(voter(leader, "n0")))
    isolate(cluster, "n1")
    isolate(cluster, "n2")
    leader.changes.change(listed(leader).with_learner(learner))
    with pytest.raises(ChangePendingError, match="before this one"):
        leader.changes.change(listed(leader).without(voter(leader, "n1")))
    assert standing(leader) == "n0 n1 n2 (n3)"


def test_leader_changes_members_after_its_own_commit(cluster: Cluster) -> None:
    """The flaw of one-at-a-time changes that was found in 2015: an old uncommitted list."""
    cluster.elect("n0")
    cluster.clock.now_s += 10.0
    node = cluster.node("n1")
    node.begin_election()
    while not node.is_leader:
        assert cluster.step()
    with pytest.raises(ChangePendingError, match="not committed anything"):
        node.changes.change(listed(node).without(voter(node, "n2")))
    cluster.run()
    node.changes.change(listed(node).without(voter(node, "n2")))


def test_a_cut_off_leaders_list_goes_when_its_entry_is_cut(cluster: Cluster) -> None:
    old = cluster.elect("n0")
    isolate(cluster, "n0")
    old.changes.change(listed(old).without(voter(old, "n2")))
    old.settle()
    cluster.run()
    assert standing(old) == "n0 n1"
    assert counted(old) == ["n1"]
    new = cluster.elect("n1")
    assert standing(new) == "n0 n1 n2"
    cluster.cut = set()
    cluster.append("n1", b"after")
    cluster.pass_time("n1", 1.0)
    assert old.journal.truncations == 1
    assert standing(old) == "n0 n1 n2"
    assert counted(old) == ["n1", "n2"]
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1


# -- a folder that was lost ----------------------------------------------------------------


def test_a_wiped_voter_takes_its_own_place_again(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    index = cluster.append("n0", b"kept")
    cluster.run()
    before = voter(leader, "n1")
    cluster.wipe("n1")
    seen: list[str] = []
    for _ in range(60):
        cluster.pass_time("n0", 0.1)
        if not seen or seen[-1] != standing(leader):
            seen.append(standing(leader))
    assert seen in (
        ["n0 n1 n2", "n0 n1 (n1) n2", "n0 (n1) n2", "n0 n1 n2"],
        ["n0 n1 n2", "n0 (n1) n1 n2", "n0 (n1) n2", "n0 n1 n2"],
    )
    again = voter(leader, "n1")
    assert again.incarnation != before.incarnation
    assert cluster.node("n1").roster.is_self_voter
    isolate(cluster, "n2")
    cluster.append("n0", b"with n1 alone")
    cluster.run()
    assert leader.commit_index == leader.journal.last_index > index


def test_wiped_voter_does_not_count_before_promotion(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    cluster.wipe("n1")
    cluster.pass_time("n0", 0.3)
    isolate(cluster, "n2")
    index = cluster.append("n0", b"x")
    cluster.run()
    assert leader.replicator.peers["n1"].match_index == index
    assert leader.commit_index < index
    # Nor does its vote: n2 has all that is committed, and finds no majority with it.
    cluster.cut = set()
    isolate(cluster, "n0")
    cluster.clock.now_s += 10.0
    cluster.node("n2").begin_election()
    cluster.run()
    assert not cluster.node("n2").is_leader


@pytest.mark.parametrize("after_steps", [1, 2])
def test_the_next_leader_goes_on_with_a_replacement(cluster: Cluster, after_steps: int) -> None:
    first = cluster.elect("n0")
    cluster.append("n0", b"kept")
    cluster.run()
    cluster.wipe("n1")
    lists = {standing(first)}
    while len(lists) < 1 + after_steps:
        cluster.pass_time("n0", 0.1)
        lists.add(standing(first))
    second = cluster.elect("n2")
    assert not first.is_leader
    cluster.pass_time("n2", 5.0)
    assert standing(second) == "n0 n1 n2"
    assert cluster.node("n1").roster.is_self_voter
    assert cluster.node("n1").journal.log.last_chain == second.journal.log.last_chain


def test_a_removed_name_is_not_taken_back_by_itself(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    remove(cluster, leader, "n2")
    cluster.link("n2")
    cluster.pass_time("n0", 5.0)
    assert standing(leader) == "n0 n1"


# -- transfer ------------------------------------------------------------------------------


def test_the_one_that_has_most_is_chosen(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    isolate(cluster, "n2")
    cluster.append("n0", b"x")
    cluster.run()
    assert leader.transfers.begin(None).target == "n1"


def test_a_target_that_does_not_catch_up_lets_the_leader_go_on(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    isolate(cluster, "n2")
    cluster.append("n0", b"x")
    transfer = leader.transfers.begin("n2")
    leader.settle()
    cluster.run()
    with pytest.raises(ChangePendingError, match="handed over"):
        leader.changes.change(listed(leader).without(voter(leader, "n2")))
    with pytest.raises(ChangePendingError, match="already"):
        leader.transfers.begin("n1")
    cluster.pass_time("n0", 1.0)
    assert (transfer.phase, leader.is_leader, leader.transfers.is_under_way) == (
        "failed",
        True,
        False,
    )


def test_an_asked_target_that_does_not_win_lets_the_leader_go_on(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    transfer = leader.transfers.begin("n2")
    leader.settle()
    assert transfer.phase == "asked"
    isolate(cluster, "n2")
    cluster.pass_time("n0", 1.0)
    assert (transfer.phase, leader.is_leader) == ("failed", True)


def test_only_a_connected_voter_can_be_the_target(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    add_learner(cluster, leader, "n3")
    for target in ("n3", "n0", "nobody"):
        with pytest.raises(ChangeRefusedError):
            leader.transfers.begin(target)
    leader.link_down("n1", "control")
    with pytest.raises(ChangeRefusedError):
        leader.transfers.begin("n1")
    with pytest.raises(NotLeaderError):
        cluster.node("n1").transfers.begin(None)


def test_transfer_request_counts_from_the_leader_only(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    follower = cluster.node("n1")
    last = follower.journal.last_index
    follower.receive("n2", timeout_now(follower.term, last))
    follower.receive("n0", timeout_now(follower.term, last + 1))
    follower.settle()
    cluster.run()
    assert leader.is_leader
    assert follower.term == 1


def test_change_is_refused_when_too_few_can_vote(cluster: Cluster) -> None:
    """A voter that is not eligible is connected: the list after it could never commit."""
    leader = cluster.elect("n0")
    cluster.append("n0", b"x")
    cluster.heartbeat("n0")
    before = leader.journal.last_index
    left = listed(leader).without(voter(leader, "n1"))
    hello = leader.roster.hellos["n2"]
    leader.roster.hellos["n2"] = replace(hello, doubtful=True)
    with pytest.raises(ChangePendingError, match="not `doubtful` now"):
        leader.changes.change(left)
    assert leader.journal.last_index == before
    leader.roster.hellos["n2"] = hello
    leader.changes.change(left)
    assert leader.journal.last_index == before + 1


def test_three_of_four_elect_over_a_half_sent_removal(tmp_path: Path) -> None:
    """A removed member with the longest log gives no vote and may not stand (thesis, 4.2.2)."""
    for reached in ([], ["n1"], ["n2"], ["n1", "n2"], ["n2", "n3"]):
        cluster = Cluster(tmp_path / "-".join(["reached", *reached]), 4)
        leader = cluster.elect("n0")
        cluster.heartbeat("n0")
        for name in {"n1", "n2", "n3"} - set(reached):
            cluster.cut |= {("n0", name), (name, "n0")}
        leader.changes.change(listed(leader).without(voter(leader, "n1")))
        leader.settle()
        cluster.run()
        cluster.stop("n0")
        cluster.cut.clear()
        for name in ("n1", "n2", "n3", "n1", "n2", "n3"):
            cluster.clock.now_s += 10.0
            cluster.node(name).begin_election()
            cluster.node(name).settle()
            cluster.run()
            if cluster.node(name).is_leader:
                break
        leading = [name for name in ("n1", "n2", "n3") if cluster.node(name).is_leader]
        assert len(leading) == 1, reached
        index = cluster.append(leading[0], b"x")
        cluster.run()
        assert cluster.node(leading[0]).commit_index == index
        cluster.close()


def test_a_removed_member_gets_the_list_once_it_is_committed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    for name in ("n2", "n3"):
        isolate(cluster, name)
    leader.changes.change(listed(leader).without(voter(leader, "n1")))
    leader.settle()
    later = cluster.append("n0", b"behind the list")
    cluster.run()
    cluster.pass_time("n0", 0.5)
    left = cluster.node("n1")
    assert standing(leader) == "n0 n2 n3"
    assert standing(left) == "n0 n1 n2 n3"
    assert left.journal.last_index == leader.journal.members.index - 1
    cluster.cut.clear()
    cluster.pass_time("n0", 1.0)
    assert leader.commit_index == later
    assert standing(left) == "n0 n2 n3"
    assert "n1" not in leader.replicator.peers


def test_single_voter_removes_a_member_after_its_flush(tmp_path: Path) -> None:
    """Its library counts the list before it is on the disk; a power cut would take it back."""
    cluster = Cluster(tmp_path, 2)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    cluster.members["n0"].flushes_by_itself = False
    leader.changes.change(listed(leader).without(voter(leader, "n1")))
    leader.settle()
    cluster.run()
    assert leader.core.known_commit_index == leader.journal.members.index
    assert standing(cluster.node("n1")) == "n0 n1"
    cluster.members["n0"].flush()
    cluster.run()
    assert standing(cluster.node("n1")) == "n0"


def test_a_removed_member_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    isolate(cluster, "n1")
    remove(cluster, leader, "n1")
    assert leader.commit_index == leader.journal.last_index
    assert "n1" in leader.replicator.peers
    cluster.pass_time("n0", LEAVER_TIMEOUTS * leader.settings.election_timeout_s + 0.5)
    assert "n1" not in leader.replicator.peers
    assert leader.roster.leaving == {}
