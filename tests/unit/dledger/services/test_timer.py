"""Messages with a time of their own: once, never early, or recalled, whatever happens.

Offsets come out in the order of their times, whole seconds, never before.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dledger.broker_errors import PendingFullError
from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.commitlog.record import encode_record
from dledger.services import timer
from dledger.services.delayed_message import TimerClaims, due_ms, timed_properties
from dledger.services.timer import HOUR_MS, TimerIndex, TimerMessageService
from dledger.state.state_record import TimersChange, state_batch
from tests.harness.leader_services import ServedGroup

DAY_S = 24 * 3600


class World(ServedGroup):
    """A group with its timer service on virtual time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, segment_bytes=8 << 20)
        self.claims = TimerClaims(self.group)
        self.deleting: set[str] = set()
        self.entry_bytes_max = 1 << 23

    def schedule(self, delay_s: float, *bodies: bytes, topic: str = "T", queue_id: int = 0) -> None:
        """Store messages that are due in *delay_s* as the send processor does."""
        due = due_ms(self.clock.wall_ms() + int(delay_s * 1000))
        records = [
            encode_record(
                topic=TIMER_TOPIC,
                queue_id=0,
                body=body,
                properties=timed_properties(b"UNIQ_KEY\x01K%b\x02" % body, topic, queue_id, due),
            )
            for body in bodies
        ]
        self.put(TIMER_TOPIC, 0, records)

    def recall(self, offset: int) -> None:
        """Recall a message as the recall processor does."""
        assert self.claims.claim(offset)
        self.group.store(TimersChange(recalled=(offset,)))

    async def serve(self) -> None:
        """Run the service as a leadership does."""
        service = TimerMessageService(
            self.group,
            self.clock,
            claims=self.claims,
            is_deleting=self.deleting.__contains__,
            entry_bytes_max=self.entry_bytes_max,
        )
        await self.lead(service.run)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


