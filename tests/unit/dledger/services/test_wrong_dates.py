"""Delays, timers and retention on a leader whose date is two years off, and back again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from dledger import log_clock
from dledger.commitlog.entry import Run
from dledger.commitlog.properties import SCHEDULE_TOPIC, TIMER_TOPIC
from dledger.commitlog.record import encode_record
from dledger.group import Group
from dledger.log_clock import LogClock
from dledger.services.delayed_message import (
    TimerClaims,
    due_ms,
    queue_of_level,
    timed_properties,
    with_real_destination,
)
from dledger.services.retention import HOUR_MS, RetentionService
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import TimerMessageService
from dledger.settings.tables import StoreTable
from dledger.settings.text import delays_of_levels
from tests.harness.broker import LEVELS_MS
from tests.harness.fake_group import batch_of
from tests.harness.groups import SEGMENT_BYTES, Groups, Replica, running_groups

YEARS_MS = 2 * 365 * 24 * HOUR_MS
ENTRY_BYTES_MAX = 1 << 20
DELAY_S = LEVELS_MS[1] / 1000


@dataclass
class Led:
    """A group of three, and the leader that keeps leading, whatever its date."""

    groups: Groups
    leader: Replica
    nursery: trio.Nursery

    @property
    def group(self) -> Group:
        return self.leader.group

    @property
    def dates(self) -> LogClock:
        return self.group.dates

    async def set_date(self, skew_ms: int) -> None:
        self.leader.clock.skew_ms = skew_ms
        await trio.sleep(0.5)

    def start_delays(self) -> None:
        schedule = ScheduleMessageService(
            self.group,
            self.dates,
            levels=len(LEVELS_MS),
            is_deleting=set[str]().__contains__,
            entry_bytes_max=ENTRY_BYTES_MAX,
        )
        timer = TimerMessageService(
            self.group,
            self.dates,
            claims=TimerClaims(self.group),
            is_deleting=set[str]().__contains__,
            entry_bytes_max=ENTRY_BYTES_MAX,
        )
        self.nursery.start_soon(schedule.run)
        self.nursery.start_soon(timer.run)

    async def put(self, topic: str, queue_id: int, properties: bytes) -> None:
        record = encode_record(topic=topic, queue_id=queue_id, body=b"x", properties=properties)
        await self.group.submit(batch_of([record], Run(topic, queue_id, 1)))

    async def arrived(self, topic: str) -> float:
        """Wait for a message in *topic*; return when that was, seconds of the real clock."""
        with trio.fail_after(10 * DELAY_S):
            while not self.group.state.max_offset(topic, 0):
                await trio.sleep(0.01)
        return trio.current_time()


@asynccontextmanager
async def led(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Led]:
    async with running_groups(root) as groups, trio.open_nursery() as nursery:
        leader = await groups.leader()
        for replica in groups.replicas.values():
            monkeypatch.setattr(replica.group.store, "delays", delays_of_levels(LEVELS_MS))
        yield Led(groups, leader, nursery)
        assert leader.group.leadership is not None
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("back_after_s", [None, 2.0])
@pytest.mark.parametrize("skew_ms", [YEARS_MS, -YEARS_MS])
async def test_a_delay_lasts_as_long_with_a_wrong_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_ms: int, back_after_s: float | None
) -> None:
    async with led(tmp_path, monkeypatch) as world:
        world.start_delays()
        await world.set_date(skew_ms)
        due = due_ms(world.dates.wall_ms() + int(DELAY_S * 1000))
        began_s = trio.current_time()
        level = queue_of_level(2)
        await world.put(
            SCHEDULE_TOPIC, level, with_real_destination(b"DELAY\x012\x02", "delayed", 0)
        )
        await world.put(TIMER_TOPIC, 0, timed_properties(b"", "timed", 0, due))
        if back_after_s is not None:
            await trio.sleep(back_after_s)
            await world.set_date(0)
        for topic in ("delayed", "timed"):
            took_s = await world.arrived(topic) - began_s
            assert DELAY_S - 0.1 <= took_s <= DELAY_S + 2, topic


@pytest.mark.parametrize("skew_ms", [YEARS_MS, -YEARS_MS])
async def test_retention_goes_by_a_date_once_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_ms: int
) -> None:
    async with led(tmp_path, monkeypatch) as world:
        entry_log = world.group.store.log
        while entry_log.end_position < 3 * SEGMENT_BYTES:
            await world.put("T", 0, b"PAD\x01" + bytes([65]) * 30_000 + b"\x02")
        retention = RetentionService(
            world.group,
            lambda: entry_log,
            StoreTable(mapped_file_size_commit_log=SEGMENT_BYTES, file_reserved_time=1),
            clock=world.dates,
            saved_index=lambda: entry_log.last_index,
            disk_ratio=lambda: 0.0,
        )

        async def expired() -> bool:
            retention.expire_soon("a test")
            return await retention.check() is not None

        for of_leader_ms in (0, skew_ms, 0):
            await world.set_date(of_leader_ms)
            assert not await expired(), of_leader_ms
        monkeypatch.setattr(log_clock, "COUNTS_AFTER_S", 5.0)
        await world.set_date(skew_ms)
        assert not await expired()
        await trio.sleep(6)
        assert await expired() is (skew_ms > 0), "messages are two years old by the date that stays"
