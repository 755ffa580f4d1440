"""Messages of schedules: one for each instant that is due, whatever leaders and clocks do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from dledger.broker_errors import PendingFullError
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import Record
from dledger.services import repeated_messages
from dledger.services.repeated_messages import RepeatedMessageService, queue_of, uniq_key
from dledger.state.schedules import Schedule, ScheduleConfig, SchedulesChange
from dledger.state.state_record import TopicsChange, state_batch
from dledger.state.topics import PERM_READ, PERM_WRITE, TopicConfig
from tests.harness.broker import Broker
from tests.harness.fake_group import CLUSTER
from tests.harness.leader_services import ServedGroup

pytestmark = pytest.mark.usefixtures("autojump_clock")

HOUR_S = 3600


class World(ServedGroup):
    """A group with its service for schedules on virtual time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broker = Broker(self.group, self.clock)
        self.broker.make_topic("T", 1)
        # The date at which a minute, and an hour, begins.
        self.clock.epoch_ms = 1_800_000_000_000 // 3_600_000 * 3_600_000

    @property
    def view(self) -> repeated_messages.ScheduleView:
        return self.broker.processors.schedules

    def add(self, expression: str = "@every 10s", name: str = "s", **more: Any) -> None:
        """Store a schedule of topic T, past the processors."""
        config = ScheduleConfig(name, more.pop("topic", "T"), b"go", expression, **more)
        self.change(SchedulesChange((config,), self.clock.wall_ms()))

    def change(self, change: SchedulesChange | TopicsChange) -> None:
        self.group.propose(state_batch(change), lambda _: None)
        self.group.settle()

    def service(self) -> RepeatedMessageService:
        processors = self.broker.processors
        return RepeatedMessageService(
            self.group, self.clock, processors.schedules, processors.topics, self.broker.settings
        )

    async def serve(self) -> None:
        """Run the service as a leadership does."""
        await self.lead(self.service().run)

    def dues(self, topic: str = "T", queue_id: int = 0) -> list[float]:
        """Return the instants of the messages in a queue, seconds from the begin."""
        return [
            (int(record.property_map["SCHEDULE_DUE_MS"]) - self.clock.epoch_ms) / 1000
            for record in self.read(topic, queue_id)
        ]

    def row(self, name: str = "s") -> Schedule:
        return self.group.state.schedules[name]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


def late(record: Record) -> int:
    return record.store_timestamp_ms - int(record.property_map["SCHEDULE_DUE_MS"])


