"""A date that jumps neither stamps nor is waited for, until it has stayed for long."""

from pathlib import Path

import pytest
import trio

from dledger import log_clock
from dledger.log_clock import COUNTS_AFTER_S, JUMP_MAX_MS, OUTAGE_MAX_MS, LogClock
from dledger.testing.doubles import ManualClock
from tests.harness.groups import running_groups
from tests.harness.raft_cluster import batch

YEAR_MS = 365 * 86_400_000


class Dates:
    """A clock over a log whose newest store time is `newest_ms`."""

    def __init__(self, newest_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.newest_ms = self.clock.wall_ms() + int(1000 * newest_s)
        self.dates = LogClock(self.clock, lambda: self.newest_ms)

    @property
    def right_ms(self) -> int:
        return self.clock.wall_ms() - self.clock.skew_ms


@pytest.mark.parametrize("years", [2, -2])
def test_date_that_jumps_does_not_count_until_it_stays(years: int) -> None:
    world = Dates()
    assert world.dates.wall_ms() == world.right_ms
    world.clock.skew_ms = years * YEAR_MS
    for _ in range(int(COUNTS_AFTER_S)):
        assert abs(world.dates.wall_ms() - world.right_ms) <= 1
        assert abs(world.dates.off_ms() - years * YEAR_MS) <= 1
        world.clock.now_s += 1
    world.clock.now_s += 1
    assert world.dates.wall_ms() == world.clock.wall_ms()
    assert world.dates.off_ms() == 0


def test_date_that_is_right_again_counts_at_once() -> None:
    world = Dates()
    world.dates.wall_ms()
    for _ in range(3):
        world.clock.skew_ms = YEAR_MS
        world.dates.wall_ms()
        world.clock.now_s += COUNTS_AFTER_S - 1
        assert world.dates.wall_ms() < world.clock.wall_ms()
        world.clock.skew_ms = JUMP_MAX_MS - 1
        assert world.dates.wall_ms() == world.clock.wall_ms()
        world.clock.skew_ms = 0
        assert world.dates.wall_ms() == world.clock.wall_ms()


def test_hours_without_an_entry_are_no_jump() -> None:
    world = Dates()
    world.dates.wall_ms()
    world.clock.now_s += 40 * 86_400
    assert world.dates.wall_ms() == world.clock.wall_ms()


@pytest.mark.parametrize(
    ("skew_ms", "counts"),
    [
        (0, True),
        (OUTAGE_MAX_MS, True),
        (2 * YEAR_MS, False),
        (-JUMP_MAX_MS, True),
        (-2 * YEAR_MS, False),
    ],
)
def test_at_its_start_a_process_goes_by_its_log(skew_ms: int, counts: bool) -> None:
    world = Dates()
    world.clock.skew_ms = skew_ms
    assert world.dates.wall_ms() == (world.clock.wall_ms() if counts else world.newest_ms)
    world.clock.now_s += 10
    world.clock.skew_ms = 0
    assert abs(world.dates.off_ms()) == (skew_ms if skew_ms == OUTAGE_MAX_MS else 0)


def test_empty_log_bounds_no_date() -> None:
    world = Dates()
    world.newest_ms = 0
    world.clock.skew_ms = 2 * YEAR_MS
    assert world.dates.wall_ms() == world.clock.wall_ms()
    world.newest_ms = world.right_ms
    assert world.dates.wall_ms() == world.right_ms


def test_a_store_time_that_is_ahead_goes_on_at_half_speed() -> None:
    world = Dates(40)
    began_ms = world.clock.wall_ms()
    assert world.dates.store_time_ms() == world.newest_ms
    world.clock.now_s += 10
    assert world.dates.store_time_ms() == began_ms + 45_000
    world.newest_ms = world.dates.store_time_ms()
    world.clock.now_s += 10
    assert world.dates.store_time_ms() == began_ms + 50_000
    world.clock.now_s += 60
    assert world.dates.store_time_ms() == world.clock.wall_ms() == began_ms + 80_000


def test_a_store_time_never_goes_back() -> None:
    world = Dates()
    for second in range(200):
        world.clock.skew_ms = (0, 30_000, YEAR_MS, -YEAR_MS, -30_000)[second // 7 % 5]
        stamped_ms = world.dates.store_time_ms()
        assert stamped_ms >= world.newest_ms
        assert stamped_ms - world.right_ms <= JUMP_MAX_MS
        world.newest_ms = stamped_ms + (1_000 if second % 50 == 0 else 0)
        world.clock.now_s += 1


@pytest.mark.parametrize("skew_ms", [2 * YEAR_MS, -2 * YEAR_MS])
async def test_leader_two_years_off_stamps_by_the_date_before(tmp_path: Path, skew_ms: int) -> None:
    async with running_groups(tmp_path) as groups:
        first = await groups.leader()
        await first.group.submit(batch(b"before"))
        first.clock.skew_ms = skew_ms
        for _ in range(3):
            await first.group.submit(batch(b"x"))
            await trio.sleep(0.5)
        right_ms = first.clock.wall_ms() - skew_ms
        assert abs(first.group.state.last_store_time_ms - right_ms) < JUMP_MAX_MS
        assert abs(first.group.status()["clock_off_ms"] - skew_ms) < JUMP_MAX_MS
        first.kill()
        second = await groups.leader(among=groups.others(first.name))
        await second.group.submit(batch(b"after"))
        assert second.group.status()["store_time_ahead_ms"] <= 0


async def test_a_group_whose_store_time_is_ahead_shows_it_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_clock, "COUNTS_AFTER_S", 5.0)
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        for skew_ms in (2 * YEAR_MS, 0):
            leader.clock.skew_ms = skew_ms
            for _ in range(2):
                await leader.group.submit(batch(b"x"))
                await trio.sleep(6)
        await leader.group.submit(batch(b"back"))
        assert leader.group.leadership is not None
        ahead_ms = leader.group.status()["store_time_ahead_ms"]
        assert 2 * YEAR_MS - JUMP_MAX_MS < ahead_ms <= 2 * YEAR_MS
        before_ms = leader.group.store_time_ms
        await trio.sleep(30)
        assert leader.group.store_time_ms == pytest.approx(before_ms + 15_000, abs=2)
