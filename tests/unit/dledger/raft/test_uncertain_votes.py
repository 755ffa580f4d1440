"""Elections with an asynchronous flush: members that lost power lack what they acknowledged.

Members that leave, come back or change within one leader's term: nothing old counts for them.
"""

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


def lose_power(cluster: Cluster, name: str, *, from_index: int | None = None) -> None:
    """Start *name* again without its entries from *from_index* on, uncertain and unconnected."""
    log = cluster.members[name].log
    if from_index is not None and log.last_index >= from_index:
        log.truncate_from(from_index)
    log.close()
    cluster.clock.now_s += 0.1
    cluster.start(name).node.eligibility.doubtful = True


def connect(cluster: Cluster, one: str, other: str) -> None:
    """Connect two members, both ways, as the links do."""
    for called, caller in ((one, other), (other, one)):
        for channel in ("control", "data"):
            hello = cluster._answer(called, caller, channel)
            cluster.node(caller).link_up(called, channel, hello)


def separate(cluster: Cluster, *names: str) -> None:
    """Let these members and the others exchange nothing."""
    inside = set(names)
    cluster.cut = {
        (a, b) for a in cluster.names for b in cluster.names if (a in inside) != (b in inside)
    }


def stand(cluster: Cluster, *names: str) -> list[str]:
    """Let members stand one after the other; return which of the running ones lead."""
    for name in names:
        cluster.clock.now_s += 10.0
        cluster.node(name).begin_election()
        cluster.run()
    return [name for name, member in cluster.members.items() if member.node.is_leader]


def hellos_grow_old(cluster: Cluster) -> int:
    """Commit an entry that n2 alone keeps; n1 and n3 have hellos of n2 from before it.

    n1 acknowledges the entry and loses it; then n2 acknowledges it, and n0, which counts both,
    loses power.
    """
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    separate(cluster, "n0", "n1")
    index = cluster.append("n0", b"x")
    cluster.run()
    lose_power(cluster, "n1", from_index=index)
    lose_power(cluster, "n3")
    for name in ("n1", "n3"):
        for other in ("n2", "n4"):
            connect(cluster, name, other)
    connect(cluster, "n1", "n3")
    separate(cluster, "n0", "n2")
    leader.replicator.link_reset("n2")
    cluster.run()
    assert leader.commit_index == index
    assert cluster.node("n2").journal.last_index == index
    lose_power(cluster, "n0", from_index=index)
    for other in ("n1", "n3", "n4"):
        connect(cluster, "n0", other)
    return index


def test_hello_older_than_an_entry_elects_nothing(tmp_path: Path) -> None:
    """Three of five are uncertain, and what they know of the fourth is no longer true."""
    cluster = Cluster(tmp_path, 5, sync_flush=False)
    index = hellos_grow_old(cluster)
    separate(cluster, "n2")
    assert stand(cluster, "n4", "n0", "n1", "n3", "n4") == []
    chain = cluster.members["n2"].log.chain_at(index)
    cluster.cut = set()
    for name in ("n0", "n1", "n3", "n4"):
        connect(cluster, "n2", name)
    assert stand(cluster, "n4", "n2") == ["n2"]
    cluster.heartbeat("n2")
    assert {member.log.chain_at(index) for member in cluster.members.values()} == {chain}
    assert not any(member.node.eligibility.doubtful for member in cluster.members.values())


def test_all_that_are_left_elect_what_one_of_them_kept(tmp_path: Path) -> None:
    """Every member is uncertain: together they elect, and one that is away is waited for."""
    cluster = Cluster(tmp_path, sync_flush=False)
    cluster.elect("n0")
    index = cluster.append("n0", b"x")
    cluster.run()
    cluster.heartbeat("n0")
    for name in cluster.names:
        lose_power(cluster, name, from_index=None if name == "n2" else index)
    for one, other in (("n0", "n1"), ("n0", "n2"), ("n1", "n2")):
        connect(cluster, one, other)
    separate(cluster, "n2")
    assert stand(cluster, "n0", "n1", "n2") == []
    assert {cluster.node(name).term for name in cluster.names} == {1}
    cluster.cut = set()
    assert stand(cluster, "n0", "n1", "n2") == ["n2"]
    assert cluster.node("n2").commit_index > index


@pytest.mark.parametrize("sync_flush", [True, False], ids=["sync", "async"])
def test_broken_link_voids_acks_of_async_flushes(tmp_path: Path, sync_flush: bool) -> None:
    """n1 acknowledges and its connection breaks: is what it had on a disk? A flap asks again."""
    cluster = Cluster(tmp_path, 5, sync_flush=sync_flush)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    separate(cluster, "n0", "n1")
    index = cluster.append("n0", b"x")
    cluster.run()
    separate(cluster, "n0", "n2")
    for channel in ("control", "data"):
        leader.link_down("n1", channel)
    leader.replicator.link_reset("n2")
    cluster.run()
    assert leader.replicator.peers["n2"].match_index == index
    assert leader.commit_index == (index if sync_flush else index - 1)
    cluster.cut = set()
    connect(cluster, "n0", "n1")
    cluster.run()
    assert leader.commit_index == index


