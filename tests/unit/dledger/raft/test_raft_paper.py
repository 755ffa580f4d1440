"""The rules of the Raft paper (extended version) and thesis that apply here, one test each.

Every test names its section and has three parts: set up, step, check. Rules that a guard stands for
are proven in `test_guards`: votes and acknowledgements wait for the disk and a commit index is
believed only as far as verified (figure 2), a leader without a majority steps down (thesis §6.2).
That a new leader changes no list before it has committed something stands in `test_members`.

Left out is what this product does otherwise: clients' serial numbers against doubles (§8; message
keys are the clients' business), joint consensus (§6; changes go one at a time, thesis ch. 4) and
leases for reads (thesis §6.4.1; a read always asks a majority).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from commitlog.entry import parse_header, seal_no_op
from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.raft.identity import Hello
from dledger.raft.journal import Frame
from dledger.raft.library import Role
from dledger.raft.member import RaftNode
from dledger.raft.membership import Member as Listed
from dledger.raft.membership import Members
from dledger.raft.peers import ContradictionError, NotAMemberError
from dledger.raft.wire import Kind, PeerFrame
from dledger.testing.crash_disk import CrashDisk
from tests.harness.raft_cluster import Cluster, Letter
from tests.harness.scenario import ScenarioCluster

SEGMENT_BYTES = 1 << 16


def group(size: int = 3) -> Cluster:
    """Return a group whose disks are in memory."""
    return Cluster(Path("/memory"), size, disks=CrashDisk, segment_bytes=SEGMENT_BYTES)


def frame(kind: Kind, term: int, *fields: int, payload: bytes = b"") -> PeerFrame:
    """Return a frame as a peer would send it."""
    return PeerFrame(kind, term, 1, 1, list(fields), memoryview(payload))


def fill(cluster: Cluster, name: str, terms: Sequence[int]) -> None:
    """Give *name*, whose log is empty, one entry of each of *terms*; equal rows, equal bytes."""
    member = cluster.members[name]
    for index, term in enumerate(terms, start=1):
        data = seal_no_op(index, term, member.log.end_position, member.log.last_chain, 0)
        member.node.journal.add(Frame(memoryview(data), parse_header(data)), index, term)
    member.node.core.observe_term(max(terms, default=0))
    member.flush()


def terms(cluster: Cluster, name: str) -> list[int]:
    """Return the terms of all entries of *name*."""
    log = cluster.members[name].log
    return [log.term_at(index) for index in range(log.first_index, log.last_index + 1)]


def posted(cluster: Cluster, name: str, *kinds: Kind) -> list[Letter]:
    """Flush *name*, let it post what it has to send, and return those of *kinds*."""
    cluster.members[name].flush()
    cluster.collect(name)
    return [
        letter for letter in cluster.post if letter.sender == name and letter.frame.kind in kinds
    ]


def receivers(letters: Sequence[Letter]) -> list[str]:
    """Return to whom *letters* go, sorted."""
    return sorted(letter.receiver for letter in letters)


def isolate(cluster: Cluster, *names: str) -> None:
    """Cut *names* off from everybody."""
    for name in names:
        for other in cluster.names:
            cluster.cut |= {(name, other), (other, name)}


def campaign(cluster: Cluster, name: str) -> RaftNode:
    """Let *name* become a candidate whose requests for votes have not left yet."""
    node = cluster.node(name)
    cluster.clock.now_s += 1.0
    node.begin_election()
    node.settle()
    while node.core.role is not Role.CANDIDATE and not node.is_leader:
        assert cluster.step(), f"{name} found no member that would vote for it"
    return node


def listed(node: RaftNode) -> Members:
    """Return the list that *node* goes by."""
    members = node.roster.members
    assert members is not None
    return members


def as_listed(cluster: Cluster, name: str) -> Listed:
    """Return how *name* would stand in a list."""
    hello = cluster.node(name).contacts.hello("control")
    return Listed(name, hello.incarnation, "127.0.0.1", 1, hello.client_address)


def remove(cluster: Cluster, leader: str, name: str) -> None:
    """Let *leader* take the voter *name* off the list."""
    node = cluster.node(leader)
    voter = listed(node).voter(name)
    assert voter is not None
    node.changes.change(listed(node).without(voter))
    node.settle()


def add(cluster: Cluster, leader: str, name: str) -> None:
    """Let *leader* take *name* in as a learner."""
    node = cluster.node(leader)
    node.changes.change(listed(node).with_learner(as_listed(cluster, name)))
    node.settle()


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
def test_older_term_is_answered_with_the_current(
    kind: Kind,
) -> None:
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


def test_members_begin_as_followers() -> None:
    """§5.2: when servers start up, they begin as followers."""
    cluster = group()

    cluster.run()

    assert {node.core.role for node in map(cluster.node, cluster.names)} == {Role.FOLLOWER}
    assert {node.term for node in map(cluster.node, cluster.names)} == {0}


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


def test_follower_without_a_leader_becomes_candidate() -> None:
    """§5.2: no communication over the election timeout, and a follower begins an election."""
    cluster = group()
    cluster.elect("n0")
    follower = cluster.node("n1")

    cluster.clock.now_s += 2 * follower.settings.election_timeout_s

    assert follower.candidate.due_in() <= 0


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
    cluster = ScenarioCluster()
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


def test_split_vote_ends_in_the_next_term() -> None:
    """§5.2: candidates that split the vote time out and start a new election in another term."""
    cluster = group(4)
    first, second = (cluster.node(name) for name in ("n0", "n1"))
    cluster.clock.now_s += 1.0
    first.begin_election()
    second.begin_election()
    cluster.step()
    cluster.step()
    cluster.cut = {("n0", "n3"), ("n1", "n2")}
    cluster.run()
    cluster.cut = set()
    assert [node.core.role for node in (first, second)] == [Role.CANDIDATE] * 2
    assert [node.term for node in (first, second)] == [1, 1]

    cluster.clock.now_s += 1.0
    second.begin_election()
    cluster.run()

    assert (second.is_leader, second.term, first.leader_id) == (True, 2, "n1")


def test_election_timeouts_are_drawn_each_time() -> None:
    """§5.2: timeouts are random from a fixed interval, and restarted at each election."""
    cluster = group(5)
    timeout_s = cluster.node("n0").settings.election_timeout_s

    drawn = []
    for _ in range(20):
        for name in cluster.names:
            node = cluster.node(name)
            node.timer.restart(cluster.clock.monotonic())
            drawn.append(node.candidate.due_in())

    assert len(set(drawn)) == len(drawn)
    assert timeout_s <= min(drawn) < 1.2 * timeout_s
    assert 1.8 * timeout_s < max(drawn) < 2 * timeout_s


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


def test_going_back_costs_one_round_per_term_not_per_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_logs_that_agree_at_one_place_agree_up_to_it() -> None:
    """Figure 3, Log Matching: same index and term means identical in all preceding entries."""
    cluster = group(5)
    for leader in ("n0", "n1", "n2", "n0", "n3"):
        cluster.elect(leader)
        cluster.append(leader, leader.encode())
        cluster.run()
        # One more that only this leader has, until the next one cuts it.
        isolate(cluster, leader)
        cluster.append(leader, b"alone")
        cluster.members[leader].flush()
        cluster.collect(leader)
        cluster.cut = set()

    logs = [cluster.members[name].log for name in cluster.names]
    compared = 0
    for one, other in combinations(logs, 2):
        for index in range(1, min(one.last_index, other.last_index) + 1):
            if one.term_at(index) == other.term_at(index):
                assert one.chain_at(index) == other.chain_at(index)
                compared += 1

    assert compared > 50


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


@pytest.mark.parametrize("lagging", ["n0", "n1", "n2"])
def test_elected_member_has_all_committed_entries(lagging: str) -> None:
    """§5.4.3, Leader Completeness: a committed entry is in the logs of all later leaders."""
    cluster = group()
    first = next(name for name in cluster.names if name != lagging)
    leader = cluster.elect(first)
    isolate(cluster, lagging)
    index = cluster.append(first, b"x")
    cluster.run()
    assert leader.commit_index == index
    chain = leader.journal.log.chain_at(index)

    cluster.cut = set()
    isolate(cluster, first)
    (third,) = {*cluster.names} - {first, lagging}
    elected = []
    for name in (lagging, third):
        cluster.clock.now_s += 1.0
        cluster.node(name).begin_election()
        cluster.run()
        elected += [name] * cluster.node(name).is_leader

    assert elected == [third]
    assert cluster.members[third].log.chain_at(index) == chain


def test_no_two_members_apply_different_entries_at_one_index() -> None:
    """§5.4.3, State Machine Safety: no two members apply different entries at an index."""
    cluster = group(5)

    for leadership, leader in enumerate(["n0", "n1", "n2", "n3", "n4", "n0"]):
        cluster.elect(leader)
        cluster.append(leader, f"all {leadership}".encode())
        cluster.heartbeat(leader)
        isolate(cluster, leader)
        cluster.append(leader, f"alone {leadership}".encode())
        cluster.members[leader].flush()
        cluster.collect(leader)
        cluster.cut = set()
    cluster.elect("n2")
    cluster.heartbeat("n2")

    applied = [cluster.members[name].committed for name in cluster.names]
    longest = max(applied, key=len)
    assert len(longest) >= 14
    assert all(row == longest[: len(row)] for row in applied)
    assert sum(cluster.node(name).journal.truncations for name in cluster.names) >= 5


# -- §5.5 follower and candidate crashes ---------------------------------------------------


def test_a_leader_tries_again_until_a_crashed_follower_is_back() -> None:
    """§5.5: requests to a crashed server are retried indefinitely; when it restarts they arrive."""
    cluster = ScenarioCluster()
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
    cluster = ScenarioCluster()
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


# -- thesis ch. 4 (§6): cluster membership changes -----------------------------------------


def test_newest_list_counts_committed_or_not() -> None:
    """Thesis §4.1: each server uses the new configuration as soon as it is in its log."""
    cluster = group()
    leader = cluster.elect("n0")
    cluster.join("n3")
    cluster.members["n1"].flushes_by_itself = cluster.members["n2"].flushes_by_itself = False

    add(cluster, "n0", "n3")
    cluster.run()

    assert leader.commit_index < leader.journal.members.index
    for name in ("n0", "n1", "n2"):
        assert listed(cluster.node(name)).learner("n3") is not None


def test_removed_member_is_not_counted() -> None:
    """Thesis §4.1: the entry itself is committed by a majority of the new configuration."""
    cluster = group(4)
    leader = cluster.elect("n0")
    isolate(cluster, "n1", "n3")
    index = cluster.append("n0", b"two of four are no majority")
    cluster.run()
    uncommitted = leader.commit_index

    remove(cluster, "n0", "n3")
    cluster.run()

    assert uncommitted == index - 1
    assert listed(leader).voter_names == ("n0", "n1", "n2")
    assert leader.commit_index == leader.journal.members.index == index + 1


def test_a_change_waits_for_the_one_before_it() -> None:
    """Thesis §4.1: no change begins before the previous one is committed."""
    cluster = group(5)
    leader = cluster.elect("n0")
    remove(cluster, "n0", "n4")

    with pytest.raises(ChangePendingError, match="not committed yet"):
        remove(cluster, "n0", "n3")
    cluster.run()
    remove(cluster, "n0", "n3")

    assert listed(leader).voter_names == ("n0", "n1", "n2")


def test_only_one_voter_comes_or_goes_in_one_change() -> None:
    """Thesis §4.1: one at a time, so that any majority before and after overlap."""
    cluster = group(5)
    leader = cluster.elect("n0")
    voters = [listed(leader).voter(name) for name in ("n3", "n4")]
    after = listed(leader)
    for voter in voters:
        assert voter is not None
        after = after.without(voter)

    with pytest.raises(ChangeRefusedError, match="more than one member"):
        leader.changes.change(after)

    assert listed(leader).voter_names == ("n0", "n1", "n2", "n3", "n4")
    assert leader.journal.last_index == leader.journal.members.index


def test_cut_entry_restores_the_list_before() -> None:
    """Thesis §4.1: a server must be prepared to fall back to the previous configuration."""
    cluster = group()
    cluster.elect("n0")
    cluster.heartbeat("n0")
    before = listed(cluster.node("n0"))
    isolate(cluster, "n0")
    remove(cluster, "n0", "n2")
    cluster.members["n0"].flush()
    assert listed(cluster.node("n0")) != before

    cluster.elect("n1")
    cluster.cut = set()
    cluster.pass_time("n1", 1.0)

    assert listed(cluster.node("n0")) == before
    assert cluster.node("n0").roster.other_voters == ("n1", "n2")


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


def test_a_new_member_catches_up_before_it_is_counted() -> None:
    """Thesis §4.2.1: a new server joins as a non-voting one and is promoted when caught up."""
    cluster = group()
    leader = cluster.elect("n0")
    for number in range(10):
        cluster.append("n0", str(number).encode())
    cluster.join("n3")
    add(cluster, "n0", "n3")
    cluster.run()
    isolate(cluster, "n1", "n2")

    index = cluster.append("n0", b"x")
    cluster.run()
    counted_as_learner = leader.commit_index == index
    cluster.cut = set()
    cluster.pass_time("n0", 2.0)

    assert not counted_as_learner
    assert listed(leader).voter_names == ("n0", "n1", "n2", "n3")
    assert cluster.chains()["n3"] == cluster.chains()["n0"]


def test_a_leader_that_is_to_go_hands_its_leadership_over_first() -> None:
    """Thesis §4.2.2: a leader to be removed transfers its leadership, and the next removes it."""
    cluster = group()
    leader = cluster.elect("n0")
    with pytest.raises(ChangeRefusedError, match="transfer its leadership first"):
        remove(cluster, "n0", "n0")

    leader.transfers.begin("n1")
    leader.settle()
    cluster.run()
    remove(cluster, "n1", "n0")
    cluster.run()

    assert listed(cluster.node("n1")).voter_names == ("n1", "n2")
    assert not cluster.node("n0").roster.is_self_voter
    assert not leader.is_leader


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


def behind(cluster: ScenarioCluster) -> RaftNode:
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


def install_all(cluster: ScenarioCluster) -> None:
    """Run the group until nothing moves; what is offered is installed."""
    for _ in range(4):
        cluster.run()
        for name in list(cluster.installs):
            cluster.install(name)


def test_follower_behind_the_floor_gets_a_snapshot() -> None:
    """§7: when the next entry to send was discarded, the leader sends its snapshot instead."""
    cluster = ScenarioCluster()
    leader = behind(cluster)
    anchor = leader.journal.anchor_index

    install_all(cluster)

    follower = cluster.members["n2"]
    assert follower.node.installation.count == 1
    assert follower.log.first_index == anchor + 1
    assert follower.log.last_chain == leader.journal.log.last_chain
    assert follower.node.commit_index == leader.commit_index
    assert listed(follower.node) == listed(leader)


def test_a_snapshot_carries_the_last_index_and_term_it_replaces() -> None:
    """§7: they support the consistency check of the first append that follows the snapshot."""
    cluster = ScenarioCluster()
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
    cluster = ScenarioCluster()
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
    cluster = ScenarioCluster()
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
    cluster = ScenarioCluster()
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


def test_a_leader_begins_its_term_with_an_entry_of_its_own() -> None:
    """§8: it commits a blank no-op, and so learns what is committed, without a client's help."""
    cluster = group()
    for name in cluster.names:
        fill(cluster, name, [1, 1, 1])

    leader = campaign(cluster, "n0")
    while not leader.is_leader:
        assert cluster.step()
    known_at_first = leader.commit_index
    cluster.run()

    first = parse_header(leader.journal.log.frame(4))
    assert (first.index, first.term, first.record_count) == (leader.state.noop_index, 2, 0)
    assert known_at_first == 0
    assert leader.commit_index >= leader.state.noop_index


