"""How long the turns of an event loop took, by a clock that moves when it is told to."""

from __future__ import annotations

import pytest
import trio

from dledger.metrics.loop_stall import SLOT_S, SLOTS, LoopStall
from remoting.edge import TrioClock


class HandClock(TrioClock):
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_a_turn_that_keeps_the_loop_is_measured() -> None:
    clock = HandClock()
    stall = LoopStall(clock)
    with stall.measuring():
        await trio.sleep(0)
        clock.now += 0.3
        await trio.sleep(0)
        clock.now += 0.01
        await trio.sleep(0)
        await trio.sleep(0)

    assert stall.longest_s == pytest.approx(0.3)
    assert stall.stalls == 1
    clock.now += 5.0
    await trio.sleep(0)
    assert stall.longest_s == pytest.approx(0.3), "not measured outside of the block"


def test_the_longest_turn_of_the_last_minute_is_forgotten_after_it() -> None:
    clock = HandClock()
    stall = LoopStall(clock)
    stall.note(0.2, clock.now)
    for _ in range(SLOTS - 1):
        clock.now += SLOT_S
        stall.note(0.001, clock.now)
        assert stall.recent_s() == 0.2

    clock.now += 2 * SLOT_S
    stall.note(0.002, clock.now)

    assert stall.recent_s() == 0.002
    assert stall.status() == {
        "longest_ms": 200.0,
        "last_minute_ms": 2.0,
        "now_ms": 2.0,
        "stalls": 1,
    }