def test_list_of_members_is_flushed_before_it_counts(tmp_path: Path) -> None:
    """With async flushes all else is acknowledged at once, and what follows a list waits for it."""
    cluster = Cluster(tmp_path, sync_flush=False)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    for member in cluster.members.values():
        member.flushes_by_itself = False
    before = cluster.append("n0", b"x")
    cluster.run()
    assert leader.commit_index == before
    assert leader.roster.members is not None
    gone = present(leader.roster.members.voter("n2"))
    index = leader.changes.change(leader.roster.members.without(gone))
    after = cluster.append("n0", b"y")
    cluster.run()
    assert cluster.node("n1").journal.last_index == after
    assert leader.commit_index == index - 1
    cluster.members["n0"].flush()
    cluster.run()
    assert leader.commit_index == index - 1
    cluster.members["n1"].flush()
    cluster.run()
    assert leader.commit_index == after
    assert cluster.node("n1").journal.stable_index == after


def test_cut_list_of_members_delays_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, sync_flush=False)
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    cluster.members["n0"].flushes_by_itself = False
    assert leader.roster.members is not None
    gone = present(leader.roster.members.voter("n2"))
    journal = leader.journal
    index = leader.changes.change(leader.roster.members.without(gone))
    assert journal.waits_for_list
    assert journal.stable_index == index - 1
    journal.deleteEntriesFrom(index - journal.anchor_index)
    assert not journal.waits_for_list
    assert journal.stable_index == journal.last_index == index - 1


def test_frames_of_an_earlier_start_are_refused(tmp_path: Path) -> None:
    """What a process acknowledged may be lost when it starts again; without async it is not."""
    for sync_flush in (True, False):
        cluster = Cluster(tmp_path / str(sync_flush), sync_flush=sync_flush)
        contacts = cluster.node("n0").contacts
        earlier = cluster.node("n1").contacts.hello("data")
        assert contacts.is_newest(earlier)
        lose_power(cluster, "n1")
        connect(cluster, "n0", "n1")
        assert contacts.is_newest(earlier) == sync_flush
        assert contacts.is_newest(cluster.node("n1").contacts.hello("data"))
        cluster.close()


def removed_and_lost(cluster: Cluster) -> int:
    """Remove n2, and let n1 lose power; n0, which leads, gives up meanwhile."""
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    assert leader.roster.members is not None
    gone = present(leader.roster.members.voter("n2"))
    return leader.changes.change(leader.roster.members.without(gone))


def test_removal_that_counted_is_not_lost(tmp_path: Path) -> None:
    """n0 and n1 lose power after the removal of n2: they elect without n2."""
    cluster = Cluster(tmp_path, sync_flush=False)
    index = removed_and_lost(cluster)
    cluster.run()
    cluster.heartbeat("n0")
    for name in ("n0", "n1"):
        assert cluster.members[name].log.durable_index >= index
        lose_power(cluster, name, from_index=cluster.members[name].log.durable_index + 1)
    cluster.stop("n2")
    connect(cluster, "n0", "n1")
    assert stand(cluster, "n0", "n1") != []


def test_removal_that_was_lost_is_waited_for(tmp_path: Path) -> None:
    """n1 loses the removal of n2 before it counts: no half elects, and nothing is lost.

    n0 has it and needs n1; n1 is uncertain alone, and so it would be with n2.
    """
    cluster = Cluster(tmp_path, sync_flush=False)
    index = removed_and_lost(cluster)
    cluster.members["n1"].flushes_by_itself = False
    cluster.run()
    assert cluster.node("n0").commit_index == index - 1
    lose_power(cluster, "n1", from_index=index)
    cluster.clock.now_s += 5.0
    cluster.node("n0").settle()
    assert not cluster.node("n0").is_leader
    for one, other in (("n0", "n1"), ("n1", "n2"), ("n0", "n2")):
        connect(cluster, one, other)
    assert stand(cluster, "n0", "n1", "n2", "n0", "n1", "n2") == []


def test_pre_vote_of_a_refilled_member_is_certain(tmp_path: Path) -> None:
    """n1 and n2 lost power and were refilled; their hellos to each other are older than that."""
    cluster = Cluster(tmp_path, sync_flush=False)
    cluster.elect("n0")
    index = cluster.append("n0", b"x")
    cluster.run()
    for name in ("n1", "n2"):
        lose_power(cluster, name, from_index=index)
    for one, other in (("n0", "n1"), ("n0", "n2"), ("n1", "n2")):
        connect(cluster, one, other)
    assert stand(cluster, "n0", "n0") == ["n0"]
    cluster.heartbeat("n0")
    assert not any(member.node.eligibility.doubtful for member in cluster.members.values())
    assert cluster.node("n1").roster.hellos["n2"].is_uncertain
    lose_power(cluster, "n0")
    for other in ("n1", "n2"):
        connect(cluster, "n0", other)
    assert stand(cluster, "n1") == ["n1"]


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