def test_follower_names_the_leader() -> None:
    """§8: a client that asks another member learns the most recent leader."""
    cluster = group()
    before = cluster.node("n2").transfers.leader_client_address()
    cluster.elect("n1")

    reported = [cluster.node(name).transfers.leader_client_address() for name in ("n0", "n2")]

    assert before is None
    assert reported == ["n1:10911", "n1:10911"]


def asked(node: RaftNode, deadline_s: float) -> list[NotLeaderError | None]:
    """Ask for a read on *node*; the returned list gets the answer."""
    answers: list[NotLeaderError | None] = []
    node.leader.reads.add(node.commit_index, deadline_s, answers.append)
    if node.leader.reads.needs_heartbeat:
        node.leader.send_read_heartbeats()
    return answers


def answer_reads(node: RaftNode) -> None:
    """Answer the reads of *node* that may be answered now."""
    for on_done in node.leader.reads.pop_ready(
        node.leader.confirmed_heartbeat(), node.commit_index
    ):
        on_done(None)


@pytest.mark.parametrize(
    ("size", "echoes", "answered"), [(3, 1, True), (5, 1, False), (5, 2, True)]
)
def test_read_needs_a_majority_of_later_echoes(size: int, echoes: int, answered: bool) -> None:
    """§8, thesis §6.4: before a read is answered, heartbeats are exchanged with a majority."""
    cluster = group(size)
    leader = cluster.elect("n0")
    isolate(cluster, *cluster.names[1 + echoes :])

    answers = asked(leader, cluster.clock.now_s + 1.0)
    answer_reads(leader)
    at_once = list(answers)
    cluster.run()
    answer_reads(leader)

    assert at_once == []
    assert answers == [None] * answered


