"""Consumes from brokers that fail in many ways: nothing is skipped, order is kept, all is let go.

The group is modelled after docs/concepts/locks.md and docs/how-to/push.md. Its members share what
is stored. They are busy at times, lose requests before and after they carry them out, take them
late, and are elected and killed in turn; consumers come and go, and their listeners fail.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import pytest
import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    DeliveredMessage,
    retry_topic_of,
)
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.process_queue import FlowLimits
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import request
from tests.harness.fast_part import tested_part
from tests.unit.client.consumer.faulty_group import (
    GROUP,
    FaultyGroup,
    Ledger,
    Place,
    play,
    play_many,
)
from tests.unit.client.fake_cluster import Broker, Group, World

pytestmark = pytest.mark.usefixtures("autojump_clock")

MESSAGES: Final = 24
QUEUE_COUNT: Final = 3
FAULTS_S: Final = 90.0
HEALED_S: Final = 150.0
"""So long after the faults have ended all is consumed: locks of the dead have expired by then."""
QUIET_S: Final = 40.0
"""In a quiet group a message is consumed, and its offset committed, within this."""
LEAVES_S: Final = 15.0
"""5 s for listeners, 3 s each for offsets, for locks and for locks of listeners, 1 s for a word."""
RETRY: Final = retry_topic_of(GROUP)
DEAD: Final = f"%DLQ%{GROUP}"


class Member:
    """A place for consumers of the group, one after the other."""

    def __init__(
        self, world: World, rng: random.Random, ledger: Ledger, config: PushConfig, orderly: bool
    ) -> None:
        self.consumer: PushConsumer | None = None
        self.is_calm = False
        self._world = world
        self._rng = rng
        self._ledger = ledger
        self._config = config
        self._orderly = orderly

    async def run(self, until_s: float, leave: trio.Event) -> None:
        """Come and go until then, and stay until *leave*."""
        rng = self._rng
        while trio.current_time() < until_s:
            await trio.sleep(rng.uniform(0.0, 3.0))
            async with self._world.client() as client:
                stay_s = rng.uniform(0.0, 30.0)
                with trio.move_on_after(stay_s if rng.random() < 0.3 else 1e9):
                    await self._consume(client, partial(self._stay, stay_s))
        async with self._world.client() as client:
            await self._consume(client, leave.wait)

    async def _stay(self, stay_s: float) -> None:
        until_s = trio.current_time() + stay_s
        while trio.current_time() < until_s:
            await trio.sleep(self._rng.uniform(0.0, until_s - trio.current_time() + 0.01))
            assert self.consumer is not None
            if self._rng.random() < 0.3:
                self.consumer.suspend()
                await trio.sleep(self._rng.uniform(0.0, 2.0))
                self.consumer.resume()

    async def _consume(self, client: ClientInstance, stay: Callable[[], Awaitable[None]]) -> None:
        began_s = 0.0
        consumer = PushConsumer(
            client, GROUP, self._listen, {"T": "a"}, self._config, orderly=self._orderly
        )
        try:
            async with consumer:
                self.consumer = consumer
                try:
                    await stay()
                finally:
                    began_s = trio.current_time()
        finally:
            took_s = trio.current_time() - began_s
            if began_s and took_s > LEAVES_S + 0.1:
                self._ledger.broken.append(f"left after {took_s:.1f} s")

    async def _listen(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        ledger, queue = self._ledger, context.queue
        key = (queue.broker_name, queue.topic, queue.queue_id)
        places = [(*key, message.queue_offset) for message in messages]
        if any(message.properties.get("TAGS") != "a" for message in messages):
            ledger.broken.append(f"{places}: a message that is not wanted")
        if self._orderly:
            if key in ledger.running:
                ledger.broken.append(f"{key}: two listeners at a time")
            skipped = [n for n in range(places[0][-1]) if (*key, n) not in ledger.done]
            if skipped:
                ledger.broken.append(f"{places}: {skipped} comes later")
        ledger.running.add(key)
        try:
            return await self._answer(places, context)
        finally:
            ledger.running.discard(key)

    async def _answer(self, places: list[Place], context: ConsumeContext) -> ConsumeStatus | None:
        rng, ledger = self._rng, self._ledger
        ledger.consumed += places
        done = len(places)
        if not self.is_calm:
            await trio.sleep(rng.choice([0.0, 0.0, 0.1, 1.0, 4.0, rng.uniform(0, 40)]))
            happens = rng.random()
            if happens < 0.15:
                raise ValueError("the listener's own")
            if happens < 0.3:
                context.delay_level_when_next_consume = rng.choice([-1, 0, 3])
                return rng.choice(
                    [ConsumeStatus.RECONSUME_LATER, ConsumeStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT]
                )
            if happens < 0.4 and not self._orderly:
                done = rng.randrange(len(places) + 1)
                context.ack_index = done - 1
        ledger.done.update(places[:done])
        return None


def store(world: World, rng: random.Random, ledger: Ledger, number: int) -> Place:
    """Store a message in any queue; return where. Those with tag b are not wanted."""
    group = rng.choice(list(world.groups.values()))
    queue_id = rng.randrange(QUEUE_COUNT)
    tag = b"b" if rng.random() < 0.2 else b"a"
    body = b"%04d" % number + bytes(rng.randrange(200))
    record = decode_record(
        encode_record(
            topic="T", queue_id=queue_id, body=body, properties=b"TAGS\x01" + tag + b"\x02"
        )
    )
    place = (group.name, "T", queue_id, len(group.queue("T", queue_id)))
    if tag == b"b":
        ledger.done.add(place)
    group.store("T", queue_id, record)
    return place


def everything(world: World) -> dict[Place, bytes]:
    """Return all that the consumer group is to deal with."""
    return {
        (name, topic, queue_id, offset): bytes(decode_record(record).body)
        for name, group in world.groups.items()
        for (topic, queue_id), records in group.queues.items()
        if topic in ("T", RETRY)
        for offset, record in enumerate(records)
    }


class Play:
    """One group of consumers, and what happens to it."""

    def __init__(self, world: World, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.world = world
        self.ledger = Ledger()
        self.orderly = rng.random() < 0.5
        config = PushConfig(
            consume_from=FROM_FIRST,
            consume_tasks=rng.choice([1, 2, 20]),
            consume_message_batch_max_size=rng.choice([1, 1, 3]),
            pull_batch_size=rng.choice([1, 4, 32]),
            flow_limits=rng.choice(
                [
                    FlowLimits(),
                    FlowLimits(max_messages=3),
                    FlowLimits(max_bytes=300),
                    FlowLimits(max_offset_span=2),
                ]
            ),
            consume_timeout_s=rng.choice([5.0, 900.0]),
            max_reconsume_times=rng.choice([-1, 2]),
        )
        self.members = [
            Member(world, rng, self.ledger, config, self.orderly)
            for _ in range(rng.choice([1, 2, 3]))
        ]
        self.groups = [FaultyGroup(g, rng, self.ledger) for g in world.groups.values()]
        self.stored = 0

    async def run(self) -> None:
        """Play; the ledger has what was broken."""
        leave = trio.Event()
        until_s = trio.current_time() + FAULTS_S
        async with trio.open_nursery() as nursery:
            for group in self.groups:
                nursery.start_soon(group.run, until_s)
            for member in self.members:
                nursery.start_soon(member.run, until_s, leave)
            await self._send(MESSAGES, FAULTS_S * 0.9)
            await trio.sleep_until(until_s)
            for member in self.members:
                member.is_calm = True
            await trio.sleep(HEALED_S)
            self._check_consumed()
            self._check_owned()
            if not self.ledger.broken:
                await self._be_quiet()
                await self._reset()
                await self._send(5, 2.0)
                await trio.sleep(2.0)
            leave.set()
        if not self.ledger.broken:
            self._check_left()

    async def _send(self, count: int, within_s: float) -> list[Place]:
        places = []
        for _ in range(count):
            places.append(store(self.world, self.rng, self.ledger, self.stored))
            self.stored += 1
            await trio.sleep(self.rng.uniform(0, 2 * within_s / count))
        return places

    def _check_consumed(self) -> None:
        for place in everything(self.world):
            if place not in self.ledger.done:
                self.ledger.broken.append(f"{place} is not consumed")
        for group in self.world.groups.values():
            for (topic, queue_id), records in group.queues.items():
                at = group.committed.get((GROUP, topic, queue_id), 0)
                if topic != DEAD and at != len(records):
                    self.ledger.broken.append(f"{topic}/{queue_id}: {at} of {len(records)} stored")

    def _check_owned(self) -> None:
        consumers = [member.consumer for member in self.members if member.consumer is not None]
        assert len(consumers) == len(self.members)
        owned = [queue for consumer in consumers for queue in consumer.queues]
        wanted = {
            MessageQueue(topic, name, number)
            for name, group in self.world.groups.items()
            for topic, numbers in group.topics.items()
            if topic in ("T", RETRY)
            for number in range(numbers)
        }
        if sorted(owned) != sorted(wanted):
            self.ledger.broken.append(f"owned are {sorted(owned)}")
        for consumer in consumers:
            for item in consumer._owned:
                assert item.messages is not None
                if len(item.messages) or item.messages.cached_bytes or item.messages.waiting:
                    self.ledger.broken.append(f"{item.queue}: {item.messages.cached_bytes} held")

    async def _be_quiet(self) -> None:
        self.ledger.consumed.clear()
        places = await self._send(5, 2.0)
        await trio.sleep(QUIET_S)
        self._check_consumed_once(places)
        self._check_consumed()

    def _check_consumed_once(self, places: list[Place]) -> None:
        kept = everything(self.world)
        wanted = [p for p in places if self._is_wanted(p)]
        if sorted(self.ledger.consumed) != sorted(wanted):
            self.ledger.broken.append(f"{self.ledger.consumed} was consumed, not {wanted}")
        assert kept.keys() >= set(wanted)

    def _is_wanted(self, place: Place) -> bool:
        name, topic, queue_id, offset = place
        stored = self.world.groups[name].queue(topic, queue_id)[offset]
        return decode_record(stored).property_map["TAGS"] == "a"

    async def _reset(self) -> None:
        """An operator moves queues back; what stands there comes once more, and once only."""
        self.ledger.consumed.clear()
        places: list[Place] = []
        for name, group in self.world.groups.items():
            table = {}
            for queue_id in range(QUEUE_COUNT):
                end = len(group.queue("T", queue_id))
                begin = self.rng.randint(0, end)
                table[bodies.MessageQueue("T", name, queue_id)] = begin
                places += [(name, "T", queue_id, n) for n in range(begin, end)]
            body = bodies.ResetOffsetBody(offset_table=table).encode()
            ext = {"topic": "T", "group": GROUP, "timestamp": "0", "isForce": "true"}
            for connection in self._leader(group).consumers[GROUP]:
                code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
                connection.invoke_oneway(request(code, dict(ext), body))
        await trio.sleep(QUIET_S)
        self._check_consumed_once(places)
        self._check_consumed()

    def _leader(self, group: Group) -> Broker:
        return next(broker for broker in group.brokers if broker.leads)

    def _check_left(self) -> None:
        self._check_consumed()
        for group in self.world.groups.values():
            if group.locks:
                self.ledger.broken.append(f"locks left: {group.locks}")


TOPICS: Final = {"T": QUEUE_COUNT}


@pytest.mark.parametrize("seed", [2, 4, 8])
async def test_consumers_of_faulty_brokers_skip_nothing(seed: int) -> None:
    assert await play(Play, seed, TOPICS)


@pytest.mark.slow
@pytest.mark.parametrize("first", tested_part(range(1000, 1100, 25), 1))
async def test_many_consumers_of_faulty_brokers_skip_nothing(first: int) -> None:
    every = await play_many(Play, first, TOPICS)
    assert every == {"busy", "late", "lost after", "lost before"}
