"""Delayed messages: each delivered once, in order, never early, whatever happens to the leader."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from dledger.broker_errors import NotLeaderError
from dledger.commitlog.derive import DEFAULT_DELAY_MS
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.record import encode_record
from dledger.services.delayed_message import queue_of_level, with_real_destination
from dledger.services.schedule import ScheduleMessageService
from dledger.state.state_record import DelayProgressChange
from tests.harness.broker import LEVELS_MS
from tests.harness.leader_services import ServedGroup


class World(ServedGroup):
    """A group with its schedule service on virtual time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, segment_bytes=4 << 20)
        self.deleting: set[str] = set()

    def delay(self, level: int, *bodies: bytes, topic: str = "T", queue_id: int = 0) -> None:
        """Store delayed messages as the send processor does."""
        schedule_queue = queue_of_level(level)
        records = [
            encode_record(
                topic=SCHEDULE_TOPIC,
                queue_id=schedule_queue,
                body=body,
                properties=with_real_destination(
                    b"UNIQ_KEY\x01K%b\x02DELAY\x01%d\x02" % (body[:8], level), topic, queue_id
                ),
                flag=9,
                born_timestamp_ms=123,
                born_host=b"\x0a\0\0\x01\0\0\0\x05",
                reconsume_times=2,
            )
            for body in bodies
        ]
        self.put(SCHEDULE_TOPIC, schedule_queue, records)

    async def serve(self) -> None:
        """Run the service as a leadership does."""
        service = ScheduleMessageService(
            self.group,
            self.clock,
            levels=len(LEVELS_MS),
            is_deleting=self.deleting.__contains__,
        )
        await self.lead(service.run)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


