"""A member in corners the plans do not reach: full disks, lost acknowledgements, late answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from dledger.commitlog.entry import seal_no_op
from dledger.commitlog.errors import DiskFullError, FlushFailedError, InvariantBroken
from dledger.raft.channel import frame_of
from dledger.raft.follower import AppendRequest, Rejected, plan_append, split_frames
from dledger.raft.peers import ContradictionError
from dledger.raft.settings import ALL_ON
from dledger.raft.wire import Kind, PeerFrame, PeerFrameDecoder
from tests.harness.present import present
from tests.harness.raft_cluster import Cluster, Member


def ack(term: int, index: int) -> PeerFrame:
    return PeerFrame(Kind.APPEND_REPLY, term, 1, 1, [True, index], memoryview(b""))


def full(*_: object, **__: object) -> None:
    raise DiskFullError("no space")


def flush_log_only(member: Member) -> None:
    """Make the log durable while term and vote are still on their way to the disk."""
    ticket = present(member.log.begin_flush())
    ticket.run()
    member.log.complete_flush(ticket)
    member.node.settle()


def reconnect(cluster: Cluster, name: str) -> None:
    """Make all connections from and to *name* again."""
    node = cluster.node(name)
    for other in cluster.names:
        if other != name:
            for channel in ("control", "data"):
                cluster.node(other).link_up(name, channel, node.contacts.hello(channel))
                node.link_up(other, channel, cluster.node(other).contacts.hello(channel))


def test_winner_without_space_steps_down(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster.members["n0"].log, "append", full)
        cluster.clock.now_s += 10.0
        cluster.node("n0").begin_election()
        cluster.run()
    assert not cluster.node("n0").is_leader
    assert cluster.node("n0").term == 2
    cluster.node("n1").begin_election()  # asks in term 2 and learns that n0 has left it behind
    cluster.run()
    leader = cluster.elect("n1")
    cluster.append("n1", b"x")
    cluster.heartbeat("n1")
    cluster.heartbeat("n1")
    assert cluster.node("n0").commit_index == leader.journal.last_index


def test_an_error_of_the_disk_stops_the_node_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError must not pass for that of a connection, which is only made again."""
    cluster = Cluster(tmp_path, 1)
    node = cluster.elect("n0")

    def broken() -> None:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(node.owner, "on_settled", broken)
        with pytest.raises(FlushFailedError, match="input/output error"):
            node.settle()
    with pytest.raises(FlushFailedError, match="input/output error"):
        node.settle()


def test_an_error_of_the_disk_under_an_append_stops_the_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.elect("n0")

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(cluster.members["n1"].log, "append", broken)
    cluster.append("n0", b"x")
    with pytest.raises(FlushFailedError, match="input/output error"):
        cluster.run()


