"""A crowd three times as large makes no turn longer, counted in lines of code and not in time."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import pytest
import trio
import trio.testing

from dledger.group_api import SERVICES
from dledger.services import stored_record as stored
from tests.harness.half_messages import PROPERTIES, begin
from tests.harness.leader_services import LeaderServices
from tests.harness.pulls import hold

LIMITS: Final = re.compile(
    "(CALLS|ROWS|CHECKS|OFFSETS|DELIVERIES|REQUESTS|QUEUES)_PER_|LOAD_UNITS|ROLLED_"
)
AT_ONCE: Final = 8
FEW, MANY = 5 * AT_ONCE, 15 * AT_ONCE
LINES_PER_MORE: Final = 6  # lists are made with these; what is done for one takes more

Crowd = Callable[[LeaderServices, int], Callable[[], object]]


def sent(properties: str, leader: LeaderServices, crowd: int) -> Callable[[], object]:
    for _ in range(crowd):
        leader.send(properties)
    return lambda: None


def damaged(crowd: Crowd, leader: LeaderServices, size: int) -> Callable[[], object]:
    vars(stored)["check_entries"] = lambda *_: SimpleNamespace(suspects=[1])
    return crowd(leader, size)


def halves(properties: str, leader: LeaderServices, crowd: int) -> Callable[[], object]:
    leader.broker.make_topic("T", 4)
    for _ in range(crowd):
        begin(leader.broker, properties=properties)
    return lambda: None


def offsets(topic: str, leader: LeaderServices, crowd: int) -> Callable[[], object]:
    commits = leader.broker.processors.offsets
    commits.exists = lambda name: name == "T"
    for queue_id in range(crowd):
        commits.commit("g", topic, queue_id, 1)
    return lambda: None


def pulls(leader: LeaderServices, crowd: int) -> Callable[[], object]:
    for _ in range(crowd):
        hold(leader.broker)
    return partial(leader.group.put, "T", 0, b"x")


def locks(clients: int, leader: LeaderServices, crowd: int) -> Callable[[], object]:
    lock = leader.broker.processors.locks.lock
    for number in range(crowd):
        lock(f"c{number % clients}", [("g", "T", 0)] * 20, lambda _: None)
    return leader.group.settle


DELAYED: Final = partial(sent, "DELAY\x013\x02")
TIMED: Final = partial(sent, "TIMER_DELAY_MS\x0130000\x02")
OPEN: Final = partial(halves, PROPERTIES)
IMMUNE: Final = partial(halves, PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x013000\x02")

CROWDS: Final[dict[str, tuple[Crowd, ...]]] = {
    "delay_levels": (DELAYED, partial(damaged, DELAYED)),
    "timer": (TIMED, partial(damaged, TIMED)),
    "transactions": (OPEN, IMMUNE, partial(damaged, OPEN)),
    "consumer_offsets": (partial(offsets, "T"), partial(offsets, "gone")),
    "requests": (pulls, partial(locks, 1), partial(locks, MANY)),
}


class Work(trio.abc.Instrument):
    """Counts the lines of the broker that each step of a task runs."""

    longest, lines = 0, 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.lines = 0
        sys.settrace(self._trace)

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        sys.settrace(None)
        self.longest = max(self.longest, self.lines)

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        self.lines += event == "line"
        return self._trace if str(frame.f_globals.get("__name__")).startswith("dledger.") else None


async def longest_turn(leader: LeaderServices, crowd: Crowd, size: int) -> int:
    event, work = crowd(leader, size), Work()
    async with trio.open_nursery() as nursery:
        trio.lowlevel.add_instrument(work)
        processors = leader.broker.processors
        for task in (leader.serve, processors.offsets.run, processors.run):
            nursery.start_soon(task)
        await trio.sleep(1)
        event()
        await trio.sleep(39)
        trio.lowlevel.remove_instrument(work)
        sys.settrace(None)
        nursery.cancel_scope.cancel()
    leader.group.close()
    return work.longest


@pytest.mark.parametrize("crowd", [crowd for crowds in CROWDS.values() for crowd in crowds])
async def test_crowd_is_served_in_turns(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, crowd: Crowd
) -> None:
    turns = []
    for size in (FEW, MANY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(stored), "check_entries", vars(stored)["check_entries"])
            for name, module in list(sys.modules.items()):
                for limit in filter(
                    LIMITS.search, [*vars(module)] if name.startswith("dledger.") else ()
                ):
                    patch.setattr(module, limit, AT_ONCE)
            leader = LeaderServices(tmp_path / str(size), max_held_pulls=size)
            turns.append(await longest_turn(leader, crowd, size))
    assert turns[1] - turns[0] <= LINES_PER_MORE * (MANY - FEW), turns


def test_each_service_of_a_leader_has_its_crowds() -> None:
    assert {*SERVICES} - {"retention"} <= {*CROWDS}