def test_a_deposed_leader_answers_no_read() -> None:
    """§8, thesis §6.4: a leader must check that it was not deposed, or its answer may be stale."""
    cluster = group()
    old = cluster.elect("n0")
    isolate(cluster, "n0")
    answers = asked(old, cluster.clock.now_s + 60.0)
    cluster.run()
    new = cluster.elect("n1")
    cluster.append("n1", b"newer")
    cluster.run()

    cluster.cut = set()
    beat = frame(Kind.HEARTBEAT_REPLY, 1, 2, 0, False)  # an echo of its leadership that comes late
    for name in ("n1", "n2"):
        old.receive(name, beat)
    answer_reads(old)
    cluster.heartbeat("n1")
    answer_reads(old)

    assert answers == []
    assert new.is_leader
    assert not old.is_leader


# -- thesis §9.6 pre-vote ------------------------------------------------------------------


def test_pre_vote_changes_no_term_and_no_vote() -> None:
    """Thesis §9.6: a candidate increments its term once a majority answers that it would vote."""
    cluster = group()
    cluster.clock.now_s += 1.0

    cluster.node("n0").begin_election()
    questions = posted(cluster, "n0", *Kind)
    cluster.step()
    answers = [letter for name in ("n1", "n2") for letter in posted(cluster, name, *Kind)]

    assert {(q.frame.kind, q.frame.fields[0]) for q in questions} == {(Kind.PRE_VOTE, 1)}
    assert [tuple(a.frame.fields) for a in answers] == [(1, True), (1, True)]
    assert [cluster.node(name).term for name in cluster.names] == [0, 0, 0]
    assert {cluster.members[name].term_vote.voted_for for name in cluster.names} == {None}


