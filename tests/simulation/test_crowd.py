"""A new leader meets fifty thousand of each thing that a broker keeps, all of them due."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

import pytest
import trio

from dledger.broker_errors import PendingFullError
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import encode_record
from dledger.group import Group
from dledger.jepsen_like.simulation.sim_disk import SimExecutor
from dledger.jepsen_like.simulation.world import World, run_world
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.processors.wiring import BrokerProcessors
from dledger.remoting.protocol.topic_names import HALF_TOPIC
from dledger.services.delayed_message import timed_properties
from dledger.services.half_message import half_properties
from dledger.services.pop_decision import Receive
from dledger.services.pop_lines import PopAsk
from dledger.state.pop import PopChange, PopGrant
from dledger.state.queue_lock import LockGrant, QueueLocksChange
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.table import StateChange
from dledger.state.topics import TopicConfig
from dledger.waiting import CALLS_PER_TURN
from tests.harness.fake_group import batch_of

pytestmark = pytest.mark.hunt

T = TypeVar("T")

CROWD: Final = 50_000
AT_ONCE: Final = 1_000
DUE_S: Final = 120
SERVED_S: Final = 300
CALLS_PER_TURN_MAX: Final = 100_000
"""Functions that one turn may call: some 10 ms. To serve a crowd at once takes ten times that."""


class Calls(trio.abc.Instrument):
    """Counts the functions that each step of a task calls, while it `is_on`."""

    is_on, most, calls = False, 0, 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.calls = 0
        if self.is_on:
            sys.setprofile(self._count)

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        sys.setprofile(None)
        self.most = max(self.most, self.calls)

    def leave_out(self, work: Callable[[], T]) -> T:
        """Do *work* of a worker thread, which is no part of a turn."""
        sys.setprofile(None)
        try:
            return work()
        finally:
            sys.setprofile(self._count if self.is_on else None)

    def _count(self, _frame: FrameType, event: str, _argument: Any) -> None:
        self.calls += event in ("call", "c_call")


async def submit(group: Group, topic: str, properties: bytes) -> None:
    for first in range(0, CROWD, AT_ONCE):
        records = [
            encode_record(topic=topic, queue_id=0, body=b"%d" % number, properties=properties)
            for number in range(first, first + AT_ONCE)
        ]
        await group.submit(batch_of(records, Run(topic, 0, AT_ONCE)))


async def change(group: Group, changes: Iterable[StateChange]) -> None:
    for each in changes:
        await group.submit(state_batch(each))


async def fill(group: Group, due_ms: int) -> None:
    topics = tuple(TopicConfig(name, 1, 1, 6) for name in ("T", "P", "timed", "delayed"))
    await change(group, [TopicsChange(put=topics)])
    await submit(group, "P", b"")
    await submit(group, HALF_TOPIC, half_properties(b"TRAN_MSG\x01true\x02", "pg", "T", 0))
    await submit(group, TIMER_TOPIC, timed_properties(b"", "timed", 0, due_ms))
    await submit(group, SCHEDULE_TOPIC, b"DELAY\x011\x02REAL_TOPIC\x01delayed\x02REAL_QID\x010\x02")
    for first in range(0, CROWD, AT_ONCE):
        groups = [f"g{number}" for number in range(first, first + AT_ONCE)]
        grants = tuple(PopGrant((name, "P", 0), 1_000, 0, 1, (0,)) for name in groups)
        locks = tuple(LockGrant((name, "T", 0), "c") for name in groups)
        await change(group, [PopChange(grants=grants), QueueLocksChange(grants=locks)])


async def leading(world: World) -> Group:
    group = (await world.wait_for_leader()).group
    assert group is not None
    return group


async def until_taken(world: World, call: Callable[[], None]) -> None:
    while True:
        try:
            return call()
        except PendingFullError:
            await world.sleep(0.01)


def processors_of(group: Group) -> BrokerProcessors:
    owners = (getattr(listener, "__self__", None) for listener in group.on_role_change)
    return next(owner for owner in owners if isinstance(owner, BrokerProcessors))


def test_new_leader_serves_a_crowd_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, answers, run = Calls(), Counter[str](), SimExecutor.run

    async def run_elsewhere(executor: SimExecutor, work: Callable[[], T], *, kind: str) -> T:
        return await run(executor, partial(calls.leave_out, work), kind=kind)

    monkeypatch.setattr(SimExecutor, "run", run_elsewhere)

    async def main(world: World) -> None:
        group = await leading(world)
        await fill(group, group.store_time_ms + DUE_S * 1000)
        await world.sleep_until(DUE_S)
        assert await group.transfer_leadership()
        leader = await leading(world)
        processors = processors_of(leader)
        state, pops, locks = leader.state, processors.pops, processors.locks
        term, calls.is_on = leader.node.term, True
        for number in range(CROWD):
            receive = Receive(
                group=f"g{number}", topic="P", queue_ids=(0,), wanted=1, max_bytes=1 << 20,
                invisible_ms=600_000,
            )  # fmt: skip
            ask = PopAsk(on_done=received, receive=receive, hold_s=60.0)
            await until_taken(world, partial(pops.ask, ask))
            await until_taken(world, partial(locks.lock, "c", [(f"g{number}", "T", 0)], locked))
            if number % CALLS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
        await world.sleep(SERVED_S)
        calls.is_on = False
        assert (leader.node.term, leader.leadership is not None) == (term, True)
        assert answers == {"received": CROWD, "locked": CROWD}
        assert [state.max_offset(topic, 0) for topic in ("timed", "delayed")] == [CROWD, CROWD]
        assert len(state.transactions.open) == CROWD

    def received(ask: PopAsk, _error: MQError | None) -> None:
        answers["received"] += len(ask.messages)

    def locked(tokens: Any) -> None:
        answers["locked"] += len(tokens)

    settings = WorldSettings(segment_bytes=64 << 20, compare_state_every=1_000_000)
    run_world(1, main, settings, [calls])
    assert 0 < calls.most <= CALLS_PER_TURN_MAX
