"""How long the turns of an event loop took, by a clock that the test moves."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from dledger.metrics.loop_stall import SLOT_S, SLOTS, LoopStall


async def test_loop_stall_measures_a_turn_that_keeps_the_loop(mock_clock: MockClock) -> None:
    stall = LoopStall()
    with stall.measuring():
        await trio.sleep(0)
        mock_clock.jump(0.3)
        await trio.sleep(0)
        mock_clock.jump(0.01)
        await trio.sleep(0)
        mock_clock.jump(0.06)
        await trio.sleep(0)
        await trio.sleep(0)

    assert stall.longest_s == pytest.approx(0.3)
    assert stall.stalls == 2
    mock_clock.jump(5.0)
    await trio.sleep(0)
    assert stall.longest_s == pytest.approx(0.3), "not measured outside of the block"


async def test_loop_stall_forgets_a_turn_after_a_minute(mock_clock: MockClock) -> None:
    stall = LoopStall()
    assert stall.recent_s() == 0.0
    stall.note(0.2, trio.current_time())
    for _ in range(SLOTS - 1):
        mock_clock.jump(SLOT_S)
        stall.note(0.001, trio.current_time())
        assert stall.recent_s() == 0.2

    mock_clock.jump(2 * SLOT_S)
    stall.note(0.002, trio.current_time())

    assert stall.recent_s() == 0.002
    assert stall.status() == {
        "longest_ms": 200.0,
        "last_minute_ms": 2.0,
        "now_ms": 2.0,
        "stalls": 1,
    }
