"""Elections with an asynchronous flush: members that lost power lack what they acknowledged."""

from pathlib import Path

import pytest

from tests.harness.present import present
from tests.harness.raft_cluster import Cluster


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
