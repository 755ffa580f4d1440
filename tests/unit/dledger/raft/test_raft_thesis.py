"""The rules of the Raft thesis that apply here: members, snapshots, clients.

One test a rule, each with its section of the thesis, or of the paper. In `test_guards`: a leader
without a majority steps down (thesis §6.2). In `test_members`: a new leader changes no list before
it has committed something.

Left out is what this product does otherwise: clients' serial numbers against doubles (§8; message
keys are the clients' business), joint consensus (§6; changes go one at a time, thesis ch. 4) and
leases for reads (thesis §6.4.1; a read always asks a majority).
"""

from dataclasses import replace

import pytest

from dledger.raft.identity import Hello
from dledger.raft.member import RaftNode
from dledger.raft.peers import ContradictionError, NotAMemberError
from dledger.raft.wire import Kind
from tests.harness.raft_cluster import Cluster
from tests.unit.dledger.raft.paper_group import (
    StoredGroup,
    frame,
    group,
    isolate,
    listed,
    posted,
    receivers,
    remove,
)

# -- thesis ch. 4 (§6): cluster membership changes -----------------------------------------


def vouched(cluster: Cluster, by: str, name: str) -> Hello:
    """Return the answer of *by* in which a newer list holds *name* besides its own."""
    hello = cluster.node(by).contacts.hello("data", to_member=True)
    key = cluster.node(name).contacts.hello("data").key
    return replace(hello, members=(*hello.members, key), members_index=hello.members_index + 1)


def test_member_refuses_unvouched_callers() -> None:
    """Thesis §4.1 lets anybody lead; a stranger on the network must not."""
    cluster = group()
    cluster.elect("n0")
    cluster.heartbeat("n0")
    remove(cluster, "n0", "n2")
    cluster.run()
    cluster.heartbeat("n0")
    follower = cluster.node("n1")
    last = follower.journal.last_index

    of_members: list[tuple[Kind, tuple[int, ...]]] = [
        (Kind.APPEND, (last, 1, last)),
        (Kind.HEARTBEAT, (1, 0)),
        (Kind.VOTE, (9, 1, True)),
        (Kind.PRE_VOTE, (2, 9, 1)),
        (Kind.SNAPSHOT, (last + 9, 0, 10)),
        (Kind.TIMEOUT_NOW, (last,)),
        (Kind.FETCH, (1, last)),
    ]
    for kind, fields in of_members:
        with pytest.raises(NotAMemberError, match="n2 sends"):
            follower.receive("n2", frame(kind, 2, *fields))
    follower.receive("n2", frame(Kind.TERM_NOTICE, 2))
    follower.receive("n2", frame(Kind.PRE_VOTE_REPLY, 2, 2, False))

    assert (follower.leader_id, follower.term) == ("n0", 1)


def test_what_is_vouched_for_in_an_older_list_counts_for_nothing() -> None:
    cluster = group()
    cluster.elect("n0")
    cluster.heartbeat("n0")
    old = cluster.node("n0").contacts.hello("data", to_member=True)
    remove(cluster, "n0", "n2")
    cluster.run()
    cluster.heartbeat("n0")
    cluster.node("n1").link_up("n0", "data", old)

    with pytest.raises(NotAMemberError):
        cluster.node("n1").receive("n2", frame(Kind.VOTE, 2, 9, 1, True))


def test_member_follows_a_leader_not_on_its_list() -> None:
    """Thesis §4.1: appends are accepted from a leader outside the server's latest configuration.

    Another member must answer for it.
    """
    cluster = group()
    cluster.elect("n0")
    cluster.heartbeat("n0")
    remove(cluster, "n0", "n2")
    cluster.run()
    follower = cluster.node("n1")
    assert listed(follower).voter("n2") is None
    last = follower.journal.last_index
    follower.link_up("n0", "data", vouched(cluster, "n0", "n2"))

    follower.receive("n2", frame(Kind.APPEND, 2, last, 1, last))
    replies = posted(cluster, "n1", Kind.APPEND_REPLY)

    assert (follower.leader_id, follower.term) == ("n2", 2)
    assert [tuple(reply.frame.fields) for reply in replies] == [(True, last)]


def test_a_member_votes_for_a_candidate_that_is_not_on_its_list() -> None:
    """Thesis §4.1: votes are granted to a candidate outside the server's latest configuration."""
    cluster = group()
    cluster.elect("n0")
    remove(cluster, "n0", "n2")
    cluster.run()
    voter = cluster.node("n1")
    voter.link_up("n0", "data", vouched(cluster, "n0", "n2"))
    cluster.clock.now_s += 1.0

    voter.receive("n2", frame(Kind.VOTE, 2, 9, 1, False))

    assert receivers(posted(cluster, "n1", Kind.VOTE_REPLY)) == ["n2"]


@pytest.mark.parametrize("knows", [True, False], ids=["knows", "does not know"])
def test_a_removed_member_does_not_disturb_the_others(knows: bool) -> None:
    """Thesis §4.2.3: servers that were removed stand for election and must not depose anybody."""
    cluster = group(4)
    leader = cluster.elect("n0")
    if not knows:
        cluster.cut = {(name, "n3") for name in cluster.names}
    remove(cluster, "n0", "n3")
    cluster.run()
    cluster.cut = set()

    for _ in range(5):
        cluster.clock.now_s += 0.3
        cluster.heartbeat("n0")
        cluster.node("n3").begin_election()
        cluster.run()

    assert leader.is_leader
    assert [cluster.node(name).term for name in cluster.names] == [1, 1, 1, 1]


