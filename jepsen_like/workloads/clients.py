"""What clients do during a run, and the row each attempt leaves behind.

Producers send one message at a time with retries after unknown outcomes switched off, so that a row
is an attempt; idempotent ones repeat what got no answer, and a row is stored once at most all the
same. Consumers pull in order, commit, and sometimes begin again from what they committed.
Readers ask for ends and pull at random places. A logical client that saw an unknown outcome is
retired and a new one goes on in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from client.admin.admin import Admin
from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import ClientError, OffsetIllegalError
from client.core.message_ext import PullStatus
from client.core.route import MessageQueue
from client.producer.config import ProducerConfig
from commitlog.errors import MQError
from jepsen_like.history.operation import (
    CLIENT_BITS,
    NEVER,
    NOTHING,
    F,
    History,
    Level,
    Operation,
    Outcome,
)
from jepsen_like.history.outcome import classify
from jepsen_like.nemesis.ground import Moment
from jepsen_like.plans.plan import REST_FACTOR, Plan
from jepsen_like.seeded_rng import SimRng, rng_stream
from jepsen_like.workloads.consumers import Consumers, Retriers
from jepsen_like.workloads.filterers import Filterers
from jepsen_like.workloads.lockers import Lockers
from jepsen_like.workloads.producers import (
    ATTEMPT_TIMEOUT_S,
    SEND_TIMEOUT_S,
    Producers,
    value_of,
)
from jepsen_like.workloads.transactions import Transactions

TOPIC: Final = "orders"
BROKER: Final = "sim"
PULL_MESSAGES: Final = 32
SET_UP_S: Final = 120.0
"""A healthy cluster has a leader and the topic within this."""


class Stage(Protocol):
    """Where clients act: simulated or real time."""

    @property
    def elapsed_s(self) -> float:
        """Time of the run; the history's clock."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""


class Machine(Protocol):
    """Where the programs of clients run."""

    @property
    def instance(self) -> ClientInstance | None:
        """The open client instance."""


def unrecorded(_: Operation) -> None:
    """Keep rows in memory only."""


