"""Timers and ballots."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dledger.raft.candidate import (
    Candidate,
    ElectionTimer,
)


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