@pytest.mark.parametrize(
    ("reason", "granted"),
    [("none", True), ("has a leader", False), ("leads", False), ("has a newer log", False)],
)
def test_pre_vote_is_granted_by_those_that_would_vote(reason: str, granted: bool) -> None:
    """Thesis §9.6: granted if the log is new enough and no leader was there for a timeout."""
    cluster = group()
    leader = cluster.elect("n1" if reason == "leads" else "n2")
    if reason == "has a newer log":
        isolate(cluster, "n0")
        cluster.append("n2", b"x")
        cluster.run()
        cluster.cut = set()
    last = cluster.node("n0").journal.last_index
    if reason in ("none", "has a newer log"):
        cluster.clock.now_s += leader.settings.election_timeout_s
    cluster.run()

    cluster.node("n1").receive("n0", frame(Kind.PRE_VOTE, 1, 2, last, 1))
    answers = posted(cluster, "n1", Kind.PRE_VOTE_REPLY)

    assert [tuple(answer.frame.fields) for answer in answers] == [(2, granted)]
    assert cluster.node("n1").term == 1


def test_two_that_stand_at_once_do_not_split_the_vote() -> None:
    """Each asks before the other's request has come: the first in the order of names goes on."""
    cluster = group()
    cluster.elect("n2")
    isolate(cluster, "n2")
    cluster.clock.now_s += 1.0
    for name in ("n0", "n1"):
        cluster.node(name).begin_election()
    cluster.run()
    assert cluster.node("n0").is_leader
    assert {cluster.node(name).term for name in ("n0", "n1")} == {2}


