"""A date that most voters do not share neither leads nor stamps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dledger.raft.clocks import AGREED_S, DATE_VALID_S, NO_CAMPAIGN_S, SKEW_MAX_MS, Clocks
from dledger.testing.clocks import ManualClock
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch

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
    stamped = found.store_time_ms() - clock.wall_ms()
    assert stamped == (expected if abs(expected) > SKEW_MAX_MS else 0)


@pytest.mark.parametrize("years", [2, -2])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("others", [1, 3])
def test_of_dates_that_contradict_each_other_the_log_decides(
    years: int, is_own: bool, others: int
) -> None:
    """Two of two, of three while one is away, of four or five: one half says this, one that."""
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
    assert abs(found.store_time_ms() - right_ms) < SKEW_MAX_MS
    assert found.are_off() is is_own


def test_an_unheard_jump_is_measured_by_what_was_agreed() -> None:
    found, clock = clocks(3)
    found.record("n1", clock.wall_ms())
    right_ms = found.store_time_ms()
    clock.now_s += DATE_VALID_S + 1
    clock.skew_ms = 2 * YEAR_MS
    assert not found.are_known
    assert found.store_time_ms() == right_ms + int(1000 * (DATE_VALID_S + 1))
    clock.now_s += AGREED_S
    assert found.store_time_ms() == clock.wall_ms()
    clock.now_s -= AGREED_S
    found.begin_term()
    assert found.store_time_ms() == clock.wall_ms()


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
