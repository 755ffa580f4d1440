"""Timers and ballots.

A date that most voters do not share neither leads nor stamps.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dledger.raft.candidate import (
    LEFT_TO_OTHERS,
    Ballot,
    Candidate,
    ElectionTimer,
    is_up_to_date,
    majority,
)
from dledger.raft.clocks import AGREED_S, DATE_VALID_S, NO_CAMPAIGN_S, SKEW_MAX_MS, Clocks
from dledger.raft.wire import Kind
from dledger.testing.doubles import ManualClock
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch
from tests.unit.dledger.raft.paper_group import group, posted


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
    candidate = Candidate(state, unused, unused, eligibility, acks, installation)
    assert candidate.on_timeout_now("n0", 9)
    for term in (5, 6, 7):
        message = {"type": "request_vote", "term": term, "last_log_index": 9, "last_log_term": 4}
        candidate.on_library_message("n2", message)
    assert sent == [(5, True), (6, False), (7, False)]


def test_a_voter_counts_once_and_in_its_own_term_only() -> None:
    ballot = Ballot(5)
    assert ballot.grant(5, "b")
    assert not ballot.grant(5, "b")
    assert not ballot.grant(4, "c")
    assert ballot.votes == {"b"}


def test_the_newer_last_term_wins_before_the_longer_log() -> None:
    assert is_up_to_date(3, 1, 2, 100)
    assert not is_up_to_date(2, 99, 2, 100)
    assert is_up_to_date(2, 100, 2, 100)


def test_majorities() -> None:
    assert [majority(voters) for voters in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]


pytestmark = pytest.mark.usefixtures("autojump_clock")

YEAR_MS = 365 * 86_400_000


def clocks(voters: int) -> tuple[Clocks, ManualClock]:
    names = tuple(f"n{number}" for number in range(1, voters))
    roster: Any = SimpleNamespace(other_voters=names, voters=voters)
    clock = ManualClock()
    return Clocks(clock, roster), clock


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        ([0, 0], 0),
        ([-2 * YEAR_MS, -2 * YEAR_MS + 5], -2 * YEAR_MS + 5),
        ([2 * YEAR_MS, 0], 0),
        ([2 * YEAR_MS, -2 * YEAR_MS], 0),
        ([YEAR_MS, 2 * YEAR_MS], YEAR_MS),
        ([2 * YEAR_MS], 0),
        ([0, 0, YEAR_MS], 0),
        ([YEAR_MS, YEAR_MS, YEAR_MS], YEAR_MS),
    ],
)
def test_the_middle_date_decides(ahead: list[int], expected: int) -> None:
    found, clock = clocks(1 + len(ahead))
    for number, each in enumerate(ahead, 1):
        found.record(f"n{number}", clock.wall_ms() + each)
    assert found.ahead_ms() == expected
    assert found.are_off() == (abs(expected) > SKEW_MAX_MS)
    stamped = found.date_ms() - clock.wall_ms()
    assert stamped == (expected if abs(expected) > SKEW_MAX_MS else 0)


@pytest.mark.parametrize("years", [2, -2])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("others", [1, 3])
def test_of_dates_that_contradict_each_other_the_log_decides(
    years: int, is_own: bool, others: int
) -> None:
    """Two of two, of three while one is away, of four or five: the halves have two dates."""
    found, clock = clocks(others + 1)
    wrong_ms = clock.wall_ms() + years * YEAR_MS
    right_ms = clock.wall_ms()
    found.newest_ms = lambda: right_ms - 1000
    if is_own:
        clock.skew_ms = years * YEAR_MS
    for number in range(1, others + 1):
        agrees = 2 * number <= others
        there_ms = wrong_ms if agrees is is_own else right_ms
        found.record(f"n{number}", there_ms)
    assert abs(found.date_ms() - right_ms) < SKEW_MAX_MS
    assert found.are_off() is is_own


def test_an_unheard_jump_is_measured_by_what_was_agreed() -> None:
    found, clock = clocks(3)
    found.record("n1", clock.wall_ms())
    right_ms = found.date_ms()
    clock.now_s += DATE_VALID_S + 1
    clock.skew_ms = 2 * YEAR_MS
    assert not found.are_known
    assert found.date_ms() == right_ms + int(1000 * (DATE_VALID_S + 1))
    clock.now_s += AGREED_S
    assert found.date_ms() == clock.wall_ms()
    clock.now_s -= AGREED_S
    found.begin_term()
    assert found.date_ms() == clock.wall_ms()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_corrected_date_and_a_wrong_one_are_no_majority(is_own: bool) -> None:
    """One date is wrong at a time. The leader does not know yet that n1 has corrected its own."""
    found, clock = clocks(3)
    right_ms, wrong_ms = clock.wall_ms(), clock.wall_ms() + 2 * YEAR_MS
    found.record("n2", right_ms)
    found.record("n1", wrong_ms)
    if is_own:
        clock.skew_ms = 2 * YEAR_MS
    else:
        found.record("n2", wrong_ms)
    assert abs(found.date_ms() - right_ms) < SKEW_MAX_MS
    assert found.are_off() is is_own
    found.record("n1", right_ms)
    assert abs(found.date_ms() - right_ms) < SKEW_MAX_MS
    assert found.are_off() is is_own


def test_a_date_that_most_voters_keep_replaces_the_agreed_one() -> None:
    found, clock = clocks(3)
    for name in ("n1", "n2"):
        found.record(name, clock.wall_ms())
    clock.now_s += 1.0
    began_s = clock.now_s
    while clock.now_s < began_s + DATE_VALID_S:
        for name in ("n1", "n2"):
            found.record(name, clock.wall_ms() + YEAR_MS)
        assert (found.date_ms(), found.ahead_ms()) == (clock.wall_ms(), 0)
        clock.now_s += 1.0
    found.record("n1", clock.wall_ms() + YEAR_MS)
    assert (found.date_ms(), found.are_off()) == (clock.wall_ms() + YEAR_MS, True)


def test_contradiction_that_ends_does_not_count_later() -> None:
    """The leader's date is wrong; that of n1, which corrected its own, was known for a moment."""
    found, clock = clocks(3)
    for name in ("n1", "n2"):
        found.record(name, clock.wall_ms())
    began_ms, began_s = clock.wall_ms(), clock.now_s
    found.record("n1", began_ms - 2 * YEAR_MS)
    clock.skew_ms = -2 * YEAR_MS
    while clock.now_s < began_s + 4 * DATE_VALID_S:
        clock.now_s += 1.0
        right_ms = began_ms + int(1000 * (clock.now_s - began_s))
        found.record("n2", right_ms)
        assert abs(found.date_ms() - right_ms) < SKEW_MAX_MS
        assert found.are_off()