def test_of_two_that_stand_at_once_the_newer_log_goes_first() -> None:
    cluster = group()
    cluster.elect("n2")
    isolate(cluster, "n0")
    cluster.append("n2", b"x")
    cluster.run()
    cluster.cut = set()
    isolate(cluster, "n2")
    cluster.clock.now_s += 1.0
    for name in ("n0", "n1"):
        cluster.node(name).begin_election()
    cluster.run()
    assert cluster.node("n1").is_leader
    assert {cluster.node(name).term for name in ("n0", "n1")} == {2}


def test_pre_vote_grant_delays_the_granter() -> None:
    cluster = group()
    cluster.clock.now_s += 1.0
    cluster.node("n1").timer.lost_leader(cluster.clock.now_s)
    cluster.node("n0").begin_election()
    cluster.step()
    assert cluster.node("n1").candidate.due_in() == pytest.approx(
        0.2 * cluster.node("n1").settings.election_timeout_s
    )


def test_returning_member_does_not_raise_the_term() -> None:
    """Thesis §9.6: one that was partitioned does not increase its term, so disturbs no leader."""
    cluster = group()
    leader = cluster.elect("n0")
    isolate(cluster, "n2")
    for _ in range(10):
        cluster.clock.now_s += 0.4
        cluster.heartbeat("n0")
        cluster.node("n2").begin_election()
        cluster.run()

    cluster.cut = set()
    cluster.node("n2").begin_election()
    cluster.run()

    assert leader.is_leader
    assert [cluster.node(name).term for name in cluster.names] == [1, 1, 1]