async def test_a_message_comes_out_when_due_and_not_before(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(1)
    stored_ms = world.clock.wall_ms()
    world.delay(2, b"five")
    await trio.sleep(4.999)
    assert world.bodies() == []
    await trio.sleep(0.01)
    (record,) = world.read()
    assert record.store_timestamp_ms >= stored_ms + 5000
    assert record.store_timestamp_ms <= stored_ms + 5005
    assert (record.topic, record.queue_id, bytes(record.body)) == ("T", 0, b"five")
    assert (record.flag, record.reconsume_times) == (9, 2)
    assert (record.born_timestamp_ms, record.born_host) == (123, ("10.0.0.1", 5))
    assert record.property_map == {
        "UNIQ_KEY": "Kfive",
        "DELAY": "2",
        "REAL_TOPIC": "T",
        "REAL_QID": "0",
    }


@pytest.mark.parametrize("before_s", [0.3, 0.01, 0.002])
async def test_schedule_waits_a_short_rest(
    world: World, nursery: trio.Nursery, before_s: float
) -> None:
    world.delay(1, b"a")
    due_ms = world.clock.wall_ms() + 1000
    await trio.sleep(1 - before_s)
    nursery.start_soon(world.serve)
    await trio.sleep(before_s + 0.01)
    (record,) = world.read()
    assert record.store_timestamp_ms >= due_ms


async def test_message_and_progress_are_one_entry(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    world.delay(1, b"a", b"b")
    before = world.group.log.last_index
    await trio.sleep(1.1)
    assert world.bodies() == [b"a", b"b"]
    assert world.group.log.last_index == before + 1
    assert world.group.state.delay_progress == {1: 2}
    (applied,) = world.group.applied[-1:]
    assert DelayProgressChange(1, 0, 2) in applied.changes
    assert ("T", 0, 2) in applied.touched


async def test_levels_do_not_wait_for_each_other_and_keep_their_order(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    for i in range(5):
        world.delay(2, b"slow%d" % i, queue_id=i % 2)
        world.delay(1, b"fast%d" % i, topic="F")
        await trio.sleep(0.3)
    assert world.bodies("F") == [b"fast0", b"fast1"]
    await trio.sleep(6)
    assert world.bodies("F") == [b"fast%d" % i for i in range(5)]
    assert world.bodies("T", 0) == [b"slow0", b"slow2", b"slow4"]
    assert world.bodies("T", 1) == [b"slow1", b"slow3"]


async def test_nothing_is_polled_while_nothing_is_due(world: World, nursery: trio.Nursery) -> None:
    world.delay(18, b"later")
    looks = 0
    wall_ms = world.clock.wall_ms

    def counting() -> int:
        nonlocal looks
        looks += 1
        return wall_ms()

    world.clock.wall_ms = counting  # type: ignore[method-assign]  # counts calls
    nursery.start_soon(world.serve)
    await trio.sleep(3600)
    assert 1 <= looks <= 62, "once a minute at most"


async def test_large_messages_are_delivered_in_entries_of_bounded_size(
    world: World, nursery: trio.Nursery
) -> None:
    for i in range(4):
        world.delay(1, b"%d" % i * 400_000)
    await trio.sleep(5)
    nursery.start_soon(world.serve)
    before = world.group.log.last_index
    await trio.sleep(0.1)
    assert len(world.bodies()) == 4
    assert world.group.log.last_index == before + 2


async def test_an_entry_of_unknown_outcome_is_never_delivered_twice(
    world: World, nursery: trio.Nursery
) -> None:
    world.delay(1, b"a", b"b")
    nursery.start_soon(world.serve)
    await trio.sleep(0.9995)
    world.group.commit_latency_s = 0.5
    await trio.sleep(0.01)
    assert world.group.waiting == 1
    # Appended, then deposed before the answer: its outcome is unknown, but it is in the log.
    world.group.append()
    world.depose()
    await trio.sleep(1)
    assert world.bodies() == []
    world.group.lead()
    nursery.start_soon(world.serve)
    await trio.sleep(5)
    assert world.bodies() == [b"a", b"b"]
    assert world.group.state.delay_progress == {1: 2}


async def test_schedule_waits_out_the_same_leadership(world: World, nursery: trio.Nursery) -> None:
    world.delay(1, b"a")
    world.group.stalled = True
    nursery.start_soon(world.serve)
    await trio.sleep(1.5)
    world.group.time_out()
    await trio.sleep(10)
    assert world.group.log.last_index == 2, "not proposed again"
    world.group.stalled = False
    world.group.apply()
    assert world.bodies() == [b"a"]
    world.delay(1, b"b")
    await trio.sleep(1.1)
    assert world.bodies() == [b"a", b"b"]


async def test_a_refusal_in_the_same_leadership_is_tried_again(
    world: World, nursery: trio.Nursery
) -> None:
    world.delay(1, b"a")
    world.group.refuse = NotLeaderError(None, 1)
    nursery.start_soon(world.serve)
    await trio.sleep(2)
    world.group.refuse = None
    await trio.sleep(1.1)
    assert world.bodies() == [b"a"]


async def test_clock_set_back_delays_by_the_level_at_most(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.delay(2, b"a")
    await trio.sleep(2)
    world.clock.skew_ms = -3_600_000
    world.delay(2, b"b")
    await trio.sleep(2.9)
    assert world.bodies() == []
    await trio.sleep(0.2)
    assert world.bodies() == [b"a"], "five seconds after it was seen, an hour before its time"
    await trio.sleep(1.7)
    assert world.bodies() == [b"a"]
    await trio.sleep(1.4)
    assert world.bodies() == [b"a", b"b"]


async def test_a_leader_whose_clock_is_behind_delivers_no_earlier(
    world: World, nursery: trio.Nursery
) -> None:
    world.delay(2, b"a")
    due_ms = world.clock.wall_ms() + 5000
    world.clock.skew_ms = -2000
    nursery.start_soon(world.serve)
    await trio.sleep(4.99)
    assert world.bodies() == []
    await trio.sleep(2.1)
    (record,) = world.read()
    assert record.store_timestamp_ms >= due_ms - 2000, "by the guard, not before the full delay"


async def test_a_level_that_is_configured_no_more_is_delivered_still(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.delay(4, b"thirty")
    world.delay(1, b"one")
    monkeypatch.setitem(globals(), "LEVELS_MS", (1000, 5000))
    nursery.start_soon(world.serve)
    await trio.sleep(29)
    assert world.bodies() == [b"one"]
    await trio.sleep(2)
    assert world.bodies() == [b"one", b"thirty"]


async def test_a_longer_delay_counts_that_was_configured_between(
    world: World, nursery: trio.Nursery
) -> None:
    world.delay(2, b"five")
    world.group.delay_ms = {2: 60_000}
    world.delay(2, b"sixty")
    world.group.delay_ms = DEFAULT_DELAY_MS
    world.delay(2, b"five more")
    nursery.start_soon(world.serve)
    await trio.sleep(59.9)
    assert world.bodies() == [b"five"]
    await trio.sleep(0.2)
    assert world.bodies() == [b"five", b"sixty", b"five more"]


async def test_a_topic_that_is_being_deleted_holds_its_level(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    world.deleting.add("gone")
    world.delay(1, b"a")
    world.delay(1, b"b", topic="gone")
    world.delay(1, b"c")
    world.delay(2, b"other level")
    await trio.sleep(6)
    assert (world.bodies(), world.bodies("gone")) == ([b"a", b"other level"], [])
    world.deleting.clear()
    await trio.sleep(2)
    assert (world.bodies(), world.bodies("gone")) == ([b"a", b"other level", b"c"], [b"b"])
