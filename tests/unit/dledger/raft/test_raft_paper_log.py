"""Section 5.3 of the Raft paper: how a leader copies its log, and brings others into agreement."""

from __future__ import annotations

import pytest

from dledger.raft.wire import Kind
from tests.harness.raft_cluster import Letter
from tests.unit.dledger.raft.paper_group import (
    fill,
    frame,
    group,
    isolate,
    posted,
    receivers,
    terms,
)

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
