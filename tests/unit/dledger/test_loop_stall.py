"""How long the turns of an event loop took, by a clock that the test moves."""

import gc

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from dledger.loop_stall import SLOT_S, SLOTS, STEPS_FOR_S, LoopStall


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
        "longest_cpu_ms": 0.0,
        "last_minute_ms": 2.0,
        "now_ms": 2.0,
        "now_cpu_ms": 0.0,
        "stalls": 1,
    }


class Loop:
    """A loop whose turns take the time that the test sets, elapsed and of the processor."""

    def __init__(self, clock: MockClock) -> None:
        self.clock = clock
        self.cpu_s = 0.0
        self.stall = LoopStall(lambda: self.cpu_s)

    async def turn(self, took_s: float, cpu_s: float = 0.0) -> None:
        self.clock.jump(took_s)
        self.cpu_s += cpu_s
        await trio.sleep(0)


async def test_a_stall_has_its_processor_time(mock_clock: MockClock) -> None:
    loop = Loop(mock_clock)
    with loop.stall.measuring(), capture_logs() as lines:
        await loop.turn(0.0)
        await loop.turn(0.07, 0.06)
        await loop.turn(0.2, 0.01)
        await loop.turn(0.0)
    shown = loop.stall.status()
    assert (shown["longest_ms"], shown["longest_cpu_ms"]) == (200.0, 10.0)
    assert (shown["now_ms"], shown["now_cpu_ms"]) == (200.0, 10.0)
    assert [(line["event"], line["took_ms"], line["cpu_ms"]) for line in lines] == [
        ("event_loop_stalled", 70.0, 60.0)
    ], "one line a second"


async def test_the_next_stall_names_its_longest_step(mock_clock: MockClock) -> None:
    loop = Loop(mock_clock)

    async def pause(seconds: float) -> None:
        for _ in range(round(seconds / 0.04)):
            await loop.turn(0.04)

    async def long_steps() -> None:
        await loop.turn(0.03)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.turn, 0.01, name="short")
            nursery.start_soon(loop.turn, 0.08, name="long")
        await loop.turn(0.0)

    with loop.stall.measuring(), capture_logs() as lines:
        await loop.turn(0.0)
        await long_steps()
        await pause(2 * SLOT_S)
        await long_steps()
        await pause(STEPS_FOR_S + 2 * SLOT_S)
        await long_steps()
    assert [(line.get("task"), line.get("step_ms")) for line in lines] == [
        (None, None), ("long", 80.0), (None, None)
    ]  # fmt: skip


async def test_a_stall_by_garbage_is_named(mock_clock: MockClock) -> None:
    loop = Loop(mock_clock)
    with loop.stall.measuring(), capture_logs() as lines:
        await loop.turn(0.0)
        gc.callbacks[-1]("start", {})
        mock_clock.jump(0.04)
        gc.callbacks[-1]("stop", {})
        await loop.turn(0.02)
        await loop.turn(2 * SLOT_S)
        await loop.turn(0.0)
    assert [line.get("garbage_collection_ms") for line in lines] == [40.0, None]
