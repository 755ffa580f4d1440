"""Polls brokers that fail in many ways: nothing is skipped, order is kept, seeks and pauses count.

The consumers are modelled after docs/how-to/push.md and the documents of `LitePullConsumer`. They
share queues or have them assigned, seek, pause, commit, are cancelled and closed at any moment, and
come back. Retention removes what is next, and a leader may have lost the end of a queue.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import pytest
import trio

from dledger.client.consumer.listener import DeliveredMessage
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.owned_queues import OwnedQueue
from dledger.client.consumer.process_queue import FlowLimits
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, ClientError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.outcome import answer as outcome_answer
from tests.unit.client.consumer.faulty_group import GROUP, FaultyGroup, Ledger, play, play_many
from tests.unit.client.fake_cluster import Broker, Group, World

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]

MESSAGES: Final = 40
QUEUE_COUNT: Final = 4
FAULTS_S: Final = 60.0
HEALED_S: Final = 60.0
"""So long after the faults have ended all is consumed: 23 s are a pull at a broker that hangs."""
QUIET_S: Final = 10.0
"""In a quiet group a message is consumed, and its offset committed, within this."""
LEAVES_S: Final = 4.5
"""3 s for offsets, 1 s for the brokers to know."""


class PolledGroup(FaultyGroup):
    """The members of a group whose queues lose their beginnings and their ends.

    Attributes:
        first: The first offset that is kept of each queue.
        longest: How far each queue went before it lost its end.
    """

    def __init__(self, group: Group, rng: random.Random, ledger: Ledger) -> None:
        super().__init__(group, rng, ledger)
        self.first: Counter[int] = Counter()
        self.longest: Counter[int] = Counter()

    def remove(self, queue_id: int) -> None:
        """Let retention remove the beginning of a queue."""
        end = len(self.group.queue("T", queue_id))
        self.first[queue_id] = min(self.first[queue_id] + self._rng.randint(1, 4), end)
        self._free(queue_id, self.first[queue_id])

    def lose_end(self, queue_id: int) -> None:
        """Let a queue be shorter than it was: what is stored there next may be passed over."""
        records = self.group.queue("T", queue_id)
        self.longest[queue_id] = max(self.longest[queue_id], len(records))
        self._free(queue_id, len(records), max(self.first[queue_id], len(records) - 3))
        del records[max(self.first[queue_id], len(records) - self._rng.randint(1, 3)) :]

    def _free(self, queue_id: int, end: int, begin: int = 0) -> None:
        self.ledger.done |= {(self.group.name, "T", queue_id, n) for n in range(begin, end)}

    def _pull(self, broker: Broker, asked: RemotingCommand) -> Handled:
        first = self.first[int(asked.ext["queueId"])]
        if int(asked.ext["queueOffset"]) < first:
            self.ledger.met.add("removed")
            return outcome_answer(
                asked,
                Condition.OFFSET_MOVED,
                nextBeginOffset=first,
                minOffset=first,
                maxOffset=len(self.group.queue("T", int(asked.ext["queueId"]))),
                suggestWhichBrokerId=0,
            )
        answer = super()._pull(broker, asked)
        if isinstance(answer, RemotingCommand) and answer.code == 21:
            self.ledger.met.add("lost its end")
        return answer


@dataclass
class Position:
    """Where a consumer reads a queue next, as far as that is known.

    Attributes:
        owned: It counts while the queue is owned as this.
    """

    owned: OwnedQueue
    offset: int


class Watched(LitePullConsumer):
    """Notes what it owns when, and where it is sent."""

    began: Callable[[OwnedQueue], None]
    sought: Callable[[MessageQueue, int], None]

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self.sought(queue, offset)
        super().seek(queue, offset)

    async def _own(self, owned: OwnedQueue) -> None:
        self.began(owned)
        await super()._own(owned)


class Reader:
    """What one consumer was asked for, and what its polls may return."""

    def __init__(
        self,
        consumer: Watched,
        groups: dict[str, PolledGroup],
        ledger: Ledger,
        is_wanted: Callable[[bytes], bool],
    ) -> None:
        self.consumer = consumer
        self.paused: set[MessageQueue] = set()
        self._groups = groups
        self._ledger = ledger
        self._is_wanted = is_wanted
        self._positions: dict[MessageQueue, Position] = {}
        self._sought: dict[MessageQueue, int] = {}
        self._shaken: set[MessageQueue] = set()
        self._in_hand: list[DeliveredMessage] = []
        consumer.began = self._began
        consumer.sought = self._note_seek

    def _began(self, owned: OwnedQueue) -> None:
        self._shaken.discard(owned.queue)
        sought = self._sought.pop(owned.queue, None)
        if sought is not None:
            self._positions[owned.queue] = Position(owned, sought)

    def _note_seek(self, queue: MessageQueue, offset: int) -> None:
        owned = self.consumer._owned.get(queue)
        key = (queue.broker_name, queue.topic, queue.queue_id)
        self._ledger.done |= {(*key, n) for n in range(offset)}
        if owned is not None:
            self._in_hand = [m for m in self._in_hand if m.message_queue != queue]
        self._positions.pop(queue, None)
        self._sought.pop(queue, None)
        self._shaken.discard(queue)
        if offset > len(self._groups[queue.broker_name].group.queue("T", queue.queue_id)):
            return  # where it goes on then is known when it is asked for
        if owned is None:
            self._sought[queue] = offset
        else:
            self._positions[queue] = Position(owned, offset)

    def moved(self, queue: MessageQueue) -> None:
        """*queue* has lost its end: where it is read is not known until the next beginning."""
        self._positions.pop(queue, None)
        self._shaken.add(queue)

    def acknowledge(self) -> None:
        """What was polled counts as dealt with from now on."""
        for message in self._in_hand:
            queue = message.message_queue
            place = (queue.broker_name, queue.topic, queue.queue_id, message.queue_offset)
            self._ledger.done.add(place)
        self._in_hand.clear()

    def polled(self, messages: list[DeliveredMessage]) -> None:
        """Judge what a poll has returned."""
        if not messages:
            return
        broken = self._ledger.broken
        queue = messages[0].message_queue
        offsets = [message.queue_offset for message in messages]
        name = f"{queue.broker_name}/{queue.queue_id}: {offsets}"
        if queue in self.paused:
            broken.append(f"{name}: polled while it is paused")
        if {message.message_queue for message in messages} != {queue}:
            broken.append(f"{name}: of several queues")
        if not all(self._is_wanted(bytes(message.body)) for message in messages):
            broken.append(f"{name}: not wanted")
        owned = self.consumer._owned.get(queue)
        known = self._positions.get(queue)
        if owned is None:
            broken.append(f"{name}: not owned")
            return
        if known is not None and known.owned is owned:
            self._ledger.met.add("position known")
            if not self._are_next(queue, known.offset, offsets[0]):
                broken.append(f"{name}: expected from {known.offset}")
        elif not self._may_pass(queue, 0, offsets[0]):
            broken.append(f"{name}: skips what is before")
        if queue not in self._shaken:
            for before, offset in pairwise(offsets):
                if not self._are_next(queue, before + 1, offset):
                    broken.append(f"{name}: not in order")
            self._positions[queue] = Position(owned, offsets[-1] + 1)
        self._in_hand += messages

    def _are_next(self, queue: MessageQueue, begin: int, offset: int) -> bool:
        """Whether a message at *offset* is the next one from *begin* on that there is to read."""
        group = self._groups[queue.broker_name]
        records = group.group.queue(queue.topic, queue.queue_id)
        kept = range(max(begin, group.first[queue.queue_id]), min(offset, len(records)))
        between = [bytes(decode_record(records[n]).body) for n in kept]
        return offset >= begin and not any(self._is_wanted(body) for body in between)

    def _may_pass(self, queue: MessageQueue, begin: int, end: int) -> bool:
        """Whether all in between is dealt with, in hand, removed or not wanted."""
        key = (queue.broker_name, queue.topic, queue.queue_id)
        in_hand = {m.queue_offset for m in self._in_hand if m.message_queue == queue}
        group = self._groups[queue.broker_name]
        records = group.group.queue(queue.topic, queue.queue_id)
        return all(
            (*key, n) in self._ledger.done or n in in_hand or n < group.first[queue.queue_id]
            for n in range(begin, min(end, len(records)))
        )


class Member:
    """A place for consumers, one after the other, each with a task that polls."""

    def __init__(self, played: Play) -> None:
        self.reader: Reader | None = None
        self.is_calm = False
        self._played = played
        self._rng = played.rng

    async def run(self, until_s: float, leave: trio.Event) -> None:
        """Come and go until then, and stay until *leave*."""
        rng, world = self._rng, self._played.world
        while trio.current_time() < until_s:
            await trio.sleep(rng.uniform(0.0, 3.0))
            how = rng.choice(["ends", "is cancelled", "is abandoned"])
            async with world.client() as client:
                stay_s = rng.uniform(0.0, 25.0)
                with trio.move_on_after(stay_s if how == "is cancelled" else 1e9):
                    stay_s = min(stay_s, until_s - trio.current_time())
                    disturb = partial(self._disturb, stay_s, client, how)
                    await self._consume(client, disturb, self._played.auto_commit)
        async with world.client() as client:
            await self._consume(client, partial(self._be_calm, leave), True)

    async def _consume(
        self, client: ClientInstance, stay: Callable[[], Awaitable[None]], auto_commit: bool
    ) -> None:
        played, rng = self._played, self._rng
        consumer = Watched(
            client,
            GROUP,
            consume_from=FROM_FIRST,
            auto_commit=auto_commit,
            flow_limits=played.flow_limits,
            pull_batch_size=rng.choice([1, 3, 32]),
        )
        self.reader = Reader(consumer, played.groups, played.ledger, played.is_wanted)
        if not played.assigns:
            consumer.subscribe("T", played.expression)
        began_s = 0.0
        async with trio.open_nursery() as nursery:
            try:
                async with consumer:
                    nursery.start_soon(self._poll, self.reader)
                    try:
                        await stay()
                    finally:
                        began_s = trio.current_time()
            finally:
                took_s = trio.current_time() - began_s
                if began_s and took_s > LEAVES_S:
                    played.ledger.broken.append(f"left after {took_s:.1f} s")
        took_s = trio.current_time() - began_s
        if took_s > LEAVES_S + 4.0:
            played.ledger.broken.append(f"polled on for {took_s:.1f} s")

    async def _poll(self, reader: Reader) -> None:
        """Poll, give up polls, and commit, until the consumer is closed."""
        rng = self._rng
        while True:
            patience_s = rng.choice([0.0, 0.01, 0.5, 2.0, 1e9])
            if self.is_calm:
                patience_s = 1e9
            try:
                with trio.move_on_after(patience_s):
                    reader.acknowledge()
                    wait_s = rng.choice([0.0, 0.1, 1.0, 5.0, 3600.0])
                    most = rng.choice([1, 2, 32])
                    reader.polled(await reader.consumer.poll(wait_s, max_messages=most))
                if not self.is_calm and rng.random() < 0.2:
                    with trio.move_on_after(rng.choice([0.0, 0.5, 1e9])):
                        reader.acknowledge()
                        await reader.consumer.commit()
            except ClientClosedError:
                return
            await trio.sleep(0.01 if self.is_calm else rng.choice([0.0, 0.01, 0.3, 2.0]))

    async def _disturb(self, stay_s: float, client: ClientInstance, how: str) -> None:
        """Seek, pause, resume and assign at random."""
        rng, reader = self._rng, self.reader
        assert reader is not None
        until_s = trio.current_time() + stay_s
        while trio.current_time() < until_s:
            queue = rng.choice(self._played.queues)
            happens = rng.random()
            if happens < 0.25:
                self._seek(reader, queue)
            elif happens < 0.35:
                await self._seek_to_bound(reader, queue)
            elif happens < 0.5:
                reader.paused.add(queue)
                reader.consumer.pause([queue])
            elif happens < 0.7:
                reader.paused.discard(queue)
                reader.consumer.resume([queue])
            elif self._played.assigns:
                queues = rng.sample(self._played.queues, rng.randint(0, len(self._played.queues)))
                await reader.consumer.assign(queues)
                if rng.random() < 0.3:
                    self._seek(reader, queue)
            await trio.sleep(rng.choice([0.0, 0.0, 0.2, 1.0, 5.0]))
        if how == "is abandoned":
            client.abandon()

    def _seek(self, reader: Reader, queue: MessageQueue) -> None:
        end = len(self._played.groups[queue.broker_name].group.queue("T", queue.queue_id))
        offset = self._rng.choice([0, self._rng.randint(0, end), end + self._rng.randint(1, 5)])
        reader.consumer.seek(queue, offset)

    async def _seek_to_bound(self, reader: Reader, queue: MessageQueue) -> None:
        consumer, rng = reader.consumer, self._rng
        with trio.move_on_after(rng.choice([0.0, 0.5, 1e9])):
            try:
                await rng.choice([consumer.seek_to_begin, consumer.seek_to_end])(queue)
            except ClientError:
                pass

    async def _be_calm(self, leave: trio.Event) -> None:
        assert self.reader is not None
        if self._played.assigns:
            await self.reader.consumer.assign(self._played.queues)
        await leave.wait()


class Play:
    """One group of consumers, and what happens to it."""

    def __init__(self, world: World, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.world = world
        self.ledger = Ledger()
        self.assigns = rng.random() < 0.4
        self.expression = "*" if self.assigns or rng.random() < 0.5 else "a"
        self.auto_commit = rng.random() < 0.8
        self.flow_limits = rng.choice(
            [FlowLimits(max_offset_span=None), FlowLimits(3, 1000, None), FlowLimits(1, 10, None)]
        )
        self.groups = {
            name: PolledGroup(group, rng, self.ledger) for name, group in world.groups.items()
        }
        self.queues = [
            MessageQueue("T", name, number) for name in self.groups for number in range(QUEUE_COUNT)
        ]
        count = 1 if self.assigns else rng.choice([1, 2, 3])
        self.members = [Member(self) for _ in range(count)]
        self.stored = 0

    async def run(self) -> None:
        """Play; the ledger has what was broken."""
        leave = trio.Event()
        until_s = trio.current_time() + FAULTS_S
        async with trio.open_nursery() as nursery:
            for group in self.groups.values():
                nursery.start_soon(group.run, until_s)
            for member in self.members:
                nursery.start_soon(member.run, until_s, leave)
            await self._store_and_lose(until_s)
            for member in self.members:
                member.is_calm = True
            self._fill()
            await trio.sleep(HEALED_S)
            self._check()
            if not self.ledger.broken:
                self.ledger.consumed.clear()
                for _ in range(5):
                    self._store(self.rng.choice(self.queues))
                await trio.sleep(QUIET_S)
                self._check()
            leave.set()

    async def _store_and_lose(self, until_s: float) -> None:
        rng = self.rng
        for _ in range(MESSAGES):
            self._store(rng.choice(self.queues))
            await trio.sleep(rng.uniform(0.0, 1.8 * FAULTS_S / MESSAGES))
            happens = rng.random()
            queue = rng.choice(self.queues)
            if happens < 0.05:
                self.groups[queue.broker_name].remove(queue.queue_id)
            elif happens < 0.1:
                self._lose_end(queue)
        await trio.sleep_until(until_s)

    def _lose_end(self, queue: MessageQueue) -> None:
        self.groups[queue.broker_name].lose_end(queue.queue_id)
        for member in self.members:
            if member.reader is not None:
                member.reader.moved(queue)

    def _store(self, queue: MessageQueue) -> None:
        body = self.rng.choice([b"a", b"a", b"b"]) + b"%d" % self.stored
        self.stored += 1
        properties = b"TAGS\x01" + body[:1] + b"\x02"
        record = encode_record(topic="T", queue_id=queue.queue_id, body=body, properties=properties)
        group = self.groups[queue.broker_name].group
        if not self.is_wanted(body):
            at = len(group.queue("T", queue.queue_id))
            self.ledger.done.add((queue.broker_name, "T", queue.queue_id, at))
        group.store("T", queue.queue_id, decode_record(record))

    def is_wanted(self, body: bytes) -> bool:
        """Whether the consumers want a message."""
        return self.expression == "*" or body.startswith(b"a")

    def _fill(self) -> None:
        """Make queues as long as they were, so that offsets beyond their end are none any more."""
        for queue in self.queues:
            group = self.groups[queue.broker_name]
            ends = [at for (_, _, n), at in group.group.committed.items() if n == queue.queue_id]
            wanted = max([group.longest[queue.queue_id], *ends])
            while len(group.group.queue("T", queue.queue_id)) < wanted + 6:
                self._store(queue)

    def _check(self) -> None:
        broken = self.ledger.broken
        readers = [member.reader for member in self.members if member.reader is not None]
        for queue in self.queues:
            group = self.groups[queue.broker_name]
            records = group.group.queue("T", queue.queue_id)
            key = (queue.broker_name, "T", queue.queue_id)
            for number in range(group.first[queue.queue_id], len(records)):
                if (*key, number) not in self.ledger.done:
                    broken.append(f"{key}: {number} is not consumed")
            at = group.group.committed.get((GROUP, "T", queue.queue_id), 0)
            if at != len(records):
                broken.append(f"{key}: {at} of {len(records)} committed")
        owned = [queue for reader in readers for queue in reader.consumer.queues]
        if sorted(owned) != sorted(self.queues):
            broken.append(f"owned are {sorted(owned)}")


TOPICS: Final = {"T": QUEUE_COUNT}


@pytest.mark.parametrize("seed", range(2))
async def test_polls_of_faulty_brokers_skip_nothing(seed: int) -> None:
    assert await play(Play, seed, TOPICS)


@pytest.mark.hunt
@pytest.mark.parametrize("first", range(1000, 1100, 25))
async def test_many_polls_of_faulty_brokers_skip_nothing(first: int) -> None:
    every = await play_many(Play, first, TOPICS)
    assert every >= {"busy", "late", "lost after", "lost before", "lost its end", "removed"}
