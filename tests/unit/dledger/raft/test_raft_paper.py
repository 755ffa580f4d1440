"""The rules of the Raft paper (extended version) that apply here, sections 5.1 to 5.6.

One test a rule. Every test names its section and has three parts: set up, step, check. Rules that a
guard stands for are proven in `test_guards`: votes and acknowledgements wait for the disk and a
commit index is believed only as far as verified (figure 2). Section 5.3 is in
`test_raft_paper_log`. Members, snapshots and clients are in `test_raft_thesis`, pre-votes and
transfers in `test_raft_pre_vote`.
"""

from __future__ import annotations

import pytest

from dledger.commitlog.entry import seal_no_op
from dledger.raft.library import Role
from dledger.raft.wire import Kind
from tests.unit.dledger.raft.paper_group import (
    StoredGroup,
    campaign,
    fill,
    frame,
    group,
    isolate,
    posted,
    receivers,
    terms,
)

# -- §5.1 terms ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.VOTE, Kind.HEARTBEAT, Kind.APPEND_REPLY, Kind.TERM_NOTICE])
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_a_member_that_sees_a_newer_term_follows_in_it(role: Role, kind: Kind) -> None:
    """§5.1: a larger term that is seen is taken; a candidate or leader reverts to follower."""
    cluster = group()
    node = cluster.node("n0")
    if role is Role.CANDIDATE:
        campaign(cluster, "n0")
    elif role is Role.LEADER:
        cluster.elect("n0")
    assert node.core.role is role

    fields = {Kind.VOTE: (9, 9, True), Kind.HEARTBEAT: (1, 0), Kind.APPEND_REPLY: (True, 9)}
    node.receive("n1", frame(kind, 7, *fields.get(kind, ())))
    node.settle()

    assert (node.core.role, node.term) == (Role.FOLLOWER, 7)


@pytest.mark.parametrize("kind", [Kind.APPEND, Kind.HEARTBEAT, Kind.VOTE])
def test_older_term_is_answered_with_the_current(kind: Kind) -> None:
    """§5.1: a request with a stale term is rejected."""
    cluster = group()
    fill(cluster, "n1", [1, 2])
    fields = {Kind.APPEND: (0, 0, 2), Kind.HEARTBEAT: (1, 2), Kind.VOTE: (9, 1, True)}[kind]
    payload = seal_no_op(1, 1, 0, 0, 99) if kind is Kind.APPEND else b""

    cluster.node("n1").receive("n0", frame(kind, 1, *fields, payload=payload))
    answers = posted(cluster, "n1", *Kind)

    assert [(a.receiver, a.frame.kind, a.frame.term) for a in answers] == [
        ("n0", Kind.TERM_NOTICE, 2)
    ]
    assert terms(cluster, "n1") == [1, 2]
    assert (cluster.node("n1").leader_id, cluster.node("n1").commit_index) == (None, 0)
    assert cluster.members["n1"].term_vote.voted_for is None


# -- §5.2 leader election ------------------------------------------------------------------


def test_leader_keeps_authority_by_heartbeats() -> None:
    """§5.2: leaders send periodic heartbeats to all followers, which then start no election."""
    cluster = group(5)
    leader = cluster.elect("n0")

    for _ in range(50):
        cluster.clock.now_s += leader.settings.heartbeat_interval_s
        leader.leader.send_heartbeats()
        beats = posted(cluster, "n0", Kind.HEARTBEAT)
        assert receivers(beats) == ["n1", "n2", "n3", "n4"]
        cluster.run()
        assert all(cluster.node(name).candidate.due_in() > 0 for name in cluster.names)

    assert leader.is_leader
    assert leader.term == 1


def test_candidate_raises_its_term_and_asks_all() -> None:
    """§5.2: to begin an election it increments its term, votes for itself and asks in parallel."""
    cluster = group(5)
    fill(cluster, "n0", [1, 1, 3])
    for name in cluster.names:
        cluster.node(name).core.observe_term(3)

    node = campaign(cluster, "n0")
    requests = posted(cluster, "n0", Kind.VOTE)

    assert (node.term, cluster.members["n0"].term_vote.voted_for) == (4, "n0")
    assert receivers(requests) == ["n1", "n2", "n3", "n4"]
    assert {(r.frame.term, *r.frame.fields[:2]) for r in requests} == {(4, 3, 3)}


