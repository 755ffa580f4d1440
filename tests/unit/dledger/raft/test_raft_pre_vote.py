"""The rules of the Raft thesis for elections that are asked for first, and for transfers.

One test a rule, each with its section: pre-vote (§9.6), transfer of leadership (§3.10).
"""

from __future__ import annotations

import pytest

from dledger.raft.wire import CERTAIN, Kind
from tests.unit.dledger.raft.paper_group import (
    frame,
    group,
    isolate,
    posted,
)

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
