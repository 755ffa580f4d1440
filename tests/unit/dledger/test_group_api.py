"""A service that fails begins again, later each time; what proves a broken node goes on."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from dledger.commitlog.errors import FlushFailedError, InvariantBroken
from dledger.group_api import LONGEST_PAUSE_S, LeaderService, ServiceCounts, fenced
from dledger.testing.doubles import VirtualClock
from tests.harness.leader_services import LeaderServices


class Failing:
    """A service that raises each time it runs, at virtual times that are remembered."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.began: list[float] = []

    async def run(self) -> None:
        self.began.append(trio.current_time())
        if self.errors:
            raise self.errors.pop(0)
        await trio.sleep_forever()


async def test_fence_pause_doubles_up_to_a_minute(nursery: trio.Nursery) -> None:
    failing, counts = Failing(*[ValueError("x")] * 9), ServiceCounts()
    nursery.start_soon(fenced, "timer", failing.run, VirtualClock(), counts)
    await trio.sleep(1000)
    pauses = [later - earlier for earlier, later in pairwise(failing.began)]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert counts.restarts == Counter({"timer": 9})
    nursery.cancel_scope.cancel()


async def test_after_a_calm_time_the_pause_is_short_again(nursery: trio.Nursery) -> None:
    began: list[float] = []

    async def run() -> None:
        began.append(trio.current_time())
        await trio.sleep(200 if len(began) == 4 else 0)
        raise OSError("x")

    nursery.start_soon(fenced, "timer", run, VirtualClock(), ServiceCounts())
    await trio.sleep(210)
    assert began[4] - began[3] == 201
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [InvariantBroken("x"), FlushFailedError("x")])
async def test_what_proves_that_the_node_is_broken_goes_on(error: Exception) -> None:
    counts = ServiceCounts()
    with pytest.raises(type(error)):
        await fenced("timer", Failing(error).run, VirtualClock(), counts)
    with pytest.RaisesGroup(type(error)):
        group = ExceptionGroup("both", [ValueError("x"), error])
        await fenced("timer", Failing(group).run, VirtualClock(), counts)
    assert counts.restarts == Counter({"timer": 1}), "the other half of the group"


async def test_the_end_of_the_leadership_passes_while_a_service_fails() -> None:
    counts = ServiceCounts()

    async def fails_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("on the way out")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_late)
            nursery.start_soon(trio.sleep_forever)

    with trio.move_on_after(1) as scope:
        await fenced("timer", run, VirtualClock(), counts)
    assert scope.cancelled_caught
    assert counts.restarts == Counter({"timer": 1})


async def test_a_service_that_ends_is_not_run_again() -> None:
    ran: list[int] = []

    async def run() -> None:
        ran.append(1)

    await fenced("timer", run, VirtualClock(), ServiceCounts())
    assert ran == [1]
    await LeaderService("timer", run)(object())
    assert ran == [1, 1]


@pytest.mark.parametrize(
    ("number", "wait"),
    [
        pytest.param(0, "DELAY\x011\x02", id="delay levels"),
        pytest.param(1, "TIMER_DELAY_SEC\x012\x02", id="timer"),
    ],
)
async def test_failed_service_delivers_in_flight_once(
    tmp_path: Path, nursery: trio.Nursery, number: int, wait: str
) -> None:
    leader = LeaderServices(tmp_path)
    group, service = leader.group, leader.services[number]
    assert leader.send(wait).code == 0
    group.commit_latency_s = 5
    inner = trio.CancelScope()

    async def run() -> None:
        nonlocal inner
        with trio.CancelScope() as inner:
            await service.run()
        raise RuntimeError("broken off")

    counts = ServiceCounts()
    nursery.start_soon(fenced, service.name, run, leader.clock, counts)
    nursery.start_soon(leader.settle_kicked, 6)
    await trio.sleep(4)
    assert (group.waiting, counts.restarts) == (1, Counter())
    inner.cancel()
    group.commit_latency_s = 0.001
    await trio.sleep(10)
    assert counts.restarts == Counter({service.name: 1})
    assert [bytes(record.body) for record in leader.read("T")] == [b"body"]
    assert leader.send(wait).code == 0
    await trio.sleep(10)
    assert len(leader.read("T")) == 2, "the claim of the first try is given back"
    nursery.cancel_scope.cancel()
    group.close()
