"""Producers of a workload: plain, delayed, timed, batched and transactional sends, and recalls.

Some messages try the services of a broker (`Workload.hostile_per_mille`): properties that are the
broker's own, or too much. What is drawn for them comes from a stream of its own, so that a plan
without them is the run it always was. After the last operation something may still be due for a
while: `due_within_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.results import SendFuture
from dledger.commitlog.properties import MAX_CLIENT_PROPERTIES_BYTES, OWNED_NAMES
from dledger.jepsen_like.checkers.filters import (
    CUSTOMER_PROPERTY,
    PROPERTY,
    customer_of,
    number_of,
    tag_of,
)
from dledger.jepsen_like.history.operation import F, Operation, Outcome
from dledger.jepsen_like.nemesis.ground import Moment
from dledger.jepsen_like.plans.plan import ROLLS_MAX, Plan, Workload
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.workloads.recorder import (
    CONTENT_BODY_BYTES_MIN,
    CONTENT_PROPERTY,
    VALUE_BYTES,
    Recorder,
)
from dledger.jepsen_like.workloads.through import Role, Sender, Through
from dledger.jepsen_like.workloads.transactions import Transactions
from dledger.settings.text import parse_delay_levels

SEND_TIMEOUT_S: Final = 10.0
ATTEMPT_TIMEOUT_S: Final = 8.0
"""Longer than a broker waits for a majority: its answer is to arrive, whatever it is."""
REPEATED_AFTER_S: Final = 1.0
"""Shorter than a broker waits: an idempotent producer repeats while the first attempt is out."""
SEVERAL: Final = 0.3
"""Share of the sends of idempotent producers that are several, under way at the same time. Not
among hostile ones: a message with properties that brokers give has a request of its own, which
keeps no order beside others."""
SEVERAL_MAX: Final = 4
SEVERAL_S: Final = 1.0
"""Half of the later ones begin within this after the one before, the others with it."""
SEVERAL_TIMEOUTS_S: Final = (2.0, 5.0, SEND_TIMEOUT_S)
"""Each of them has one of these: what goes in one request does not end at one time."""
LARGE_BATCH: Final = 0.1
"""Share of batches with many short messages: brokers store these in another way than a few."""
LARGE_BATCH_MESSAGES: Final = (25, 40)
RECALLABLE_MAX: Final = 16
"""Messages that a producer remembers for a recall; some of them are over when it comes to it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that its producer may still take back."""

    handle: str
    queue: MessageQueue
    value: int
    due_ns: int


class Producers(Role):
    """The producers of a run, by number; *transactions*: what sends those that are transactions."""

    field = "producers"

    def __init__(
        self, clients: Recorder, transactions: Transactions, through: Through | None
    ) -> None:
        super().__init__(clients)
        plan, self._stage = clients.plan, clients.stage
        self._through = through
        self._workload = plan.workload
        self._transactions = transactions
        self._hostile = HostileMessages(plan.seed, plan.workload.hostile_per_mille)
        self._producers = 0
        self._levels_ms = parse_delay_levels(plan.settings.delay_levels)
        self._timer_delay_max_ms = timer_delay_max_ms(plan.workload)
        self.wall_ms: Callable[[], int] = lambda: 0

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Send until the run is over, as one producer after the other where they are replaced."""
        rng = self._clients.rng_of("producer", index)
        workload = self._workload
        config = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=REPEATED_AFTER_S if workload.idempotent else ATTEMPT_TIMEOUT_S,
            retry_unknown=workload.idempotent,
            idempotent=workload.idempotent,
            compress_over_bytes=None,
        )
        life_s = workload.producer_life_s
        while not self._clients.is_over:
            end_s = self._stage.elapsed_s + (life_s or float("inf"))
            if workload.idempotent:
                # Values name the producer: its successor knows nothing of its sends.
                self._producers += 1
                index = self._producers
            through = self._through
            async with (
                Producer(instance, f"producers-{index}", config)
                if through is None
                else through.producer(index)
            ) as producer:
                await self._produce(producer, index, rng, end_s)

    async def _produce(self, producer: Sender, index: int, rng: SimRng, end_s: float) -> None:
        process = self._clients.new_process()
        waiting: list[Waiting] = []
        while self._stage.elapsed_s < end_s and await self._clients.pause(rng):
            with self._clients.acting():
                workload = self._workload
                if waiting and rng.randrange(1000) < workload.recall_per_mille:
                    taken = waiting.pop(rng.randrange(len(waiting)))
                    if not await self._recall(producer, process, taken):
                        process = self._clients.new_process()
                    continue
                queue = self._clients.queues[rng.randrange(len(self._clients.queues))]
                chance = rng.randrange(1000)
                # A fault that waits for this moment goes on when the request is on its way.
                self._clients.arrive(Moment.SENDING)
                if chance < workload.delayed_per_mille:
                    known = await self._send_delayed(producer, process, index, queue, rng)
                elif chance < workload.delayed_per_mille + workload.batch_per_mille:
                    known = await self._send_batch(producer, process, index, queue, rng)
                elif chance >= 1000 - workload.timer_per_mille:
                    known = await self._send_timed(producer, process, index, queue, rng, waiting)
                elif chance >= 1000 - workload.timer_per_mille - workload.transactions_per_mille:
                    message = self._message(self._clients.next_value(index), rng)
                    known = await self._transactions.transact(process, queue, message, rng)
                elif (
                    workload.idempotent
                    and not workload.hostile_per_mille
                    and rng.random() < SEVERAL
                ):
                    assert isinstance(producer, Producer)  # proxies know no idempotent ones
                    known = await self._send_several(producer, index, queue, rng)
                else:
                    known = await self._send(producer, process, index, queue, rng)
            if not known:
                process = self._clients.new_process()

    def _message(
        self, value: int, rng: SimRng, delay_level: int = 0, *, is_short: bool = False
    ) -> Message:
        largest = VALUE_BYTES if is_short else self._workload.body_bytes
        size = rng.choice(
            (VALUE_BYTES, VALUE_BYTES + 1, largest, rng.randint(VALUE_BYTES, largest))
        )
        properties = self._hostile.properties()
        is_hostile, tags = bool(properties), ""
        if self._workload.filterers:
            number = number_of(value)
            tags = tag_of(value)
            if number is not None:
                properties[PROPERTY] = str(number)
            properties[CUSTOMER_PROPERTY] = customer_of(value)
        elif not is_hostile and size >= CONTENT_BODY_BYTES_MIN:
            properties[CONTENT_PROPERTY] = text = f"{value % (1 << 32):08x}"
            size -= len(CONTENT_PROPERTY) + len(text) + 2  # the record is as long as without it
        body = value.to_bytes(VALUE_BYTES, "big").ljust(size, b".")
        message = Message(
            self._clients.topic, body, tags=tags, properties=properties, delay_level=delay_level
        )
        self._clients.contents.note(value, message, self.wall_ms(), is_hostile=is_hostile)
        return message

    def _begin(
        self, process: int, index: int, queue: MessageQueue, rng: SimRng, **drawn: Any
    ) -> tuple[Message, Operation]:
        """Return the next message and the row of its send, which is called now."""
        value = self._clients.next_value(index)
        message = self._message(value, rng, **drawn)
        op = self._clients.begin(process, F.SEND, queue)
        op.value = value
        return message, op

    async def _send(
        self, producer: Sender, process: int, index: int, queue: MessageQueue, rng: SimRng
    ) -> bool:
        message, op = self._begin(process, index, queue, rng)
        with self._clients.attempt(op):
            op.off = (await producer.send_to(queue, message)).queue_offset
        return op.outcome != Outcome.INFO

    async def _send_several(
        self, producer: Producer, index: int, queue: MessageQueue, rng: SimRng
    ) -> bool:
        """Begin one send after the other, and wait for all; each is a process of its own."""
        async with trio.open_nursery() as nursery:
            for place in range(rng.randint(2, SEVERAL_MAX)):
                if place and rng.random() < 0.5:
                    await self._stage.sleep(SEVERAL_S * rng.random())
                message, op = self._begin(self._clients.new_process(), index, queue, rng)
                try:
                    future = await producer.send_async(
                        message, timeout_s=rng.choice(SEVERAL_TIMEOUTS_S), queue=queue
                    )
                except ClientError as error:
                    self._clients.failed(op, error)
                else:
                    nursery.start_soon(self._wait_for, op, future)
        return True

    async def _wait_for(self, op: Operation, future: SendFuture) -> None:
        with self._clients.attempt(op):
            op.off = (await future.result()).queue_offset

    async def _send_delayed(
        self, producer: Sender, process: int, index: int, queue: MessageQueue, rng: SimRng
    ) -> bool:
        level = 1 + rng.randrange(len(self._levels_ms))
        message, op = self._begin(process, index, queue, rng, delay_level=level)
        op.due_ns = op.call_ns + self._levels_ms[level - 1] * 1_000_000
        with self._clients.attempt(op):  # the offset it answers is that of the schedule topic
            await producer.send_to(queue, message)
        return op.outcome != Outcome.INFO

    async def _send_timed(
        self,
        producer: Sender,
        process: int,
        index: int,
        queue: MessageQueue,
        rng: SimRng,
        waiting: list[Waiting],
    ) -> bool:
        """Send a message with a time of its own; remember it in *waiting* for a recall."""
        delay_ms = rng.randint(1, self._timer_delay_max_ms)
        is_absolute = rng.random() < 0.5
        message, op = self._begin(process, index, queue, rng)
        op.due_ns = op.call_ns + delay_ms * 1_000_000
        if is_absolute:
            message.deliver_at_ms = self.wall_ms() + delay_ms
        else:
            message.delay_ms = delay_ms
        with self._clients.attempt(op):  # the offset it answers is that of the timer topic
            result = await producer.send_to(queue, message)
            if result.recall_handle:
                waiting.append(Waiting(result.recall_handle, queue, op.value, op.due_ns))
                del waiting[:-RECALLABLE_MAX]
        return op.outcome != Outcome.INFO

    async def _recall(self, producer: Sender, process: int, taken: Waiting) -> bool:
        op = self._clients.begin(process, F.RECALL, taken.queue)
        op.value, op.due_ns = taken.value, taken.due_ns
        with self._clients.attempt(op):
            await producer.recall(taken.handle)
        return op.outcome != Outcome.INFO

    async def _send_batch(
        self, producer: Sender, process: int, index: int, queue: MessageQueue, rng: SimRng
    ) -> bool:
        is_large = not self._workload.hostile_per_mille and rng.random() < LARGE_BATCH
        count = rng.randint(*LARGE_BATCH_MESSAGES) if is_large else rng.randint(2, 5)
        rows: list[Operation] = []
        messages: list[Message] = []
        for _ in range(count):
            message, row = self._begin(process, index, queue, rng, is_short=is_large)
            messages.append(message)
            row.parent_op_id = rows[0].op_id if rows else row.op_id
            rows.append(row)
        with self._clients.attempt(*rows):
            results = await producer.send_batch(messages, queue=queue)
            for row, result in zip(rows, results, strict=True):
                row.off = result.queue_offset
        return rows[0].outcome != Outcome.INFO