async def test_each_instant_has_one_message_in_time(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(1)
    world.add("@every 10s", properties={"TAGS": "a", "KEYS": "k", "mine": "1"})
    world.add("*/2 * * * *", "minutes")
    await trio.sleep(300)
    assert world.dues() == sorted([*range(11, 301, 10), 120, 240])
    assert all(0 <= late(record) < 100 for record in world.read())
    first = world.read()[0]
    assert first.property_map == {
        "UNIQ_KEY": uniq_key(world.group.group_identity, "s", world.clock.epoch_ms + 11_000),
        "TAGS": "a",
        "KEYS": "k",
        "mine": "1",
        "CLUSTER": CLUSTER,
        "SCHEDULE_NAME": "s",
        "SCHEDULE_DUE_MS": str(world.clock.epoch_ms + 11_000),
    }
    assert bytes(first.body) == b"go"
    assert len({record.property_map["UNIQ_KEY"] for record in world.read()}) == 31
    assert (world.row().fired, world.row("minutes").fired) == (29, 2)
    assert world.group.service_counts.fired == 31


async def test_of_missed_instants_only_the_newest_is_sent(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(25)
    world.depose()
    await trio.sleep(HOUR_S)
    world.group.lead()
    nursery.start_soon(world.serve)
    await trio.sleep(10)
    assert world.dues() == [10, 20, 3620, 3630]
    missed = [record.property_map.get("SCHEDULE_MISSED") for record in world.read()]
    assert missed == [None, None, "359", None]
    assert (world.row().fired, world.row().missed) == (4, 359)
    assert world.group.service_counts.missed == 359


async def test_a_clock_that_steps_sends_no_instant_twice(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(25)
    world.clock.skew_ms = -600_000
    await trio.sleep(100)
    assert world.dues() == [10, 20]
    world.clock.skew_ms = 600_000
    await trio.sleep(3)
    assert world.dues() == [10, 20, 720]
    world.clock.skew_ms = 0
    await trio.sleep(700)
    assert world.dues() == [10, 20, 720, *range(730, 829, 10)]


async def test_nothing_is_sent_before_its_instant(world: World, nursery: trio.Nursery) -> None:
    world.add("@every 10s")
    world.clock.skew_ms = -3000
    nursery.start_soon(world.serve)
    await trio.sleep(12.9)
    assert world.dues() == []
    await trio.sleep(0.2)
    assert world.dues() == [10]


async def test_an_unknown_entry_is_not_made_again(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(1)
    world.group.stalled = True
    await trio.sleep(11)
    world.group.time_out()
    await trio.sleep(30)
    assert world.dues() == []
    world.group.stalled = False
    world.add("@every 1h", "other")  # applies what was appended
    await trio.sleep(1)
    assert world.dues() == [10, 40]


async def test_a_deposed_leaders_entry_counts_when_it_was_stored(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(1)
    world.group.stalled = True
    await trio.sleep(10)
    world.depose()
    world.group.stalled = False
    world.group.lead()
    nursery.start_soon(world.serve)
    await trio.sleep(10)
    assert world.dues() == [10, 20]


async def test_what_the_log_did_not_take_is_tried_again(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    world.group.refuse = PendingFullError("full")
    await trio.sleep(15)
    assert world.dues() == []
    world.group.refuse = None
    await trio.sleep(2)
    assert world.dues() == [10]


async def test_a_pause_sends_nothing_and_makes_up_for_nothing(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(15)
    world.add("@every 10s", paused=True)
    await trio.sleep(100)
    world.add("@every 10s")
    await trio.sleep(20)
    assert world.dues() == [10, 120, 130]
    assert world.row().missed == 0


async def test_a_topic_that_may_not_be_written_holds_its_schedules(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(15)
    with structlog.testing.capture_logs() as logged:
        world.change(TopicsChange(put=(TopicConfig("T", 1, 1, PERM_READ),)))
        await trio.sleep(100)
    assert [line["reason"] for line in logged if line["event"] == "schedule_held"] == [
        "topic T may not be written"
    ]
    assert world.view.problem(world.row()) == "topic T may not be written"
    assert world.dues() == [10]
    world.change(TopicsChange(put=(TopicConfig("T", 1, 1, PERM_READ | PERM_WRITE),)))
    await trio.sleep(1)
    assert world.dues() == [10, 110]
    assert world.row().missed == 9


async def test_a_queue_that_was_removed_holds_its_schedule(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.broker.make_topic("T", 4)
    world.add("@every 10s", queue_id=3)
    await trio.sleep(11)
    world.broker.make_topic("T", 3)
    await trio.sleep(20)
    assert world.dues(queue_id=3) == [10]
    assert "has no queue 3" in world.view.problem(world.row())


async def test_a_schedule_is_not_fired_while_its_topic_is_removed(
    world: World, nursery: trio.Nursery
) -> None:
    """Deleted and made again in flight: a message behind both would be of no schedule any more."""
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    await trio.sleep(1)
    pending = world.broker.processors.topics.pending
    config = TopicConfig("T", 1, 1)
    for change in (TopicsChange(delete=("T",)), TopicsChange(put=(config,))):
        done = pending.delete("T") if change.delete else pending.put("T", config)
        world.group.propose(state_batch(change), done)
    await trio.sleep(20)
    assert world.row().fired == 0
    world.group.settle()
    await trio.sleep(20)
    assert (world.group.state.schedules, world.dues()) == ({}, [])


async def test_a_schedule_is_not_fired_while_it_is_changed(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s")
    world.add("@every 10s", "other")
    await trio.sleep(1)
    change = state_batch(SchedulesChange(delete=("s",)))
    world.group.propose(change, world.view.pending.delete("s"))
    # What fires "other" takes the removal along, in front of it.
    await trio.sleep(20)
    assert sorted(world.group.state.schedules) == ["other"]
    assert [record.property_map["SCHEDULE_NAME"] for record in world.read()] == ["other"] * 2


async def test_an_entry_holds_no_more_messages_and_bytes_than_it_may(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_messages, "FIRED_PER_ENTRY", 3)
    for number in range(7):
        world.add("@every 10s", f"s{number}")
    nursery.start_soon(world.serve)
    await trio.sleep(11)
    counts = [
        len(item.units)
        for applied in world.group.applied
        for item in applied.units
        if item.topic == "T"
    ]
    assert counts == [3, 3, 1]
    assert [record.property_map["SCHEDULE_NAME"] for record in world.read()] == [
        f"s{number}" for number in range(7)
    ]


async def test_few_missed_instants_are_counted_for_one_entry(
    world: World, nursery: trio.Nursery
) -> None:
    """Behind an outage hours of every schedule are due at once."""
    for number in range(5):
        world.add("* * * * *", f"s{number}")
    await trio.sleep(90 * 60)
    nursery.start_soon(world.serve)
    await trio.sleep(1)
    counts = [
        len(item.units)
        for applied in world.group.applied
        for item in applied.units
        if item.topic == "T"
    ]
    assert counts == [3, 2]
    assert {row.missed for row in world.group.state.schedules.values()} == {89}


async def test_a_message_larger_than_an_entry_holds_only_its_own(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("@every 10s", "large", properties={"p": "x" * 1900})
    world.add("@every 20s", "small")
    monkeypatch.setattr(type(world.group.log), "max_entry_bytes", 2000)  # a changed setting
    nursery.start_soon(world.serve)
    await trio.sleep(45)
    assert world.dues() == [20, 40]
    assert "fits no entry" in world.view.problem(world.row("large"))


async def test_a_time_zone_that_is_not_here_holds_its_schedule(
    world: World, nursery: trio.Nursery
) -> None:
    """Another member took it, with other time zone data."""
    with structlog.testing.capture_logs() as logged:
        world.add("* * * * *", time_zone="Mars/Olympus")
        world.add("@every 10s", "other")
        nursery.start_soon(world.serve)
        await trio.sleep(71)
    assert [line["schedule"] for line in logged if line["event"] == "schedule_held"] == ["s"]
    assert len(world.dues()) == 7
    assert "Mars/Olympus" in world.view.problem(world.row())


async def test_what_fails_for_one_schedule_holds_no_other(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(properties: Any) -> bytes:
        if "bad" in properties:
            raise RuntimeError("a bug")
        return encode_properties(properties)

    monkeypatch.setattr("dledger.services.repeated_messages.encode_properties", fails)
    world.add("@every 10s", properties={"bad": "1"})
    world.add("@every 10s", "other")
    nursery.start_soon(world.serve)
    await trio.sleep(25)
    assert world.dues() == [10, 20]
    assert world.view.problem(world.row()) == "a bug"


async def test_a_schedule_ends(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    world.add("@every 10s", end_ms=world.clock.epoch_ms + 30_000)
    await trio.sleep(100)
    assert world.dues() == [10, 20, 30]
    assert world.view.next_ms(world.row()) is None


def test_messages_take_turns_or_go_where_they_belong() -> None:
    config = ScheduleConfig("s", "T", b"b", "@daily")
    topic = TopicConfig("T", 8, 4)
    turns = [queue_of(Schedule(config, 0, 0, 0, fired), topic) for fired in range(6)]
    assert turns == [0, 1, 2, 3, 0, 1]
    assert queue_of(Schedule(replace(config, queue_id=2), 0, 0, 0, 9), topic) == 2
    grouped = replace(config, properties={"__SHARDINGKEY": "customer-7"})
    assert {queue_of(Schedule(grouped, 0, 0, 0, fired), topic) for fired in range(6)} == {0}


def test_the_key_of_an_instant_is_the_same_on_each_leader() -> None:
    key = uniq_key("g", "s", 1_800_000_000_000)
    assert key == uniq_key("g", "s", 1_800_000_000_000)
    assert len(key) == 32
    others = {uniq_key("g", "t", 1_800_000_000_000), uniq_key("g", "s", 1_800_000_060_000)}
    assert key not in others
    assert len(others) == 2
