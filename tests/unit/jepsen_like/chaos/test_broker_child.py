"""A broker's clock does what the runner orders, and nothing jumps that must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from dledger.jepsen_like.chaos.broker_child import ClockFile, SteeredClock


class Hand:
    """A clock that stands still."""

    now_s = 100.0
    slept: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 1_000_000 + int(self.now_s * 1000)

    async def sleep(self, seconds: float) -> None:
        self.slept = seconds

    def time_out(self, seconds: float) -> trio.CancelScope:
        self.slept = seconds
        return trio.CancelScope()


def test_a_jump_moves_the_date_and_no_duration(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    before = (clock.monotonic(), clock.wall_ms())
    file.jump(-3_600_000)
    file.jump(1_000)
    assert (clock.monotonic() - before[0], clock.wall_ms() - before[1]) == (0.0, -3_599_000)


def test_drift_gathers_and_stays(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    begin, date = clock.monotonic(), clock.wall_ms()
    file.drift(20_000.0)
    clock.monotonic()
    hand.now_s += 10.0
    assert clock.monotonic() - begin == pytest.approx(10.2)
    file.drift(0.0)
    clock.monotonic()
    hand.now_s += 10.0
    assert clock.monotonic() - begin == pytest.approx(20.2)
    assert clock.wall_ms() - date == 20_200


async def test_fast_clock_wakes_early(tmp_path: Path) -> None:
    hand, file = Hand(), ClockFile(tmp_path / "clock")
    clock = SteeredClock(hand, file.path)
    file.drift(250_000.0)
    await clock.sleep(5.0)
    assert hand.slept == pytest.approx(4.0)
    with clock.time_out(10.0):
        assert hand.slept == pytest.approx(8.0)