@pytest.mark.parametrize(
    ("size", "votes", "wins"),
    [(1, 0, True), (3, 0, False), (3, 1, True), (5, 1, False), (5, 2, True), (5, 4, True)],
)
def test_a_candidate_with_votes_of_a_majority_leads(size: int, votes: int, wins: bool) -> None:
    """§5.2: a candidate wins with votes from a majority of the full cluster in the same term."""
    cluster = group(size)
    node = campaign(cluster, "n0")
    silent = cluster.names[1 + votes :]
    cluster.post.clear()

    cluster.cut = {(name, "n0") for name in silent}
    cluster.run()

    assert node.is_leader is wins
    assert node.term == 1


def test_member_votes_once_in_a_term() -> None:
    """§5.2: each server votes for at most one candidate in a given term."""
    cluster = group()
    voter = cluster.node("n2")

    for candidate in ("n0", "n1", "n1"):
        voter.receive(candidate, frame(Kind.VOTE, 1, 0, 0, False))
    in_one_term = receivers(posted(cluster, "n2", Kind.VOTE_REPLY))
    voter.receive("n1", frame(Kind.VOTE, 2, 0, 0, False))
    in_both = receivers(posted(cluster, "n2", Kind.VOTE_REPLY))

    assert in_one_term == ["n0"]
    assert in_both == ["n0", "n1"]


def test_a_vote_given_is_not_given_again_after_a_power_cut() -> None:
    """Figure 2: currentTerm and votedFor are on stable storage before a request is answered."""
    cluster = StoredGroup()
    cluster.node("n2").receive("n0", frame(Kind.VOTE, 1, 0, 0, False))
    assert receivers(posted(cluster, "n2", Kind.VOTE_REPLY)) == ["n0"]

    cluster.end("n2", cluster.disk("n2").power_cut(lambda: False))
    cluster.start("n2")
    cluster.reconnect("n2", "n1")
    cluster.node("n2").receive("n1", frame(Kind.VOTE, 1, 0, 0, False))

    assert cluster.node("n2").term == 1
    assert posted(cluster, "n2", Kind.VOTE_REPLY) == []


@pytest.mark.parametrize("kind", [Kind.APPEND, Kind.HEARTBEAT])
@pytest.mark.parametrize(("term", "follows"), [(0, False), (1, True), (2, True)])
def test_candidate_follows_a_leader_of_its_term(kind: Kind, term: int, follows: bool) -> None:
    """§5.2: it returns to follower if the leader's term is at least as large as its own."""
    cluster = group()
    node = campaign(cluster, "n0")
    assert node.term == 1
    fields = {Kind.APPEND: (0, 0, 0), Kind.HEARTBEAT: (1, 0)}[kind]

    node.receive("n1", frame(kind, term, *fields))
    node.settle()

    assert node.core.role is (Role.FOLLOWER if follows else Role.CANDIDATE)
    assert node.leader_id == ("n1" if follows else None)
    assert node.term == max(1, term)


# -- §5.4 safety ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("voter", "candidate", "granted"),
    [
        # the same last term
        ([1], (1, 1), True),
        ([1], (2, 1), True),
        ([1, 1], (1, 1), False),
        # a newer one of the candidate
        ([1], (1, 2), True),
        ([1], (2, 2), True),
        ([1, 1], (1, 2), True),
        # a newer one of the voter
        ([2], (1, 1), False),
        ([2], (2, 1), False),
        ([1, 2], (9, 1), False),
        ([], (0, 0), True),
    ],
)
def test_a_member_votes_only_for_logs_at_least_as_new_as_its_own(
    voter: list[int], candidate: tuple[int, int], granted: bool
) -> None:
    """§5.4.1: the later last term is newer; of the same last term, the longer log is."""
    cluster = group()
    fill(cluster, "n1", voter)

    cluster.node("n1").receive("n0", frame(Kind.VOTE, 3, *candidate, False))
    votes = posted(cluster, "n1", Kind.VOTE_REPLY)

    assert receivers(votes) == (["n0"] if granted else [])
    assert cluster.node("n1").term == 3


def test_entries_of_previous_terms_are_not_committed_by_counting() -> None:
    """§5.4.2, figure 8: only entries of the current term are; what stands before goes along."""
    cluster = group(5)
    for name, log in {"n0": [1, 2], "n1": [1, 2], "n2": [1], "n3": [1], "n4": [1, 3]}.items():
        fill(cluster, name, log)
        cluster.node(name).core.observe_term(3)
    leader = campaign(cluster, "n0")
    while not leader.is_leader:
        assert cluster.step()
    cluster.members["n0"].flush()
    assert terms(cluster, "n0")[:3] == [1, 2, 4]

    for follower in ("n1", "n2"):  # with n0 they are three of five
        leader.receive(follower, frame(Kind.APPEND_REPLY, 4, True, 2))
        leader.settle()
    of_term_2 = leader.commit_index
    for follower in ("n1", "n2"):
        leader.receive(follower, frame(Kind.APPEND_REPLY, 4, True, 3))
        leader.settle()

    assert of_term_2 == 0
    assert leader.commit_index == 3