def test_member_with_a_leader_ignores_vote_requests() -> None:
    """Thesis §4.2.3: within the minimum election timeout neither term nor vote is changed."""
    cluster = group()
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    vote = frame(Kind.VOTE, 5, 9, 4, False)

    for name in ("n0", "n1"):
        cluster.node(name).receive("n2", vote)
    hearing = [cluster.node(name).term for name in cluster.names]
    cluster.clock.now_s += leader.settings.election_timeout_s
    cluster.node("n1").receive("n2", vote)

    assert hearing == [1, 1, 1]
    assert cluster.node("n1").term == 5
    assert receivers(posted(cluster, "n1", Kind.VOTE_REPLY)) == ["n2"]


# -- §7 log compaction ---------------------------------------------------------------------


def behind(cluster: StoredGroup) -> RaftNode:
    """Let n2 miss more than n0, which leads, still has; return the leader."""
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    isolate(cluster, "n2")
    for number in range(6):
        cluster.append("n0", bytes(1500) + str(number).encode())
    cluster.run()
    cluster.heartbeat("n0")
    cluster.retain("n0", leader.commit_index)
    assert leader.journal.anchor_index > cluster.members["n2"].log.last_index
    cluster.cut = set()
    cluster.reconnect("n0", "n2")
    return leader


def install_all(cluster: StoredGroup) -> None:
    """Run the group until nothing moves; what is offered is installed."""
    for _ in range(4):
        cluster.run()
        for name in list(cluster.installs):
            cluster.install(name)


def test_a_snapshot_carries_the_last_index_and_term_it_replaces() -> None:
    """§7: they support the consistency check of the first append that follows the snapshot."""
    cluster = StoredGroup()
    leader = behind(cluster)
    anchor = leader.journal.anchor_index
    install_all(cluster)
    follower = cluster.node("n2")

    follower.receive("n0", frame(Kind.APPEND, 1, anchor, 1, anchor))
    replies = posted(cluster, "n2", Kind.APPEND_REPLY)
    with pytest.raises(ContradictionError, match=f"committed index {anchor}"):
        follower.receive("n0", frame(Kind.APPEND, 1, anchor, 0, anchor))

    assert follower.journal.term_at(anchor) == leader.journal.term_at(anchor) == 1
    assert [tuple(r.frame.fields) for r in replies] == [(True, leader.journal.last_index)]


def test_a_snapshot_of_what_a_member_has_already_cuts_nothing() -> None:
    """§7: a snapshot that describes a prefix of the log leaves what follows it in place."""
    cluster = StoredGroup()
    leader = cluster.elect("n0")
    for body in (b"a", b"b", b"c"):
        cluster.append("n0", body)
    cluster.run()
    cluster.heartbeat("n0")
    before = cluster.chains()["n1"]

    cluster.node("n1").receive("n0", frame(Kind.SNAPSHOT, 1, 3, 0, 4, payload=b"late"))
    replies = posted(cluster, "n1", Kind.SNAPSHOT_REPLY)

    assert cluster.chains()["n1"] == before
    assert cluster.installs == {}
    assert [tuple(r.frame.fields) for r in replies] == [(3, 4, leader.journal.last_index + 1)]


def test_snapshot_is_compared_before_a_cut() -> None:
    """§7: only the entry itself, not its index, shows that a log has what a snapshot describes."""
    cluster = StoredGroup()
    leader = cluster.elect("n0")
    for body in (b"a", b"b", b"c"):
        cluster.append("n0", body)
    cluster.run()
    node, before = cluster.node("n1"), cluster.chains()["n1"]
    index = node.journal.commit_index + 1
    assert index <= node.journal.last_index

    node.receive("n0", frame(Kind.SNAPSHOT, 1, index, 0, 4, payload=b"late"))
    assert cluster.installs == {"n1": ("n0", b"late")}
    node.declined("n0", index, index + 1)
    replies = posted(cluster, "n1", Kind.SNAPSHOT_REPLY)

    assert cluster.chains()["n1"] == before
    assert [tuple(r.frame.fields) for r in replies] == [(index, 0, index + 1)]
    cluster.heartbeat("n0")
    assert node.commit_index == leader.commit_index == leader.journal.last_index


def test_pieces_of_a_snapshot_count_only_in_their_order() -> None:
    """§7, figure 13: data is written at its offset, and the member waits until all is there."""
    cluster = StoredGroup()
    node = cluster.node("n1")
    node.receive("n0", frame(Kind.HEARTBEAT, 1, 1, 0))

    answers = []
    for offset, piece in [(4, b"shot"), (0, b"snap"), (0, b"snap"), (4, b"shot")]:
        node.receive("n0", frame(Kind.SNAPSHOT, 1, 9, offset, 8, payload=piece))
        cluster.post.clear()
        answers += [tuple(r.frame.fields) for r in posted(cluster, "n1", Kind.SNAPSHOT_REPLY)]

    assert answers == [(9, 0, 0), (9, 4, 0), (9, 4, 0)]
    assert cluster.installs == {"n1": ("n0", b"snapshot")}


# -- §8 client interaction, thesis ch. 6 ---------------------------------------------------
