from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
import trio._core._run as scheduler

from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.simulation.virtual_time import (
    EPOCH_MS,
    START_S,
    Gate,
    SimClock,
    SimulationError,
    VirtualTime,
    run_virtual,
)


def test_a_day_passes_at_once_and_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def main(time: VirtualTime) -> float:
        async def wait(seconds: float, name: str) -> None:
            await time.sleep(seconds)
            seen.append((time.now_s - START_S, name))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 86_400, "day")
            nursery.start_soon(wait, 3_600, "hour")
            nursery.start_soon(wait, 0, "now")
        return time.now_s - START_S

    assert run_virtual(1, main) == 86_400
    assert seen == [(0.0, "now"), (3_600.0, "hour"), (86_400.0, "day")]


def test_trios_own_deadlines_pass_on_the_same_time() -> None:
    async def main(time: VirtualTime) -> tuple[bool, float]:
        with trio.move_on_after(5) as scope:
            await time.sleep(7)
        return scope.cancelled_caught, time.now_s - START_S

    assert run_virtual(1, main) == (True, 5.0)


def test_a_cancelled_timer_does_not_happen() -> None:
    async def main(time: VirtualTime) -> list[str]:
        happened: list[str] = []
        timer = time.call_later(1, happened.append, "cancelled")
        time.call_later(2, happened.append, "kept")
        timer.cancel()
        await time.sleep(3)
        return happened

    assert run_virtual(1, main) == ["kept"]


def test_a_world_in_which_nothing_will_happen_fails_clearly() -> None:
    async def main(time: VirtualTime) -> None:
        await trio.sleep_forever()

    with pytest.raises(SimulationError, match="never happen"):
        run_virtual(1, main)


def test_a_loop_that_never_waits_does_not_stop_time() -> None:
    async def main(time: VirtualTime) -> int:
        with trio.move_on_after(20e-6):
            while True:
                await trio.lowlevel.checkpoint()
        return time.nudges

    assert run_virtual(1, main) > 0


def order_of_tasks(seed: int) -> list[int]:
    order: list[int] = []

    async def main(time: VirtualTime) -> None:
        async def note(number: int) -> None:
            await trio.lowlevel.checkpoint()
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(note, number)

    run_virtual(seed, main)
    return order


def test_the_seed_alone_decides_the_order_of_tasks() -> None:
    assert order_of_tasks(1) == order_of_tasks(1)
    assert len({tuple(order_of_tasks(seed)) for seed in range(8)}) == 8


def test_trios_scheduler_and_the_collector_are_left_as_they_were() -> None:
    private: Any = scheduler
    before = (private._ALLOW_DETERMINISTIC_SCHEDULING, private._r.getstate(), gc.isenabled())
    order_of_tasks(3)
    after = (private._ALLOW_DETERMINISTIC_SCHEDULING, private._r.getstate(), gc.isenabled())
    assert before == after


def test_a_trio_without_the_private_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(SimulationError, match="_ALLOW_DETERMINISTIC_SCHEDULING"):
        order_of_tasks(1)


def test_streams_of_a_seed_are_their_own() -> None:
    assert rng_stream(1, "n0").random() == rng_stream(1, "n0").random()
    assert len({rng_stream(seed, name).random() for seed in (1, 2) for name in ("n0", "n1")}) == 4


def test_a_clock_has_offset_drift_and_jumps() -> None:
    async def main(time: VirtualTime) -> None:
        clock = SimClock(time, Gate(), offset_ms=5_000, drift_ppm=1000)
        begin_s = clock.monotonic()
        assert clock.wall_ms() == EPOCH_MS + 5_000
        await time.sleep(100)
        assert clock.wall_ms() == EPOCH_MS + 5_000 + 100_100
        clock.jump(-60_000)
        clock.drift(-1000)
        await time.sleep(100)
        assert clock.wall_ms() == EPOCH_MS + 5_000 + 100_100 + 99_900 - 60_000
        assert clock.monotonic() - begin_s == pytest.approx(200)
        before_s = time.now_s
        await clock.sleep(10)
        assert time.now_s - before_s == pytest.approx(10 / 0.999, abs=1e-5)

    run_virtual(1, main)


def test_waits_of_one_length_end_at_instants_of_their_own() -> None:
    async def main(time: VirtualTime) -> set[float]:
        ends: set[float] = set()

        async def one(clock: SimClock) -> None:
            await clock.sleep(1)
            ends.add(time.now_s)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                clock = SimClock(time, Gate(), number=number)
                for _ in range(3):
                    nursery.start_soon(one, clock)
        return ends

    ends = run_virtual(1, main)
    assert len(ends) == 15
    assert max(ends) - min(ends) < 1e-6


def test_a_closed_gate_keeps_sleepers_until_it_opens() -> None:
    async def main(time: VirtualTime) -> list[float]:
        gate = Gate()
        clock = SimClock(time, gate)
        woken: list[float] = []

        async def sleeper() -> None:
            await clock.sleep(1)
            woken.append(round(time.now_s - START_S, 3))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            await time.sleep(0.5)
            gate.close()
            await time.sleep(9.5)
            assert woken == []
            gate.open()
        return woken

    assert run_virtual(1, main) == [10.0]


def test_a_sleeper_behind_a_closed_gate_can_be_cancelled() -> None:
    async def main(time: VirtualTime) -> bool:
        gate = Gate()
        clock = SimClock(time, gate)
        with trio.CancelScope() as scope:
            time.call_later(0.5, lambda _: gate.close(), None)
            time.call_later(3, lambda _: scope.cancel(), None)
            await clock.sleep(1)
        gate.open()
        await time.sleep(1)
        return scope.cancelled_caught

    assert run_virtual(1, main)
