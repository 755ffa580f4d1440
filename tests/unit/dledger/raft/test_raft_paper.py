"""The rules of the Raft paper (extended version) that apply here, sections 5.1 to 5.6.

One test a rule. Every test names its section and has three parts: set up, step, check. Rules that a
guard stands for are proven in `test_guards`: votes and acknowledgements wait for the disk and a
commit index is believed only as far as verified (figure 2). Section 5.3 is in
`test_raft_paper_log`. Members, snapshots and clients are in `test_raft_thesis`, pre-votes and
transfers in `test_raft_pre_vote`.
"""

import pytest

from dledger.commitlog.entry import seal_no_op
from dledger.raft.library import Role
from dledger.raft.wire import Kind
from tests.harness.raft_cluster import Letter
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


# -- section 5.3 of the Raft paper: how a leader copies its log, and brings others into agreement


# -- §5.3 log replication ------------------------------------------------------------------


def test_a_leader_appends_and_sends_to_everybody_in_parallel() -> None:
    """§5.3: the leader appends the command to its log, then issues appends to all the others."""
    cluster = group(5)
    leader = cluster.elect("n0")

    index = cluster.append("n0", b"x")
    appends = posted(cluster, "n0", Kind.APPEND)

    assert leader.journal.last_index == index
    assert receivers(appends) == ["n1", "n2", "n3", "n4"]
    assert {tuple(a.frame.fields) for a in appends} == {(index - 1, 1, index - 1)}
    assert {bytes(a.frame.payload) for a in appends} == {bytes(leader.journal.log.frame(index))}


@pytest.mark.parametrize(
    ("size", "acks", "commits"),
    [(1, 0, True), (3, 0, False), (3, 1, True), (5, 1, False), (5, 2, True), (5, 4, True)],
)
def test_an_entry_is_committed_once_a_majority_has_it(size: int, acks: int, commits: bool) -> None:
    """§5.3: a log entry is committed once its leader has replicated it on a majority."""
    cluster = group(size)
    leader = cluster.elect("n0")
    before = leader.commit_index

    isolate(cluster, *cluster.names[1 + acks :])
    index = cluster.append("n0", b"x")
    cluster.run()

    assert leader.commit_index == (index if commits else before)


def test_committing_an_entry_commits_everything_before_it() -> None:
    """§5.3: this also commits all preceding entries, including those of previous leaders."""
    cluster = group()
    for name in ("n0", "n1"):
        fill(cluster, name, [1, 2, 2])
    assert cluster.node("n0").commit_index == 0

    leader = cluster.elect("n0")
    cluster.heartbeat("n0")

    assert leader.commit_index == leader.journal.last_index
    assert terms(cluster, "n2")[:4] == [1, 2, 2, 3]
    assert cluster.node("n2").commit_index == leader.commit_index


def test_followers_learn_what_is_committed_and_take_it_in_order() -> None:
    """§5.3: a follower that learns that an entry is committed applies it, in log order."""
    cluster = group()
    leader = cluster.elect("n0")
    cluster.heartbeat("n0")
    known = cluster.node("n1").commit_index

    last = [cluster.append("n0", body) for body in (b"a", b"b", b"c")][-1]
    cluster.run()
    assert leader.commit_index == last
    assert cluster.node("n1").commit_index == known
    cluster.heartbeat("n0")

    assert cluster.node("n1").commit_index == last
    assert [index for index, _ in cluster.members["n1"].committed] == list(range(1, last + 1))
    assert cluster.members["n1"].committed == cluster.members["n0"].committed


@pytest.mark.parametrize(
    ("prev", "answer"),
    [
        ((0, 0), (True, 0)),
        ((1, 1), (True, 1)),
        ((2, 2), (True, 2)),
        ((2, 1), (False, 2)),
        ((2, 3), (False, 2)),
        ((3, 3), (False, 3)),
    ],
)
def test_append_needs_the_previous_entry(prev: tuple[int, int], answer: tuple[bool, int]) -> None:
    """§5.3: without an entry of the same index and term, the follower refuses the new entries."""
    cluster = group()
    fill(cluster, "n1", [1, 2])

    cluster.node("n1").receive("n0", frame(Kind.APPEND, 4, *prev, 0))
    replies = posted(cluster, "n1", Kind.APPEND_REPLY)

    assert [tuple(reply.frame.fields) for reply in replies] == [answer]
    assert terms(cluster, "n1") == [1, 2]


FIGURE_7 = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([1, 1, 1, 4, 4, 5, 5, 6, 6], id="a"),
        pytest.param([1, 1, 1, 4], id="b"),
        pytest.param([1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6], id="c"),
        pytest.param([1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7], id="d"),
        pytest.param([1, 1, 1, 4, 4, 4, 4], id="e"),
        pytest.param([1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3], id="f"),
    ],
)
def test_a_leader_brings_any_log_into_agreement_with_its_own(log: list[int]) -> None:
    """§5.3, figure 7: it finds the last entry in common, and overwrites what follows it."""
    cluster = group()
    fill(cluster, "n0", FIGURE_7)
    fill(cluster, "n1", log)
    for name in cluster.names:
        cluster.node(name).core.observe_term(7)

    leader = cluster.elect("n0")
    cluster.heartbeat("n0")

    assert leader.term == 8
    assert terms(cluster, "n0")[:11] == [*FIGURE_7, 8]
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1
    assert cluster.node("n1").commit_index == leader.journal.last_index


def test_going_back_costs_one_round_per_term_not_per_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """§5.3, end: a follower's answer lets the leader bypass all conflicting entries of a term."""
    cluster = group()
    fill(cluster, "n0", [1, *[4] * 30])
    fill(cluster, "n1", [1, *[2] * 10, *[3] * 10])
    for name in cluster.names:
        cluster.node(name).core.observe_term(4)
    refused: list[int] = []
    deliver = cluster.deliver

    def noted(letter: Letter) -> None:
        if (letter.sender, letter.frame.kind) == ("n1", Kind.APPEND_REPLY):
            matched, index = letter.frame.fields
            refused.extend([] if matched else [index])
        deliver(letter)

    monkeypatch.setattr(cluster, "deliver", noted)
    cluster.elect("n0")

    assert refused == [22, 12, 2]  # no such entry; begin of its term 3; begin of its term 2
    assert len({tuple(chain) for chain in cluster.chains().values()}) == 1


def test_a_leader_never_cuts_or_changes_its_own_log() -> None:
    """Figure 3, Leader Append-Only: it only appends new entries, whatever the others have."""
    cluster = group()
    fill(cluster, "n0", [1, 2, 2])
    fill(cluster, "n1", [1, 1, 1, 1, 1])
    fill(cluster, "n2", [1])
    before = cluster.chains()["n0"]

    leader = cluster.elect("n0")
    cluster.append("n0", b"x")
    cluster.run()

    assert cluster.chains()["n0"][:3] == before
    assert (leader.journal.truncations, cluster.node("n1").journal.truncations) == (0, 1)
