"""What clients do during a run, and the row each attempt leaves behind.

Producers send one message at a time with retries after unknown outcomes switched off, so that a row
is an attempt; idempotent ones repeat what got no answer, and a row is stored once at most all the
same. Consumers pull in order, commit, and sometimes begin again from what they committed.
Readers ask for ends and pull at random places. A logical client that saw an unknown outcome is
retired and a new one goes on in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.checkers.final_reads import READER
from dledger.jepsen_like.history.operation import F, History, Operation, Outcome
from dledger.jepsen_like.plans.plan import Plan
from dledger.jepsen_like.workloads.consumers import Consumers, Filterers, Lockers, Retriers
from dledger.jepsen_like.workloads.lifetimes import Lifetimes
from dledger.jepsen_like.workloads.producers import ATTEMPT_TIMEOUT_S, SEND_TIMEOUT_S, Producers
from dledger.jepsen_like.workloads.receivers import Receivers
from dledger.jepsen_like.workloads.recorder import BROKER, TOPIC, Recorder, Stage, unrecorded
from dledger.jepsen_like.workloads.steps import Steps
from dledger.jepsen_like.workloads.through import Ends, Role, Through
from dledger.jepsen_like.workloads.transactions import Transactions

SET_UP_S: Final = 120.0
"""A healthy cluster has a leader and the topic within this."""


class Machine(Protocol):
    """Where the programs of clients run."""

    @property
    def instance(self) -> ClientInstance | None:
        """The open client instance."""


class WorkloadClients(Recorder):
    """All logical clients of a run, on one client machine.

    Args:
        broker: Name of the broker group; empty: any that has queues of the topic.
        topic: What is sent to; made when it is not there.
        through: What producers and receivers go through; None: the SDK.
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
        through: Through | None = None,
    ) -> None:
        super().__init__(stage, plan, history, broker=broker, topic=topic, record=record)
        halves = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            compress_over_bytes=None,
        )
        self._consumers = Consumers(self)
        self._transactions = Transactions(self, halves)
        self._producers = Producers(self, self._transactions, through)
        self._roles: tuple[tuple[Role, ...], ...] = (
            (self._transactions,),
            (self._producers,),
            (self._consumers, Retriers(self)),
            (Filterers(self),),
            (Receivers(self, through),),
            (Steps(self),),
            (Lifetimes(self),),
            (Lockers(self),),
        )
        """In the order in which they begin; those together begin by turns."""
        self.ready = trio.Event()
        self._ends: dict[MessageQueue, int] = {}
        self.drained: dict[MessageQueue, tuple[int, tuple[int, ...]]] = {}
        """First offset and values of each queue, as `drain` read them."""

    @property
    def _used(self) -> list[Role]:
        return [role for roles in self._roles for role in roles if role.count]

    # -- start and end -----------------------------------------------------------------------------

    async def run(self, node: Machine) -> None:
        """Set up, then let producers and consumers work until `finish`; a machine's program."""
        instance = node.instance
        assert instance is not None
        if not self.ready.is_set():  # else it was killed since
            await self._set_up(instance)
            for role in self._used:
                await role.set_up(instance)
            self.ready.set()
        self._consumers.client_id = instance.client_id
        self._producers.wall_ms = instance.clock.wall_ms
        async with trio.open_nursery() as nursery:
            for roles in self._roles:
                for index in range(max(role.count for role in roles)):
                    for role in roles:
                        if index < role.count:
                            nursery.start_soon(role.act, instance, index)
        await trio.sleep_forever()  # the instance is still needed, to drain

    async def run_readers(self, node: Machine) -> None:
        """Let readers work until `finish`; the program of another machine, with its own view."""
        instance = node.instance
        assert instance is not None
        async with trio.open_nursery() as nursery:
            if self.plan.workload.transactions_per_mille:
                nursery.start_soon(self._transactions.answer, instance)
            for index in range(self.plan.workload.readers):
                nursery.start_soon(self._read, instance, index)

    async def run_doubles(self, node: Machine) -> None:
        """Let consumers under the names of others work until `finish`, on another machine."""
        instance = node.instance
        assert instance is not None
        # One process gives no id twice; another machine would not check.
        own, instance.client_id = instance.client_id, self._consumers.client_id
        try:
            async with trio.open_nursery() as nursery:
                for index in range(self.plan.workload.consumers):
                    nursery.start_soon(self._consumers.double, instance, index)
        finally:
            instance.client_id = own

    # -- steered by faults -----------------------------------------------------------------

    def begin_where_committed(self) -> None:
        """Consumers that start from now on ask the broker where to begin."""
        self._consumers.ask_first = True

    def hold_consumers(self) -> None:
        """Let consumers stand still before their next step, with what they have in hand."""
        self._consumers.hold()

    def release_consumers(self) -> int:
        """Let them commit what they had in hand and go on; tell how many offsets. Idempotent."""
        return self._consumers.release()

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
                await self.stage.sleep(0.5)

    # -- readers ---------------------------------------------------------------------------

    async def _read(self, instance: ClientInstance, index: int) -> None:
        rng = self.rng_of("reader", index)
        consumers = self.plan.workload.consumers
        watched = f"consumers-{index % consumers}" if consumers > index else f"readers-{index}"
        async with PullConsumer(instance, watched) as consumer:
            ends = dict.fromkeys(self.queues, 0)
            process = self.new_process()
            while await self.rest(rng) and await self.pause(rng):
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
                    self._ends[queue] = max(self._ends.get(queue, 0), ends[queue])
                if op.outcome == Outcome.INFO:
                    process = self.new_process()

    async def read_at(self, instance: ClientInstance, address: str, reads: int) -> None:
        """Read *reads* times at one moment, as a client that takes *address* for the leader."""
        rng, broker = self.rng_of("burst", 0), self.queues[0].broker_name
        with self.acting():
            try:
                await instance.route(self.topic)
            except MQError:
                return  # no NameServer answers
            instance.leaders.learn(broker, address, instance.leaders.term(broker))
            group = "consumers-0" if self.plan.workload.consumers else "readers-0"
            async with PullConsumer(instance, group) as consumer, trio.open_nursery() as nursery:
                for _ in range(reads):
                    queue = self.queues[rng.randrange(len(self.queues))]
                    nursery.start_soon(self._read_once, consumer, queue, rng.randrange(3))

    async def _read_once(self, consumer: PullConsumer, queue: MessageQueue, what: int) -> None:
        process = self.new_process()
        if what == 0:
            await self.max_offset(consumer, process, queue)
        elif what == 1:
            await self.fetch_commit(consumer, process, queue)
        else:
            await self.pull(consumer, process, queue, self._ends.get(queue, 0))

    # -- the end ---------------------------------------------------------------------------

    async def drain(self, instance: ClientInstance) -> None:
        """Read every queue from its first to its last offset, and what groups committed.

        Raises ClientError: the healed cluster does not serve.
        """
        async with PullConsumer(instance, "drain") as consumer:
            process = self.new_process()
            ends: Ends = {}
            for queue in self.queues:
                begin = offset = await consumer.min_offset(queue)
                last = await self.max_offset(consumer, process, queue)
                if last.outcome != Outcome.OK:
                    raise ClientError(f"{queue}: its end is not known: {last.err}")
                last.group, last.min_off, end = READER, begin, last.max_off
                values: list[int] = []
                while offset < end:
                    op, then = await self.pull(consumer, process, queue, offset, group=READER)
                    if op.outcome != Outcome.OK or then <= offset:
                        raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
                    offset = then
                    values += op.values
                self.drained[queue] = (begin, tuple(values))
                ends[queue] = (begin, end)
        for role in self._used:
            await role.drain(instance, ends)
        await self._read_offsets(instance, process)

    async def drain_on(self, machine: Machine) -> None:
        """Drain, again and again until the cluster serves; see `drain`."""
        while True:
            try:
                assert machine.instance is not None
                return await self.drain(machine.instance)
            except ClientError:
                await self.sleep(1.0)

    async def _read_offsets(self, instance: ClientInstance, process: int) -> None:
        slots: dict[str, set[int]] = {}
        for op in self.history.operations:
            if op.f == F.COMMIT and op.topic == self.topic:
                slots.setdefault(op.group, set()).add(op.queue)
        for group, numbers in sorted(slots.items()):
            async with PullConsumer(instance, group) as consumer:
                for queue in self.queues:
                    if queue.queue_id not in numbers:
                        continue
                    op = await self.fetch_commit(consumer, process, queue)
                    if op.outcome != Outcome.OK:
                        raise ClientError(f"{group}@{queue}: no committed offset: {op.err}")