def test_clocks_expire_and_need_a_majority() -> None:
    found, clock = clocks(5)
    assert not found.are_known
    found.record("n1", clock.wall_ms() + YEAR_MS)
    assert (found.are_known, found.ahead_ms()) == (False, 0)
    found.record("n2", clock.wall_ms() + YEAR_MS)
    assert (found.are_known, found.ahead_ms()) == (True, YEAR_MS)
    clock.now_s += DATE_VALID_S + 1
    assert (found.are_known, found.ahead_ms()) == (False, 0)
    assert clocks(1)[0].are_known


def test_an_index_of_a_version_without_dates_is_no_date() -> None:
    found, _ = clocks(3)
    found.record("n1", 123_456)
    found.record("n2", 0)
    assert (found.are_known, found.ahead_ms()) == (True, 0)


def test_one_whose_date_was_wrong_stands_aside_for_a_while() -> None:
    found, clock = clocks(3)
    for name in ("n1", "n2"):
        found.record(name, clock.wall_ms() - YEAR_MS)
    assert found.may_campaign()
    assert found.are_off()
    assert not found.may_campaign()
    clock.now_s += NO_CAMPAIGN_S
    assert found.may_campaign()


def test_a_store_time_that_is_ahead_goes_on_at_half_speed() -> None:
    found, clock = clocks(1)
    began_ms, log = clock.wall_ms(), [clock.wall_ms() + 40_000]
    found.newest_ms = lambda: log[0]
    assert found.store_time_ms() == log[0]
    clock.now_s += 10
    assert found.store_time_ms() == began_ms + 45_000
    log[0] = found.store_time_ms()
    clock.now_s += 10
    assert found.store_time_ms() == began_ms + 50_000
    clock.now_s += 60
    assert found.store_time_ms() == clock.wall_ms() == began_ms + 80_000