async def test_timers_deliver_when_due_in_order(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.schedule(7, b"seven")
    world.schedule(3 * DAY_S, b"days")
    world.schedule(2, b"two", b"two again")
    await trio.sleep(1.999)
    assert world.bodies() == []
    await trio.sleep(0.01)
    assert world.bodies() == [b"two", b"two again"]
    await trio.sleep(5)
    assert world.bodies() == [b"two", b"two again", b"seven"]
    assert len(world.group.state.timers) == 1
    await trio.sleep(3 * DAY_S - 8)
    assert len(world.bodies()) == 3
    await trio.sleep(2)
    assert world.bodies()[-1] == b"days"
    assert all(
        record.store_timestamp_ms >= int(record.property_map["TIMER_OUT_MS"])
        for record in world.read()
    )


async def test_timers_are_not_early_with_a_late_clock(world: World, nursery: trio.Nursery) -> None:
    world.schedule(5, b"five")
    world.clock.skew_ms = -3000
    nursery.start_soon(world.serve)
    await trio.sleep(7.9)
    assert world.bodies() == []
    await trio.sleep(0.2)
    assert world.bodies() == [b"five"]


async def test_a_recalled_message_never_comes(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.schedule(5, b"a", b"b", b"c")
    await trio.sleep(1)
    world.recall(1)
    await trio.sleep(9)
    assert world.bodies() == [b"a", b"c"]
    assert not world.claims.claim(1)
    assert not world.claims.claim(0)


async def test_a_recall_on_its_way_holds_the_delivery_back(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.schedule(5, b"a", b"b")
    assert world.claims.claim(0)
    await trio.sleep(8)
    assert world.bodies() == [b"b"]
    world.claims.give_back([0])  # it was not stored
    await trio.sleep(2)
    assert world.bodies() == [b"b", b"a"]


async def test_what_the_log_did_not_take_is_tried_again(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.schedule(1, b"a", b"b")
    world.group.refuse = PendingFullError("full")
    await trio.sleep(3)
    assert world.bodies() == []
    assert len(world.claims) == 0
    world.group.refuse = None
    await trio.sleep(2)
    assert world.bodies() == [b"a", b"b"]


async def test_a_topic_that_is_being_deleted_holds_only_its_own_back(
    world: World, nursery: trio.Nursery
) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.deleting.add("gone")
    world.schedule(1, b"a", topic="gone")
    world.schedule(1, b"b")
    await trio.sleep(2)
    assert (world.bodies("gone"), world.bodies()) == ([], [b"b"])
    world.deleting.clear()
    await trio.sleep(2)
    assert world.bodies("gone") == [b"a"]


async def test_an_entry_holds_no_more_bytes_and_messages_than_it_may(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "MAX_DELIVERIES_PER_ENTRY", 3)
    world.entry_bytes_max = 5000
    world.schedule(1, *(b"%04d" % i for i in range(8)))
    world.schedule(1, *(b"%02d" % i * 700 for i in range(4)))
    nursery.start_soon(world.serve)
    await trio.sleep(3)
    assert [body[:4] for body in world.bodies()] == [
        *(b"%04d" % i for i in range(8)),
        *(b"%02d" % i * 2 for i in range(4)),
    ]
    counts = [
        len(item.units)
        for applied in world.group.applied
        for item in applied.units
        if item.topic == "T"
    ]
    assert counts == [3, 3, 2, 1, 1, 1, 1]


async def test_long_timer_is_rolled_and_delivered_once(world: World, nursery: trio.Nursery) -> None:
    nursery.start_soon(world.serve)
    await trio.sleep(0)
    world.schedule(3 * DAY_S, b"a", b"b")
    world.schedule(3 * DAY_S, b"recalled")
    await trio.sleep(DAY_S)
    world.recall(2)
    assert world.group.state.timers.lowest == 0
    await trio.sleep(DAY_S + 120)
    assert world.group.state.timers.lowest == 3
    assert len(world.group.state.timers) == 2
    await trio.sleep(DAY_S)
    assert world.bodies() == [b"a", b"b"]
    assert [r.property_map["TIMER_ROLL_TIMES"] for r in world.read()] == ["1", "1"]


async def test_a_message_is_not_delivered_by_two_entries(world: World) -> None:
    world.schedule(1, b"a")
    batch = state_batch(TimersChange(done=(0,)))
    world.group.propose(batch, lambda _: None)
    world.group.settle()
    world.group.propose(batch, lambda _: None)
    with pytest.raises(InvariantBroken, match="timer message 0"):
        world.group.settle()


TIMES = st.lists(st.integers(0, 3 * 3600).map(lambda second: second * 1000), max_size=60)


def filled(times: list[int], first: int = 0) -> TimerIndex:
    index = TimerIndex()
    add(index, times, first)
    return index


def add(index: TimerIndex, times: list[int], first: int) -> None:
    index.add(np.arange(first, first + len(times)), np.array(times, np.int64))


@given(TIMES, TIMES, st.integers(0, 4 * 3600), st.integers(1, 7))
def test_offsets_come_in_order_and_none_before_its_time(
    before: list[int], later: list[int], now_s: int, count: int
) -> None:
    index = filled(before)
    index.take(now_s * 500, 0)  # opens some hours
    add(index, later, len(before))
    due = sorted((time, offset) for offset, time in enumerate([*before, *later]))
    now_ms = now_s * 1000
    taken: list[int] = []
    while part := index.take(now_ms, count):
        assert len(part) <= count
        taken += part
    assert taken == [offset for time, offset in due if time <= now_ms]
    assert len(index) == len(due) - len(taken)
    left = [time for time, _ in due if time > now_ms]
    next_ms = index.next_ms()
    if left:
        assert next_ms is not None
        assert min(left) - HOUR_MS < next_ms <= min(left)
    else:
        assert next_ms is None


def test_what_is_put_back_comes_first() -> None:
    index = filled([1000, 1000, 2000, 3000])
    assert index.take(2500, 3) == [0, 1, 2]
    index.put_back([1, 2], 2500)
    add(index, [2000], 4)
    assert len(index) == 4
    assert index.take(2500, 9) == [1, 2, 4]
    assert index.take(3000, 9) == [3]


def test_it_wakes_for_the_hour_and_then_for_the_second() -> None:
    index = filled([HOUR_MS + 5000])
    assert index.next_ms() == HOUR_MS
    assert index.take(HOUR_MS, 1) == []
    assert index.next_ms() == HOUR_MS + 5000
