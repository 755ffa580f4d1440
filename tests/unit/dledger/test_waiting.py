"""Set any number of times, noticed once, lost never."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dledger.remoting.machine import TrioClock
from dledger.waiting import Wakeup
from tests.harness.beside import beside


async def noticed(wakeup: Wakeup) -> int:
    """Return how often a wait returns by itself now."""
    times = 0
    with trio.move_on_after(0.01):
        while True:
            await wakeup.wait()
            times += 1
    return times


async def test_what_is_set_before_the_wait_is_noticed_once() -> None:
    wakeup = Wakeup()
    assert await noticed(wakeup) == 0
    wakeup.set()
    wakeup.set()
    assert await noticed(wakeup) == 1
    assert await noticed(wakeup) == 0


async def test_sets_before_the_waiter_runs_are_one() -> None:
    wakeup, times = Wakeup(), 0

    async def count() -> None:
        nonlocal times
        while True:
            await wakeup.wait()
            times += 1

    async with beside(count):
        for expected in (1, 2, 3):
            await wait_all_tasks_blocked()
            wakeup.set()
            wakeup.set()
            await wait_all_tasks_blocked()
            assert times == expected


async def test_a_cancelled_wait_leaves_a_set_for_the_next() -> None:
    wakeup = Wakeup()
    wakeup.set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
    assert scope.cancelled_caught
    assert await noticed(wakeup) == 1
    with trio.move_on_after(1):
        await wakeup.wait()
    wakeup.set()
    assert await noticed(wakeup) == 1


async def test_wait_reports_event_or_time_out() -> None:
    wakeup, clock = Wakeup(), TrioClock()
    began = trio.current_time()
    assert not await wakeup.wait_or(clock, 5.0)
    assert trio.current_time() - began == 5.0
    wakeup.set()
    assert await wakeup.wait_or(clock, 5.0)
    assert trio.current_time() - began == 5.0


async def test_a_second_waiter_is_refused() -> None:
    wakeup = Wakeup()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wakeup.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="two tasks"):
            await wakeup.wait()
        wakeup.set()