def test_follower_answers_while_its_log_grows(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    before, entry_log = leader.journal.last_index, cluster.members["n1"].log
    entry_log.allocator.limit = entry_log.end_position
    assert entry_log.allocator.claim.take()  # as `reserve_next` does in its thread
    cluster.members["n1"].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    assert entry_log.last_index == before
    progress = leader.replicator.peers["n1"]
    assert (progress.next_index, progress.probing) == (index + 1, False)
    entry_log.allocator.claim.give_back()
    cluster.members["n1"].flushes_by_itself = True
    cluster.heartbeat("n0")
    assert cluster.clock.now_s < leader.replicator.stall_s + 10.0
    assert entry_log.last_index == index
    assert leader.replicator.peers["n1"].match_index == index


def test_a_late_lower_acknowledgement_takes_nothing_back(cluster: Cluster) -> None:
    """It would be the last one: the follower has answered for all it has."""
    leader = cluster.elect("n0")
    cluster.cut = {("n0", "n2"), ("n2", "n0")}
    cluster.members["n0"].flushes_by_itself = False
    cluster.append("n0", b"a")
    last = cluster.append("n0", b"b")
    cluster.run()
    assert leader.replicator.peers["n1"].match_index == last
    leader.receive("n1", ack(leader.term, last - 1))
    cluster.members["n0"].flush()
    assert leader.commit_index == last


def test_leader_publishes_no_commit_on_an_unflushed_copy(cluster: Cluster) -> None:
    """The followers would apply what is on one disk only."""
    leader = cluster.elect("n0")
    cluster.cut = {("n0", "n2"), ("n2", "n0")}
    cluster.members["n0"].flushes_by_itself = False
    index = cluster.append("n0", b"a")
    cluster.run()
    cluster.heartbeat("n0")
    assert leader.replicator.peers["n1"].match_index == index
    assert leader.core.known_commit_index == index - 1
    assert cluster.node("n1").commit_index == index - 1


def test_what_is_committed_is_never_cut(cluster: Cluster) -> None:
    leader = cluster.elect("n0")
    index = cluster.append("n0", b"a")
    cluster.run()
    assert leader.commit_index == index
    with pytest.raises(InvariantBroken, match="would cut what is committed"):
        leader.journal.deleteEntriesFrom(index)
    assert leader.journal.last_index == index


def test_a_leader_that_replaces_what_is_committed_is_refused(cluster: Cluster) -> None:
    cluster.elect("n0")
    for body in (b"a", b"b"):
        cluster.append("n0", body)
        cluster.run()
    journal = cluster.node("n0").journal
    frame = seal_no_op(
        index=2,
        term=9,
        position=journal.log.position_at(2),
        prev_chain=journal.log.chain_at(1),
        store_time_ms=0,
    )
    request = AppendRequest(9, 1, 1, 0, split_frames(memoryview(frame)))
    with pytest.raises(ContradictionError, match="committed here"):
        plan_append(journal, request, ALL_ON)


def test_nothing_is_applied_before_it_is_on_the_local_disk(cluster: Cluster) -> None:
    cluster.elect("n0")
    slow = cluster.members["n2"]
    slow.flushes_by_itself = False
    index = cluster.append("n0", b"a")
    cluster.run()
    cluster.heartbeat("n0")
    assert slow.node.core.known_commit_index == index
    assert slow.node.commit_index == index - 1
    slow.flush()
    assert slow.node.commit_index == index


def test_campaign_that_reaches_no_member_ends(cluster: Cluster) -> None:
    """The library would keep it for the next connection, whichever member leads by then."""
    node = cluster.node("n0")
    cluster.clock.now_s += 10.0
    node.begin_election()
    cluster.step()
    for name in ("n1", "n2"):
        cluster.collect(name)
    replies, cluster.post = cluster.post, []
    assert {letter.frame.kind for letter in replies} == {Kind.PRE_VOTE_REPLY}
    for peer in ("n1", "n2"):
        node.link_down(peer, "control")
    for letter in replies:
        cluster.deliver(letter)
    node.link_up("n1", "control", cluster.node("n1").contacts.hello("control"))
    assert (node.term, cluster.post) == (0, [])


def test_an_acknowledgement_waits_for_the_term_it_is_given_in(cluster: Cluster) -> None:
    cluster.elect("n0")
    follower = cluster.members["n2"]
    follower.flushes_by_itself = False
    leader = cluster.elect("n1")
    assert (follower.node.term, follower.term_vote.is_durable) == (2, False)
    flush_log_only(follower)
    cluster.run()
    assert leader.replicator.peers["n2"].match_index == 0
    follower.flush()
    cluster.run()
    assert leader.replicator.peers["n2"].match_index == leader.journal.last_index


# -- eligibility------------------------------------------------------------------------------


def test_refilled_member_votes_without_new_writes(cluster: Cluster) -> None:
    cluster.elect("n0")
    cluster.cut = {("n0", "n2"), ("n2", "n0")}
    cluster.append("n0", b"x")
    cluster.run()
    cluster.heartbeat("n0")
    cluster.cut = set()
    member = cluster.members["n2"]
    member.node.eligibility.doubtful = member.node.eligibility.damaged = True
    member.flushes_by_itself = False
    reconnect(cluster, "n2")
    cluster.clock.now_s += 0.1
    cluster.heartbeat("n0")
    assert member.log.last_index == cluster.node("n0").commit_index
    assert member.node.eligibility.doubtful
    member.flush()
    assert not member.node.eligibility.doubtful
    assert not member.node.eligibility.damaged


def test_leader_is_certain_after_its_own_commit(cluster: Cluster) -> None:
    for name in cluster.names:
        cluster.node(name).eligibility.doubtful = True
    for name in cluster.names:
        reconnect(cluster, name)
    cluster.elect("n0")
    cluster.heartbeat("n0")
    assert [cluster.node(name).eligibility.doubtful for name in cluster.names] == [
        False,
        False,
        False,
    ]


def test_acks_before_a_loss_count_no_more(tmp_path: Path) -> None:
    """Five voters: with the lost copy counted, two copies would pass for three."""
    cluster = Cluster(tmp_path, 5)
    leader = cluster.elect("n0")
    cluster.cut = {(a, b) for a in cluster.names for b in ("n3", "n4")}
    cluster.members["n2"].flushes_by_itself = False
    index = cluster.append("n0", b"x")
    cluster.run()
    assert leader.replicator.peers["n1"].match_index == index
    assert leader.commit_index == index - 1
    lost = cluster.members["n1"].log
    lost.truncate_from(index)
    lost.close()
    cluster.start("n1").node.eligibility.doubtful = True
    cluster.cut |= {("n0", "n1")}
    reconnect(cluster, "n1")
    cluster.members["n2"].flush()
    cluster.run()
    assert leader.replicator.peers["n2"].match_index == index
    assert leader.commit_index == index - 1
    cluster.cut -= {("n0", "n1")}
    reconnect(cluster, "n1")
    cluster.heartbeat("n0")
    assert leader.commit_index == index


def test_log_behind_its_term_record_opens_newer(tmp_path: Path) -> None:
    """A power cut may keep entries of a term whose record it took: no member leads in it twice."""
    cluster = Cluster(tmp_path, 1)
    cluster.elect("n0")
    cluster.append("n0", b"x")
    member = cluster.members["n0"]
    member.log.close()
    (tmp_path / "n0" / "vote").unlink()
    again = cluster.start("n0").node
    assert again.term == 1
    cluster.clock.now_s += 10.0
    again.begin_election()
    cluster.members["n0"].flush()
    assert (again.is_leader, again.term) == (True, 2)


@pytest.mark.parametrize("in_doubt", [["n1"], ["n1", "n2"]], ids=["one", "most"])
def test_uncertain_member_votes_only_when_most_are(cluster: Cluster, in_doubt: list[str]) -> None:
    cluster.elect("n0")
    for name in in_doubt:
        cluster.node(name).eligibility.doubtful = True
    for name in cluster.names:
        reconnect(cluster, name)
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n0" in (a, b)}
    cluster.clock.now_s += 10.0
    cluster.node("n0").settle()
    for name in ("n1", "n2", "n1"):
        cluster.clock.now_s += 10.0
        cluster.node(name).begin_election()
        cluster.run()
    leads = [name for name in ("n1", "n2") if cluster.node(name).is_leader]
    assert len(leads) == (len(in_doubt) == 2)


def most_lose_promises(cluster: Cluster) -> int:
    """Commit an entry on n0 and n1, let n1 really lose it, and n1 and n2 be not eligible."""
    cluster.elect("n0")
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n2" in (a, b)}
    index = cluster.append("n0", b"x")
    cluster.run()
    assert cluster.node("n0").commit_index == index
    lost = cluster.members["n1"].log
    lost.truncate_from(index)
    lost.close()
    cluster.start("n1").node.eligibility.doubtful = True
    cluster.members["n2"].log.close()
    cluster.start("n2").node.eligibility.doubtful = True
    return index


def let_stand(cluster: Cluster, *names: str) -> list[str]:
    """Let members stand one after the other; return the leader."""
    for name in names:
        cluster.clock.now_s += 10.0
        cluster.node(name).begin_election()
        cluster.run()
    return [name for name in names if cluster.node(name).is_leader]


def test_uncertain_members_wait_for_every_voters_hello(cluster: Cluster) -> None:
    most_lose_promises(cluster)
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n0" in (a, b)}
    for one, other in (("n1", "n2"), ("n2", "n1")):
        for channel in ("control", "data"):
            cluster.node(one).link_up(other, channel, cluster.node(other).contacts.hello(channel))
    assert let_stand(cluster, "n1", "n2", "n1") == []


def test_uncertain_members_elect_the_longest_log(cluster: Cluster) -> None:
    index = most_lose_promises(cluster)
    for name in cluster.names:
        reconnect(cluster, name)
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n0" in (a, b)}
    cluster.clock.now_s += 10.0
    cluster.node("n0").settle()
    assert let_stand(cluster, "n1", "n2", "n1") == []
    cluster.cut = set()
    assert let_stand(cluster, "n0") == ["n0"]
    assert cluster.node("n0").journal.last_index > index


def cut_off(cluster: Cluster, *names: str) -> None:
    """Let these members send and get nothing."""
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if a in names or b in names}