def test_what_looked_safe_in_figure_8_may_still_be_overwritten() -> None:
    """§5.4.2, figure 8 (d): an old term's entry on a majority gives way to a newer last term."""
    cluster = group(5)
    for name, log in {"n0": [1, 2], "n1": [1, 2], "n2": [1, 2], "n3": [1], "n4": [1, 3]}.items():
        fill(cluster, name, log)
        cluster.node(name).core.observe_term(4)

    cluster.elect("n4")
    cluster.heartbeat("n4")

    assert {tuple(terms(cluster, name)[:3]) for name in cluster.names} == {(1, 3, 5)}
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1


# -- §5.5 follower and candidate crashes ---------------------------------------------------


def test_a_leader_tries_again_until_a_crashed_follower_is_back() -> None:
    """§5.5: requests to a crashed server are retried indefinitely; when it restarts they arrive."""
    cluster = StoredGroup()
    leader = cluster.elect("n0")
    cluster.end("n2", cluster.disk("n2").power_cut(lambda: True))
    for body in (b"a", b"b"):
        cluster.append("n0", body)
        cluster.run()
    cluster.pass_time("n0", 5.0)

    cluster.start("n2")
    for other in ("n0", "n1"):
        cluster.reconnect("n2", other)
    cluster.pass_time("n0", 0.5)

    assert leader.term == 1
    assert cluster.chains()["n2"] == cluster.chains()["n0"]
    assert cluster.node("n2").commit_index == leader.journal.last_index


def test_the_same_append_twice_does_no_harm() -> None:
    """§5.5: requests are idempotent; one that crashed after it wrote gets the same again."""
    cluster = StoredGroup()
    cluster.elect("n0")
    index = cluster.append("n0", b"x")
    posted(cluster, "n0", Kind.APPEND)
    (letter,) = (letter for letter in cluster.post if letter.receiver == "n1")
    cluster.deliver(letter)
    cluster.end("n1", cluster.disk("n1").power_cut(lambda: True))

    cluster.start("n1")
    cluster.reconnect("n1", "n0")
    before = cluster.chains()["n1"]
    assert len(before) == index
    for _ in range(2):
        cluster.deliver(letter)
    replies = posted(cluster, "n1", Kind.APPEND_REPLY)

    assert cluster.chains()["n1"] == before
    assert cluster.node("n1").journal.truncations == 0
    assert [tuple(reply.frame.fields) for reply in replies][-1] == (True, index)


# -- §5.6 timing ---------------------------------------------------------------------------


def test_leader_sends_many_heartbeats_per_timeout() -> None:
    """§5.6: broadcast time is far below the election timeout: several heartbeats may be lost."""
    cluster = group()
    leader = cluster.elect("n0")
    settings = leader.settings
    lost = int(settings.election_timeout_s / settings.heartbeat_interval_s) - 1
    assert lost >= 4

    cluster.cut = {("n0", "n1")}
    for _ in range(lost):
        cluster.clock.now_s += settings.heartbeat_interval_s
        cluster.heartbeat("n0")
    due = cluster.node("n1").candidate.due_in()

    assert due > 0
    assert leader.is_leader


def test_safety_does_not_depend_on_time() -> None:
    """§5.6: wrong clocks must not lead to wrong results: a leader of yesterday commits nothing."""
    cluster = group()
    old = cluster.elect("n0")
    isolate(cluster, "n0")
    cluster.clock.now_s += 1.0
    cluster.node("n1").begin_election()
    while not cluster.node("n1").is_leader:
        for name in ("n1", "n2"):
            cluster.members[name].flush()
            cluster.collect(name)
        letters, cluster.post = cluster.post, []
        for letter in letters:
            cluster.deliver(letter)
    cluster.clock.now_s -= 1.0  # its clock shows that no time has passed at all
    cluster.cut = set()

    index = cluster.append("n0", b"of yesterday")
    was_leader = old.is_leader
    cluster.run()

    assert was_leader
    assert not old.is_leader
    assert old.journal.log.term_at(index) == 2
    assert cluster.node("n1").is_leader