# -- thesis §3.10 leadership transfer ------------------------------------------------------


def test_transfer_updates_its_target_first() -> None:
    """Thesis §3.10: it takes no requests, brings the target's log up to date, then asks it."""
    cluster = group()
    leader = cluster.elect("n0")
    cluster.members["n1"].flushes_by_itself = False
    last = cluster.append("n0", b"x")
    cluster.run()
    transfer = leader.transfers.begin("n1")
    leader.settle()
    cluster.run()
    before = (transfer.phase, leader.transfers.is_under_way)

    cluster.members["n1"].flush()
    cluster.collect("n1")
    for letter in list(cluster.post):
        cluster.deliver(letter)
    asked_now = posted(cluster, "n0", Kind.TIMEOUT_NOW)

    assert before == ("catching_up", True)
    assert [(a.receiver, a.frame.fields) for a in asked_now] == [("n1", [last])]
    assert transfer.phase == "asked"


def test_transfer_target_wins_beside_a_leader() -> None:
    """Thesis §3.10, §4.2.3: no timeout, no pre-vote; the request states that it is a transfer."""
    cluster = group()
    cluster.elect("n0")
    cluster.heartbeat("n0")
    target = cluster.node("n2")
    last = target.journal.last_index

    target.receive("n0", frame(Kind.TIMEOUT_NOW, 1, last))
    requests = posted(cluster, "n2", *Kind)
    cluster.run()

    assert {(r.frame.kind, tuple(r.frame.fields)) for r in requests} == {
        (Kind.VOTE, (last, 1, True))
    }
    assert (target.is_leader, target.term) == (True, 2)


def test_slow_transfer_is_given_up() -> None:
    """Thesis §3.10: after about an election timeout the leader takes requests again."""
    cluster = group()
    leader = cluster.elect("n0")
    isolate(cluster, "n2")
    cluster.append("n0", b"x")
    transfer = leader.transfers.begin("n2")
    leader.settle()

    cluster.pass_time("n0", leader.settings.election_timeout_s - 0.15)
    before = (transfer.phase, leader.transfers.is_under_way)
    cluster.pass_time("n0", 0.3)
    index = cluster.append("n0", b"y")
    cluster.run()

    assert before == ("catching_up", True)
    assert (transfer.phase, leader.transfers.is_under_way) == ("failed", False)
    assert leader.commit_index == index