def test_a_store_time_that_is_ahead_never_goes_back() -> None:
    found, clock = clocks(1)
    log = [clock.wall_ms() + YEAR_MS]
    found.newest_ms = lambda: log[0]
    for second in range(100):
        stamped_ms = found.store_time_ms()
        assert stamped_ms >= log[0]
        log[0] = stamped_ms + (1_000 if second % 7 == 0 else 0)
        clock.now_s += 1
        if second % 20 == 0:
            found.begin_term()
            assert found.store_time_ms() == log[0]


@pytest.mark.parametrize("skew_ms", [2 * YEAR_MS, -2 * YEAR_MS])
async def test_leader_two_years_off_hands_over(tmp_path: Path, skew_ms: int) -> None:
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        await first.group.submit(batch(b"before"))
        first.clock.skew_ms = skew_ms
        await first.group.submit(batch(b"with the wrong date"))
        second = await groups.leader(among=groups.others(first.name))
        await second.group.submit(batch(b"after"))
        await groups.settle()
        for replica in groups.replicas.values():
            state = replica.group.state
            assert abs(state.last_store_time_ms - second.clock.wall_ms()) < SKEW_MAX_MS
        assert not first.group.node.clocks.may_campaign()
        assert second.group.status()["store_time_ahead_ms"] <= 0
        # Back again, it may lead.
        first.clock.skew_ms = 0
        await trio.sleep(NO_CAMPAIGN_S + 1)
        assert first.group.node.clocks.may_campaign()


def test_one_whose_date_was_wrong_campaigns_after_the_others() -> None:
    cluster = group()
    cluster.elect("n2")
    node = cluster.node("n0")
    asked: list[int] = []
    for _ in range(2):
        cluster.heartbeat("n2")
        cluster.run()
        node.clocks._no_campaign_until_s = cluster.clock.now_s + NO_CAMPAIGN_S
        for _ in range(LEFT_TO_OTHERS + 1):
            cluster.clock.now_s += 1.0
            node.begin_election()
            asked.append(len(posted(cluster, "n0", Kind.PRE_VOTE)))
            cluster.post.clear()
    assert asked == 2 * [0, 0, 0, 2]


async def test_dates_that_were_all_found_wrong_leave_a_leader(tmp_path: Path) -> None:
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        for replica in groups.replicas.values():
            clocks_there = replica.group.node.clocks
            clocks_there._no_campaign_until_s = replica.clock.monotonic() + NO_CAMPAIGN_S
        before_s = trio.current_time()
        first.kill()
        second = await groups.leader(among=groups.others(first.name))
        assert trio.current_time() - before_s < NO_CAMPAIGN_S / 3
        await second.group.submit(batch(b"after"))


async def test_leader_without_successor_stamps_by_the_majority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        await first.group.submit(batch(b"before"))
        monkeypatch.setattr(first.group.node.clocks, "nearest", lambda: "nobody")
        first.clock.skew_ms = 2 * YEAR_MS
        await trio.sleep(0.5)
        for _ in range(3):
            await first.group.submit(batch(b"x"))
            await trio.sleep(0.5)
        assert first.group.leadership is not None
        right_ms = first.clock.wall_ms() - 2 * YEAR_MS
        assert abs(first.group.state.last_store_time_ms - right_ms) < SKEW_MAX_MS


async def test_a_group_whose_store_time_is_ahead_shows_it_and_serves(tmp_path: Path) -> None:
    """A single voter has nothing to compare its date with; store time never goes back."""
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        leader.clock.skew_ms = 2 * YEAR_MS
        await leader.group.submit(batch(b"two years ahead"))
        leader.clock.skew_ms = 0
        await leader.group.submit(batch(b"back"))
        assert leader.group.leadership is not None
        ahead_ms = leader.group.status()["store_time_ahead_ms"]
        assert 2 * YEAR_MS - SKEW_MAX_MS < ahead_ms <= 2 * YEAR_MS
        before_ms = leader.group.store_time_ms
        await trio.sleep(30)
        assert leader.group.store_time_ms == pytest.approx(before_ms + 15_000, abs=2)