def test_probe_after_a_repair_has_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    """An entry is sent while its page reads wrongly, then repaired: the next probe is good."""
    cluster = Cluster(tmp_path)
    leader = cluster.elect("n0")
    cluster.run()
    cut_off(cluster, "n1")
    index = cluster.append("n0", b"x" * 100)
    cluster.run()
    cluster.append("n0", b"y" * 50)  # the newest checksum is of this one
    cluster.run()
    progress = leader.replicator.peers["n1"]
    progress.next_index, progress.match_index = index, index - 1
    progress.probing = progress.probe_out = False
    entry_log = cluster.members["n0"].log
    paths = (tmp_path / "n0").rglob("0" * 20)
    (path,) = (path for path in paths if path.parent.name == "commitlog")
    at = entry_log.position_at(index) + entry_log.size_at(index) - 5
    with path.open("r+b") as file:
        file.seek(at)
        good = file.read(5)
        file.seek(at)
        file.write(bytes(255 - byte for byte in good))
    assert leader.next_frame("n1") is not None
    with path.open("r+b") as file:
        file.seek(at)
        file.write(good)
    leader.replicator.link_reset("n1")
    probe = present(leader.next_frame("n1"))
    (frame,) = PeerFrameDecoder().feed(frame_of(probe[0], 1, 1, probe[1]))
    assert bytes(frame.payload).startswith(bytes(entry_log.frame(index)))


