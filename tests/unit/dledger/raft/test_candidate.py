"""Timers and ballots."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.raft.candidate import Candidate, ElectionTimer
from dledger.raft.wire import CERTAIN, Kind
from tests.unit.dledger.raft.paper_group import frame, group, isolate, posted


@given(st.integers(0, 2**32))
def test_a_member_waits_one_to_two_timeouts_for_its_leader(seed: int) -> None:
    timer = ElectionTimer(0.8, random.Random(seed))
    timer.heard_leader(10.0)
    assert 10.8 <= timer.deadline_s <= 11.6
    assert timer.hears_leader(10.79)
    assert not timer.hears_leader(10.81)


@given(st.integers(0, 2**32))
def test_a_broken_connection_to_the_leader_is_not_waited_out(seed: int) -> None:
    timer = ElectionTimer(0.8, random.Random(seed))
    timer.heard_leader(10.0)
    timer.lost_leader(10.1)
    assert 10.1 < timer.deadline_s <= 10.1 + 0.16
    assert not timer.hears_leader(10.1)


@given(st.integers(0, 2**32))
def test_candidate_tries_twice_before_it_waits(seed: int) -> None:
    timer = ElectionTimer(1.0, random.Random(seed))
    timer.heard_leader(10.0)
    timer.lost_leader(10.1)
    timer.begin_election(10.2)
    assert 10.45 <= timer.deadline_s <= 10.95
    timer.begin_election(11.0)
    assert 12.0 <= timer.deadline_s <= 13.0


@given(st.integers(0, 2**32))
def test_a_leader_that_speaks_ends_the_hurry(seed: int) -> None:
    timer = ElectionTimer(1.0, random.Random(seed))
    timer.lost_leader(10.1)
    timer.heard_leader(10.2)
    assert 11.2 <= timer.deadline_s <= 12.2
    timer.begin_election(12.3)
    assert 13.3 <= timer.deadline_s <= 14.3


def test_giving_way_puts_off_and_never_brings_forward() -> None:
    timer = ElectionTimer(1.0, random.Random(1))
    timer.lost_leader(10.0)
    timer.give_way(10.05)
    assert timer.deadline_s == 10.25
    timer.heard_leader(11.0)
    late = timer.deadline_s
    timer.give_way(11.1)
    assert timer.deadline_s == late


def test_candidate_that_asked_just_now_stands_briefly() -> None:
    timer = ElectionTimer(1.0, random.Random(1))
    assert not timer.is_candidate(10.0)
    timer.begin_election(10.0)
    assert timer.is_candidate(10.19)
    assert not timer.is_candidate(10.21)


def test_only_the_election_of_a_transfer_passes_by_a_leader() -> None:
    """A later one waits for members that hear from a leader, as any other does."""
    sent: list[tuple[int, bool]] = []
    core = SimpleNamespace(
        term=4, is_leader=False, leader_id="n0", campaign=lambda: None, observe_term=None
    )
    state: Any = SimpleNamespace(
        core=core,
        settings=SimpleNamespace(self_id="n1", group="g", sync_flush=True),
        journal=SimpleNamespace(
            last_index=9,
            last_term=4,
            log=SimpleNamespace(allocator=SimpleNamespace(has_reserve=True)),
        ),
        roster=SimpleNamespace(is_self_voter=True),
        owner=SimpleNamespace(may_lead=lambda: True),
    )
    eligibility: Any = SimpleNamespace(doubtful=False, may_vote=lambda term, index: True)
    acks: Any = SimpleNamespace(
        defer_vote=lambda peer, kind, term, fields: sent.append((term, fields[2]))
    )
    installation: Any = SimpleNamespace(under_way=False)
    unused: Any = None
    candidate = Candidate(state, unused, eligibility, acks, installation)
    assert candidate.on_timeout_now("n0", 9)
    for term in (5, 6, 7):
        message = {"type": "request_vote", "term": term, "last_log_index": 9, "last_log_term": 4}
        candidate.on_library_message("n2", message)
    assert sent == [(5, True), (6, False), (7, False)]


# -- the rules of the Raft thesis for elections that are asked for first, and for transfers


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
    assert [tuple(a.frame.fields) for a in answers] == [(1, CERTAIN), (1, CERTAIN)]
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

    assert [tuple(answer.frame.fields) for answer in answers] == [(2, CERTAIN if granted else 0)]
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