class WorkloadClients:
    """All logical clients of a run, on one client machine.

    Args:
        stage: Time.
        broker: Name of the broker group; empty: any that has queues of the topic.
        topic: What is sent to; made when it is not there.
        record: Gets a row when it is called and when it has ended; what an answer held is
            written into it before the next checkpoint of trio.

    Attributes:
        history: Where rows go.
        counts: Rows by kind and outcome, and ``unclassified`` errors.
        unclassified: Errors the outcome table does not know; the run fails.
    """

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        history: History,
        *,
        broker: str = BROKER,
        topic: str = TOPIC,
        record: Callable[[Operation], None] = unrecorded,
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._record = record
        self.history = history
        self.counts: Counter[str] = Counter()
        self.unclassified: list[str] = []
        self._op_id = 0
        self._process = 0
        self._values: Counter[int] = Counter()
        self._consumers = Consumers(self)
        self._lockers = Lockers(self, plan.seed, lease_s=plan.settings.lock_lease_ms / 1000)
        halves = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            compress_over_bytes=None,
        )
        self._transactions = Transactions(self, value_of, halves)
        self._filterers = Filterers(self, plan.seed)
        self._producers = Producers(self, stage, plan, self._transactions)
        gives_back = plan.workload.send_back_per_mille
        self._retriers = Retriers(self, plan.seed, gives_back) if gives_back else None
        self._awaited: dict[Moment, trio.Event] = {}
        self._lives: Counter[tuple[str, int]] = Counter()
        self._is_over = False
        self._busy = 0
        self._calm = trio.Event()
        self.ready = trio.Event()
        self.drained: dict[MessageQueue, tuple[int, tuple[int, ...]]] = {}
        """First offset and values of each queue, as `drain` read them."""
        self.topic = topic
        self.queues = [MessageQueue(topic, broker, i) for i in range(plan.workload.queues)]

    def rng_of(self, role: str, index: int) -> SimRng:
        """Return chance for the next run of a client: a killed one does not repeat itself."""
        self._lives[role, index] += 1
        return rng_stream(self._plan.seed, role, index, self._lives[role, index])

    # -- rows ------------------------------------------------------------------------------

    def new_process(self) -> int:
        """Return the number of a logical client that has done nothing yet."""
        self._process += 1
        return self._process

    @property
    def now_ns(self) -> int:
        """The history's clock."""
        return round(self._stage.elapsed_s * 1e9)

    def begin(self, process: int, f: F, queue: MessageQueue | None = None) -> Operation:
        """Return the row of an operation that is called now."""
        op_id = self._op_id
        self._op_id += 1
        topic, queue_id = (queue.topic, queue.queue_id) if queue is not None else ("", NOTHING)
        op = Operation(
            op_id, op_id, process, NOTHING, f, Outcome.INFO, self.now_ns, NEVER, topic, queue_id
        )
        self.history.operations.append(op)
        self._record(op)
        return op

    def end(self, op: Operation) -> None:
        """It ended well, now."""
        op.outcome, op.ret_ns = Outcome.OK, self.now_ns
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_ok"] += 1

    def failed(self, op: Operation, error: Exception) -> None:
        """It ended in *error*, now."""
        outcome, is_known = classify(error)
        op.outcome, op.err = outcome, type(error).__name__
        op.ret_ns = NEVER if outcome is Outcome.INFO else self.now_ns
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_{outcome.name.lower()}"] += 1
        if not is_known:
            self.unclassified.append(f"{type(error).__name__}: {error}")

    def refused(self, op: Operation, why: str) -> None:
        """It was answered with a plain no, now; it did not happen."""
        op.outcome, op.ret_ns, op.err = Outcome.FAIL, self.now_ns, why
        self._record(op)
        self.counts[f"{F(op.f).name.lower()}_fail"] += 1

    def next_value(self, client: int) -> int:
        """Return a value that was not sent before."""
        self._values[client] += 1
        return client << CLIENT_BITS | self._values[client]

    # -- start and end -----------------------------------------------------------------------------

    async def run(self, node: Machine) -> None:
        """Set up, then let producers and consumers work until `finish`; a machine's program."""
        instance = node.instance
        assert instance is not None
        if not self.ready.is_set():  # else it was killed since
            await self._set_up(instance)
            self.ready.set()
        self._consumers.client_id = instance.client_id
        self._producers.wall_ms = instance.clock.wall_ms
        workload = self._plan.workload
        async with trio.open_nursery() as nursery:
            if workload.transactions_per_mille:
                nursery.start_soon(self._transactions.serve, instance)
            for index in range(workload.producers):
                nursery.start_soon(self._producers.produce, instance, index)
            for index in range(workload.consumers):
                nursery.start_soon(self._consumers.consume, instance, index)
                if self._retriers is not None:
                    nursery.start_soon(self._retriers.consume, instance, index)
            for index in range(workload.filterers):
                nursery.start_soon(self._filterers.consume, instance, index)
            if workload.lockers:
                nursery.start_soon(self._lockers.run, instance, workload.lockers)
        await trio.sleep_forever()  # the instance is still needed, to drain

    async def run_readers(self, node: Machine) -> None:
        """Let readers work until `finish`; the program of another machine, with its own view."""
        instance = node.instance
        assert instance is not None
        async with trio.open_nursery() as nursery:
            if self._plan.workload.transactions_per_mille:
                nursery.start_soon(self._transactions.answer, instance)
            for index in range(self._plan.workload.readers):
                nursery.start_soon(self._read, instance, index)

    async def run_doubles(self, node: Machine) -> None:
        """Let consumers under the names of others work until `finish`; another machine's program.

        Their client id is that of the others, too.
        """
        instance = node.instance
        assert instance is not None
        # One process gives no id twice; another machine would not check.
        own, instance.client_id = instance.client_id, self._consumers.client_id
        try:
            async with trio.open_nursery() as nursery:
                for index in range(self._plan.workload.consumers):
                    nursery.start_soon(self._consumers.double, instance, index)
        finally:
            instance.client_id = own

    # -- steered by faults -----------------------------------------------------------------

    async def reach(self, moment: Moment) -> None:
        """Wait until some client is at *moment*."""
        reached = self._awaited.setdefault(moment, trio.Event())
        try:
            await reached.wait()
        finally:
            self._awaited.pop(moment, None)

    def is_awaited(self, moment: Moment) -> bool:
        """Whether a fault waits for *moment*."""
        return moment in self._awaited

    def arrive(self, moment: Moment) -> None:
        """Wake the fault that waits for a client at *moment*."""
        awaited = self._awaited.pop(moment, None)
        if awaited is not None:
            awaited.set()

    def begin_where_committed(self) -> None:
        """Consumers that start from now on ask the broker where to begin."""
        self._consumers.ask_first = True

    def hold_consumers(self) -> None:
        """Let consumers stand still before their next step, with what they have in hand."""
        self._consumers.hold()

    def release_consumers(self) -> int:
        """Let them commit what they had in hand and go on; tell how many offsets. Idempotent."""
        return self._consumers.release()

    async def finish(self) -> None:
        """Begin nothing new; return when everything begun has ended."""
        self._is_over = True
        while self._busy:
            await self._stage.sleep(0.1)

    async def _set_up(self, instance: ClientInstance) -> None:
        with trio.fail_after(SET_UP_S):
            while True:
                try:
                    admin, wanted = Admin(instance), len(self.queues)
                    names = await admin.create_topic(self.topic, queue_nums=wanted)
                    route = await instance.route(self.topic, fresh=True)
                    if names and len(route.publish_queues) == wanted * len(names):
                        if not self.queues[0].broker_name:
                            # Rows tell queues apart by number: one group, the first, will do.
                            first = min(queue.broker_name for queue in route.publish_queues)
                            self.queues = [
                                q for q in route.publish_queues if q.broker_name == first
                            ]
                        return
                except MQError:
                    pass  # the cluster is still finding its leader
                await self._stage.sleep(0.5)

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._is_over

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Be waited for by `finish` meanwhile."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await self._stage.sleep(seconds)

    async def pause(self, rng: SimRng) -> bool:
        """Wait between two operations; false when it is over."""
        await self._stage.sleep(rng.expovariate(1000.0 / self._plan.workload.interval_ms))
        return not self._is_over

    async def _rest(self, rng: SimRng) -> bool:
        """Wait for much longer now and then; false when it is over."""
        rests = self._plan.workload.rest_per_mille
        if rests and rng.randrange(1000) < rests:
            for _ in range(REST_FACTOR - 1):
                if not await self.pause(rng):
                    return False
        return not self._is_over

    # -- consumers -------------------------------------------------------------------------

    async def commit(
        self,
        consumer: PullConsumer,
        process: int,
        queue: MessageQueue,
        offset: int,
        token: int | None = None,
    ) -> Operation:
        """Commit an offset, under a lock where there is a *token*."""
        op = self.begin(process, F.COMMIT, queue)
        op.group, op.off = consumer.group, offset
        op.token = NOTHING if token is None else token
        try:
            await consumer.commit_offset(queue, offset, lock_token=token)
        except ClientError as error:
            self.failed(op, error)
        else:
            self.end(op)
        return op

    async def fetch_commit(
        self, consumer: PullConsumer, process: int, queue: MessageQueue
    ) -> Operation:
        """Ask for the committed offset."""
        op = self.begin(process, F.FETCH_COMMIT, queue)
        op.group = consumer.group
        try:
            offset = await consumer.committed_offset(queue)
        except ClientError as error:
            self.failed(op, error)
        else:
            self.end(op)
            op.off = NOTHING if offset is None else offset
        return op

    async def pull(
        self,
        consumer: PullConsumer,
        process: int,
        queue: MessageQueue,
        offset: int,
        wait_s: float = 0.0,
        group: str = "",
    ) -> tuple[Operation, int]:
        """Pull at an offset; return the row and where to go on.

        Args:
            group: Of a consumer that goes on where it was; none of one that pulls anywhere.
        """
        op = self.begin(process, F.PULL, queue)
        op.off, op.group = offset, group
        try:
            result = await consumer.pull(
                queue, offset, max_messages=PULL_MESSAGES, timeout_s=wait_s
            )
        except OffsetIllegalError as error:
            self.end(op)
            if offset >= error.max_offset:
                op.max_off = error.max_offset
            else:
                op.level = Level.LOCAL  # any member refuses too small ones, by what it knows
            op.min_off = error.min_offset
            return op, error.next_begin_offset
        except ClientError as error:
            self.failed(op, error)
            return op, offset
        self.end(op)
        values = []
        for place, message in enumerate(result.messages):
            values.append(value_of(message.body))
            if message.queue_offset != offset + place:
                self.unclassified.append(f"a pull at {offset} has a hole at {offset + place}")
        op.values, op.cnt = tuple(values), len(values)
        if values and result.next_begin_offset != offset + len(values):
            self.unclassified.append(
                f"a pull at {offset} found {len(values)} and goes on at {result.next_begin_offset}"
            )
        if result.status is PullStatus.NO_NEW_MESSAGE:
            # Only then a majority was asked; beside messages the bounds may be old.
            op.max_off, op.min_off = result.max_offset, result.min_offset
        return op, result.next_begin_offset

    # -- readers ---------------------------------------------------------------------------

    async def _read(self, instance: ClientInstance, index: int) -> None:
        rng = self.rng_of("reader", index)
        consumers = self._plan.workload.consumers
        watched = f"consumers-{index % consumers}" if consumers > index else f"readers-{index}"
        async with PullConsumer(instance, watched) as consumer:
            ends = dict.fromkeys(self.queues, 0)
            process = self.new_process()
            while await self._rest(rng) and await self.pause(rng):
                queue = self.queues[rng.randrange(len(self.queues))]
                with self.acting():
                    chance = rng.random()
                    if chance < 0.4:
                        op = await self.max_offset(consumer, process, queue)
                        ends[queue] = max(ends[queue], op.max_off)
                    elif chance < 0.6:
                        op = await self.fetch_commit(consumer, process, queue)
                    else:
                        at = rng.randint(max(0, ends[queue] - 40), ends[queue])
                        op, _ = await self.pull(consumer, process, queue, at)
                        ends[queue] = max(ends[queue], op.off + op.cnt)
                if op.outcome == Outcome.INFO:
                    process = self.new_process()

    async def max_offset(
        self, consumer: PullConsumer, process: int, queue: MessageQueue
    ) -> Operation:
        """Ask where a queue ends."""
        op = self.begin(process, F.MAX_OFFSET, queue)
        try:
            op.max_off = await consumer.max_offset(queue)
        except ClientError as error:
            self.failed(op, error)
        else:
            self.end(op)
        return op

    # -- the end ---------------------------------------------------------------------------

    async def drain(self, instance: ClientInstance) -> None:
        """Read every queue from its first to its last offset, as a client does.

        Raises:
            ClientError: The healed cluster does not serve.
        """
        async with PullConsumer(instance, "drain") as consumer:
            process = self.new_process()
            for queue in self.queues:
                begin = offset = await consumer.min_offset(queue)
                end = await consumer.max_offset(queue)
                values: list[int] = []
                while offset < end:
                    op, then = await self.pull(consumer, process, queue, offset)
                    if op.outcome != Outcome.OK or then <= offset:
                        raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
                    offset = then
                    values += op.values
                self.drained[queue] = (begin, tuple(values))
            if self._retriers is not None:
                await self._retriers.drain(consumer)
