"""Takes steps at brokers that fail in many ways: each message is worked on once, ends as reported.

The group is modelled after docs/how-to/exactly-once.md and docs/reference/own-requests.md. Workers
read the same queues; they are cancelled, closed and abandoned in the middle of a step, and run out
of time. Retention removes what is not read yet.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.steps import StoredAt
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientClosedError, ClientError, OffsetIllegalError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import decode_record, encode_record
from dledger.remoting.processor import Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.outcome import answer as outcome_answer
from dledger.remoting.protocol.own_fields import COMMITS_FIELD, COMMITTED_FIELD, NO_OFFSET
from tests.harness.fast_part import tested_part
from tests.unit.client.consumer.faulty_group import GROUP, FaultyGroup, Ledger, play, play_many
from tests.unit.client.fake_cluster import Broker, Group, World

pytestmark = pytest.mark.usefixtures("autojump_clock")

MESSAGES: Final = 40
QUEUE_COUNT: Final = 3
FAULTS_S: Final = 60.0
HEALED_S: Final = 60.0
"""A worker that nothing disturbs is done within this: late steps have arrived by then, too."""
LATE_S: Final = 12.0


class StepGroup(FaultyGroup):
    """The members of a group that stores steps.

    Attributes:
        first: The first offset that is kept of each queue.
    """

    def __init__(self, group: Group, rng: random.Random, ledger: Ledger) -> None:
        super().__init__(group, rng, ledger)
        self.first: Counter[int] = Counter()
        for broker in group.brokers:
            broker.on(RequestCode.CONSUME_STEP, partial(self._take, "send", broker, self._step))

    def remove(self) -> None:
        """Let retention remove the beginning of a queue."""
        queue_id = self._rng.randrange(QUEUE_COUNT)
        end = len(self.group.queue("T", queue_id))
        self.first[queue_id] = min(self.first[queue_id] + self._rng.randint(1, 3), end)

    def _take(
        self,
        kind: str,
        broker: Broker,
        carry_out: Callable[[Broker, RemotingCommand], Handled],
        asked: RemotingCommand,
    ) -> Handled:
        if kind == "send" and broker.leads and self._rng.random() < self._chance:
            self.ledger.met.add("unknown")
            if self._rng.random() < 0.5:
                carry_out(broker, asked)
            return outcome_answer(asked, Condition.LEADERSHIP_LOST, "no majority yet")
        return super()._take(kind, broker, carry_out, asked)

    async def _take_late(
        self,
        broker: Broker,
        carry_out: Callable[[Broker, RemotingCommand], Handled],
        asked: RemotingCommand,
    ) -> RemotingCommand:
        # Also when its connection has ended meanwhile, and long after its sender has given up.
        with trio.CancelScope(shield=True):
            await trio.sleep(self._rng.choice([0.0, 1.0, LATE_S - 4.0]))
            answer = await super()._take_late(broker, carry_out, asked)
        self.ledger.met.add("late")
        return answer

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
        return super()._pull(broker, asked)

    def _step(self, broker: Broker, asked: RemotingCommand) -> Handled:
        committed = self.group.committed
        commits = asked.ext[COMMITS_FIELD]
        assert asked.ext["consumer_group"] == GROUP
        for topic, queue_id, before, _ in commits:
            stands = committed.get((GROUP, topic, queue_id), NO_OFFSET)
            if stands != before:
                self.ledger.met.add("overtaken")
                return outcome_answer(
                    asked, Condition.COMMIT_NOT_EXPECTED, "elsewhere", **{COMMITTED_FIELD: stands}
                )
        stored = broker.store_records(asked)
        committed.update({(GROUP, topic, number): to for topic, number, _, to in commits})
        return stored


@dataclass
class Attempt:
    """A step, what it is made of, and what its worker learned of it."""

    number: int
    queues: list[MessageQueue]
    bodies: list[bytes] = field(default_factory=list)
    outcome: str = "unknown"
    error: BaseException | None = None
    stored: list[StoredAt] = field(default_factory=list)


class Worker:
    """A place for consumers that work through the queues, one after the other."""

    def __init__(self, world: World, rng: random.Random, attempts: list[Attempt]) -> None:
        self._world = world
        self._rng = rng
        self._attempts = attempts

    async def run(self, until_s: float) -> None:
        """Come and go until then."""
        rng = self._rng
        while trio.current_time() < until_s:
            await trio.sleep(rng.uniform(0.0, 1.0))
            stay_s = rng.uniform(0.0, 25.0)
            how = rng.choice(["ends", "is cancelled", "is closed", "is abandoned"])
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(stay_s if how == "is cancelled" else 1e9):
                    async with self._world.client() as client:
                        works = self._consume(client, trio.current_time() + stay_s)
                        if how in ("ends", "is cancelled"):
                            await works
                            continue
                        nursery.start_soon(_awaited, works)
                        await trio.sleep(rng.uniform(0.0, stay_s))
                        if how == "is abandoned":
                            client.abandon()

    async def _consume(self, client: ClientInstance, until_s: float) -> None:
        follower_reads = self._rng.random() < 0.3
        try:
            async with PullConsumer(client, GROUP, follower_reads=follower_reads) as consumer:
                while trio.current_time() < until_s and not client.is_closed:
                    with trio.move_on_after(self._rng.choice([1e9, 1e9, 5.0, 0.5])):
                        await self.work(consumer)
                    await trio.sleep(self._rng.uniform(0.0, 0.5))
        except ClientClosedError:
            pass

    async def work(self, consumer: PullConsumer) -> bool:
        """Take one step; return whether there was anything to take."""
        rng = self._rng
        names = list(self._world.groups)
        name = rng.choice(names)
        wanted = [MessageQueue("T", name, number) for number in range(QUEUE_COUNT)]
        self._attempts.append(Attempt(len(self._attempts), []))
        attempt = self._attempts[-1]
        attempt.queues = rng.sample(wanted, rng.choice([1, 1, 2]))
        ends: dict[MessageQueue, int] = {}
        try:
            for queue in attempt.queues:
                ends[queue] = await self._read(consumer, queue, attempt)
        except ClientError:
            return True
        ends = {queue: end for queue, end in ends.items() if end >= 0}
        if not ends:
            return False
        await self._step(consumer, attempt, ends)
        return True

    async def _read(self, consumer: PullConsumer, queue: MessageQueue, attempt: Attempt) -> int:
        offset = await consumer.committed_offset(queue) or 0
        count = self._rng.choice([1, 2, 5, 32])
        try:
            result = await consumer.pull(queue, offset, max_messages=count, timeout_s=0)
        except OffsetIllegalError as error:
            return error.next_begin_offset
        attempt.bodies += [b"%d:" % attempt.number + m.body_bytes for m in result.messages]
        return result.next_begin_offset if result.next_begin_offset > offset else -1

    async def _step(
        self, consumer: PullConsumer, attempt: Attempt, ends: dict[MessageQueue, int]
    ) -> None:
        rng = self._rng
        name = attempt.queues[0].broker_name
        try:
            async with consumer.transaction(timeout_s=rng.choice([0.05, 1.0, 5.0, 10.0])) as step:
                for body in attempt.bodies:
                    to = MessageQueue("U", name, rng.randrange(2)) if rng.random() < 0.5 else None
                    step.send(Message("U", body), to)
                    await trio.sleep(rng.choice([0.0, 0.0, 0.1]))
                for queue, end in ends.items():
                    step.commit(queue, end)
                if rng.random() < 0.05:
                    raise ZeroDivisionError
        except ZeroDivisionError as error:
            attempt.outcome, attempt.error = "not_stored", error
        except ClientError as error:
            attempt.outcome, attempt.error = error.outcome, error
        else:
            attempt.outcome, attempt.stored = "stored", step.stored


async def _awaited(works: Awaitable[None]) -> None:
    await works


def store(group: Group, queue_id: int, body: bytes) -> None:
    """Store a message to be worked on."""
    record = encode_record(topic="T", queue_id=queue_id, body=body, properties=b"")
    group.store("T", queue_id, decode_record(record))


class Play:
    """Workers on the same queues, and what happens to them."""

    def __init__(self, world: World, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.world = world
        self.ledger = Ledger()
        self.attempts: list[Attempt] = []
        self.workers = [Worker(world, rng, self.attempts) for _ in range(rng.choice([1, 2, 3]))]
        self.groups = [StepGroup(group, rng, self.ledger) for group in world.groups.values()]

    async def run(self) -> None:
        """Play; the ledger has what was broken."""
        until_s = trio.current_time() + FAULTS_S
        async with trio.open_nursery() as nursery:
            for group in self.groups:
                nursery.start_soon(group.run, until_s)
            for worker in self.workers:
                nursery.start_soon(worker.run, until_s)
            for number in range(MESSAGES):
                group = self.rng.choice(self.groups)
                store(group.group, self.rng.randrange(QUEUE_COUNT), b"%d" % number)
                await trio.sleep(self.rng.uniform(0.0, 1.6 * FAULTS_S / MESSAGES))
                if self.rng.random() < 0.05:
                    self.rng.choice(self.groups).remove()
        await trio.sleep(LATE_S)
        await self._end()
        self._check()

    async def _end(self) -> None:
        """Work on what is left, undisturbed."""
        with trio.move_on_after(HEALED_S) as scope:
            async with self.world.client() as client, PullConsumer(client, GROUP) as consumer:
                while not self._is_done():
                    await self.workers[0].work(consumer)
        if scope.cancelled_caught:
            self.ledger.broken.append("not done after all has healed")

    def _is_done(self) -> bool:
        return all(
            group.group.committed.get((GROUP, "T", queue_id), 0) >= len(records)
            for group in self.groups
            for (topic, queue_id), records in group.group.queues.items()
            if topic == "T"
        )

    def _check(self) -> None:
        broken = self.ledger.broken
        worked = [body for group in self.groups for body in group.group.bodies("U")]
        every = Counter(body.split(b":")[1] for body in worked)
        broken += [f"{body!r} was worked on {n} times" for body, n in every.items() if n > 1]
        for group in self.groups:
            for (topic, queue_id), records in group.group.queues.items():
                kept = records[group.first[queue_id] :] if topic == "T" else []
                bodies = [bytes(decode_record(record).body) for record in kept]
                broken += [f"{body!r} was not worked on" for body in bodies if not every[body]]
        for attempt in self.attempts:
            self._check_attempt(attempt, set(worked))

    def _check_attempt(self, attempt: Attempt, worked: set[bytes]) -> None:
        name = f"step {attempt.number} is {attempt.outcome} by {attempt.error!r}"
        there = [body in worked for body in attempt.bodies]
        if any(there) and not all(there):
            self.ledger.broken.append(f"{name}: a part is stored")
        if attempt.outcome == "not_stored" and any(there):
            self.ledger.broken.append(f"{name}: it is stored")
        if attempt.outcome != "stored":
            return
        for body, at in zip(attempt.bodies, attempt.stored, strict=True):
            records = self.world.groups[at.queue.broker_name].queue("U", at.queue.queue_id)
            if bytes(decode_record(records[at.queue_offset]).body) != body:
                self.ledger.broken.append(f"{name}: {body!r} is not at {at.queue_offset}")


TOPICS: Final = {"T": QUEUE_COUNT, "U": 2}


@pytest.mark.parametrize("seed", range(4))
async def test_steps_at_faulty_brokers_end_as_reported(seed: int) -> None:
    assert await play(Play, seed, TOPICS)


@pytest.mark.slow
@pytest.mark.parametrize("first", tested_part(range(1000, 1100, 25), 1))
async def test_many_steps_at_faulty_brokers_end_as_reported(first: int) -> None:
    every = await play_many(Play, first, TOPICS)
    assert every >= {"busy", "late", "lost after", "lost before", "overtaken", "removed", "unknown"}