# -- hostile messages -----------------------------------------------------------------------------

VALUES: Final = (
    "abc",
    "-1",
    "0",
    "9" * 30,
    "9" * 5000,
    "RMQ_SYS_DLEDGER_STATE",
    "SCHEDULE_TOPIC_XXXX",
    "../orders",
    "%RETRY%",
    "\u00e9\u4e16\U0001f600",
    "\x00\x03\x7f",
    " ",
)
"""Of a property: no numbers, no topics, no text, and some of them are."""

OTHER_NAMES: Final = (
    "RETRY_TOPIC",
    "ORIGIN_MESSAGE_ID",
    "DLQ_ORIGIN_TOPIC",
    "RECONSUME_TIME",
    "CHECK_IMMUNITY_TIME_IN_SECONDS",
    "PUSH_REPLY_TIME",
    "CLUSTER",
    "WAIT",
    "PGROUP",
    "\x7f\u200b",
)
"""Names that clients write as well, with values no client would."""

SPARE_BYTES: Final = 600
"""Of the longest properties: what the SDK and a workload write themselves."""


class HostileMessages:
    """Draws properties; the same ones for the same seed and number of calls."""

    def __init__(self, seed: int, per_mille: int) -> None:
        self._rng: SimRng = rng_stream(seed, "hostile")
        self._per_mille = per_mille

    def properties(self) -> dict[str, str]:
        """Return the properties of the next message; most often none."""
        if not self._per_mille or self._rng.randrange(1000) >= self._per_mille:
            return {}
        draw: Callable[[], dict[str, str]] = self._rng.choice((self._owned, self._odd, self._long))
        return draw()

    def _owned(self) -> dict[str, str]:
        names = OWNED_NAMES if self._rng.random() < 0.5 else (self._rng.choice(OWNED_NAMES),)
        return {name: self._rng.choice(VALUES) for name in names}

    def _odd(self) -> dict[str, str]:
        return {name: self._rng.choice(VALUES) for name in OTHER_NAMES if self._rng.random() < 0.4}

    def _long(self) -> dict[str, str]:
        most = MAX_CLIENT_PROPERTIES_BYTES - SPARE_BYTES
        size = self._rng.choice((most, most, self._rng.randint(1, most)))
        fill, bytes_each = self._rng.choice((("x", 1), ("\u4e16", 3)))
        return {"F": fill * (size // bytes_each)}


TIMER_DELAY_MAX_MS: Final = 30_000
"""Longest delay of a message with a time of its own: as the longest delay level of a plan."""
LEVEL_SLACK_S: Final = 2.0
TIMER_SLACK_S: Final = 3.0
"""Timers have a precision of a second."""


def timer_delay_max_ms(workload: Workload) -> int:
    """Return the longest delay of a message with a time of its own."""
    return max(TIMER_DELAY_MAX_MS, 1000 * ROLLS_MAX * workload.timer_roll_s)


def due_within_s(plan: Plan, error_ns: int) -> float:
    """Return after how long everything that clients of *plan* asked for is due; 0: nothing is.

    *error_ns*: how far the date of a broker is behind the time, or was ahead of it.
    """
    workload = plan.workload
    wait_s = 0.0
    if workload.delayed_per_mille or workload.send_back_per_mille:
        wait_s = max(parse_delay_levels(plan.settings.delay_levels)) / 1000 + LEVEL_SLACK_S
    if workload.timer_per_mille:
        longest_s = timer_delay_max_ms(workload) / 1000
        wait_s = max(wait_s, longest_s + TIMER_SLACK_S + error_ns / 1e9)
    return wait_s