def test_a_damaged_member_takes_no_part_whatever_the_others_say(cluster: Cluster) -> None:
    cluster.elect("n0")
    for name in ("n1", "n2"):
        cluster.node(name).eligibility.doubtful = True
    cluster.node("n1").eligibility.damaged = True
    for name in cluster.names:
        reconnect(cluster, name)
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n0" in (a, b)}
    for name in ("n1", "n2", "n1", "n2"):
        cluster.clock.now_s += 10.0
        cluster.node(name).begin_election()
        cluster.run()
    assert not any(cluster.node(name).is_leader for name in ("n1", "n2"))
    assert cluster.node("n1").term == 1


def test_vote_of_a_new_folder_is_not_counted(cluster: Cluster) -> None:
    node = cluster.node("n0")
    cluster.cut = {(a, b) for a in cluster.names for b in cluster.names if "n2" in (a, b)}
    cluster.clock.now_s += 10.0
    node.begin_election()
    while not node.term:
        cluster.step()
    node.contacts.on_hello(
        replace(cluster.node("n1").contacts.hello("control"), incarnation="made again")
    )
    cluster.run()
    assert cluster.members["n1"].term_vote.voted_for == "n0"
    assert not node.is_leader


def test_two_different_entries_of_one_term_are_refused(cluster: Cluster) -> None:
    cluster.elect("n0")
    index = cluster.append("n0", b"a")
    cluster.run()
    journal = cluster.node("n1").journal
    frame = seal_no_op(
        index=index,
        term=1,
        position=journal.log.position_at(index),
        prev_chain=journal.log.chain_at(index - 1),
        store_time_ms=0,
    )
    request = AppendRequest(1, index - 1, 1, 0, split_frames(memoryview(frame)))
    with pytest.raises(ContradictionError, match="two different entries"):
        plan_append(journal, request, ALL_ON)


def test_a_follower_never_asks_for_what_it_has_committed(cluster: Cluster) -> None:
    cluster.elect("n0")
    for body in (b"a", b"b"):
        cluster.append("n0", body)
        cluster.run()
    cluster.heartbeat("n0")
    follower = cluster.node("n1")
    committed = follower.commit_index
    cluster.append("n0", b"not committed")
    cluster.step()
    last = follower.journal.last_index
    assert last == committed + 1
    request = AppendRequest(7, last, 7, 0, [])
    assert plan_append(follower.journal, request, ALL_ON) == Rejected(committed + 1)


def test_uncertainty_lasts_until_the_leaders_own_commit(cluster: Cluster) -> None:
    """A new leader does not know yet what else is committed of what its predecessors left."""
    cluster.elect("n0")
    cluster.append("n0", b"x")
    cluster.run()
    cluster.heartbeat("n0")
    node = cluster.node("n2")
    node.eligibility.doubtful = True
    last = node.journal.last_index
    frame = PeerFrame(Kind.APPEND, 2, 1, 1, [last, 1, last], memoryview(b""))
    node.receive("n1", frame)
    cluster.members["n2"].flush()
    assert node.term == 2
    assert node.eligibility.doubtful


@pytest.mark.parametrize("lost", [("n0", "n1"), ("n1", "n0")], ids=["append", "answer"])
def test_silent_loss_of_a_link_is_repaired(cluster: Cluster, lost: tuple[str, str]) -> None:
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    cluster.cut = {("n0", "n2"), ("n2", "n0")}  # or a commit would be news and show the gap
    cluster.cut.add(lost)
    index = cluster.append("n0", b"x")
    cluster.run()
    cluster.cut.remove(lost)
    assert leader.replicator.peers["n1"].match_index == index - 1
    for _ in range(6):
        cluster.clock.now_s += 0.2
        cluster.heartbeat("n0")
    assert leader.is_leader
    assert leader.replicator.peers["n1"].match_index == index
    assert cluster.node("n1").commit_index == index
