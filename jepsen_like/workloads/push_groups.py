"""A push group whose members join, leave and are killed while messages come.

Every member has a machine of its own. Listeners refuse some messages at the first try, which then
come through the retry topic; members that poll seek back, pause, and give polls up. When a run is
over all members are there, and the group must have consumed everything, shared the queues, and
committed where they end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.checkers.push_group import (
    NOT_COMMITTED,
    Consumed,
    PushRecord,
    check_record,
    never_consumed,
    ownership,
)
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import NOTHING, F, Level
from dledger.jepsen_like.nemesis.ground import Machine
from dledger.jepsen_like.seeded_rng import rng_stream
from dledger.jepsen_like.workloads.recorder import value_of

if TYPE_CHECKING:
    from dledger.jepsen_like.plans.plan import Plan
    from dledger.jepsen_like.workloads.clients import Machine as Host
    from dledger.jepsen_like.workloads.clients import WorkloadClients

GROUP: Final = "push-group"
REFUSED_AT_FIRST: Final = 16
"""One message of this many is refused at its first try."""
SLOW_OF: Final = 16
"""Two messages of this many take their listener long, so that faults meet it there; the first is
refused afterwards, at its first try."""
SLOWER_OF: Final = 8
"""With `slow_listeners`, see `dledger.jepsen_like.plans.modes`."""
SLOW_S: Final = 2.0
SLOWER_S: Final = 6.0
"""Likewise: longer than the pause between two commits of offsets."""
KILLED_AFTER_S: Final = 0.5
"""Into what a slow listener does, at least."""
SLOW_KILL_PAUSE_S: Final = 30.0
"""Mean pause between two kills of slow listeners; the machine is down for a part of it."""
SETTLED_WITHIN_S: Final = 120.0
"""The group must have consumed all there is within this; a retry waits for ten seconds of it."""
LOOK_S: Final = 0.5
PATIENCE_S: Final = (0.0, 0.01, 0.5, 60.0)
"""One of these is how long a poll is waited for; it ends by itself after `LOOK_S`."""
DEALS_S: Final = (0.0, 0.01, 0.5, 6.0)
"""One of these is how long what was polled is dealt with; also longer than between two commits."""
HAND_OVERS: Final = 2
"""How often a member leaves and joins in the end: its queues come to others, back, and again."""


MakeMachine = Callable[[str, Callable[[Any], Awaitable[None]]], Machine]
"""Makes the machine of that name for a program; it is down."""


class PushGroup:
    """The members of the group of a run.

    *is_settled*: its members have left, and the record is whole.
    """

    def __init__(self, clients: WorkloadClients, plan: Plan, make: MakeMachine) -> None:
        self._clients = clients
        self._plan = plan
        self._is_polled = plan.workload.push_polled
        self.record = PushRecord(is_orderly=plan.workload.push_orderly or self._is_polled)
        self.joined = self.left = self.killed = 0
        self.is_settled = False
        self._live: dict[str, PushConsumer | LitePullConsumer] = {}
        self._leave: dict[str, trio.Event] = {}
        self._starts = 0
        is_slower = "slow_listeners" in plan.modes
        self._slow_of, self._slow_s = (SLOWER_OF, SLOWER_S) if is_slower else (SLOW_OF, SLOW_S)
        self._slow: dict[str, None] = {}
        self._gets_slow = trio.Event()
        self._machines: dict[str, Machine] = {
            name: make(name, self._program(name))
            for name in (f"m{index}" for index in range(plan.workload.push_members))
        }

    # -- a member --------------------------------------------------------------------------

    def _program(self, name: str) -> Callable[[Host], Awaitable[None]]:
        async def run(host: Host) -> None:
            self._starts += 1
            await (self._poll if self._is_polled else self._consume)(name, host)

        return run

    async def _consume(self, name: str, host: Host) -> None:
        instance = host.instance
        assert instance is not None
        start = f"{name} start {self._starts}"
        leave = self._leave[name] = trio.Event()
        heard = 0

        async def listener(
            messages: Sequence[DeliveredMessage], context: ConsumeContext
        ) -> ConsumeStatus | None:
            nonlocal heard
            if host.instance is not instance:
                return ConsumeStatus.RECONSUME_LATER  # it was killed: nothing happens any more
            (message,) = messages
            value, began_ns = value_of(message.body), self._clients.now_ns
            if value % self._slow_of in (0, 1):
                await self._be_slow(name)
                if host.instance is not instance:
                    return ConsumeStatus.RECONSUME_LATER
            if value % REFUSED_AT_FIRST == 0 and not message.reconsume_times:
                return ConsumeStatus.RECONSUME_LATER
            heard += 1
            self._note(name, message, value, began_ns)
            return None

        consumer = PushConsumer(
            instance,
            GROUP,
            listener,
            {self._clients.topic: "*"},
            PushConfig(consume_from=FROM_FIRST),
            orderly=self._plan.workload.push_orderly,
        )
        try:
            async with consumer:
                self._live[name] = consumer
                await leave.wait()
        finally:
            if self._live.get(name) is consumer:
                del self._live[name]
            if host.instance is instance:
                self.record.counts[start] = (consumer.counts["consumed"], heard)

    async def _poll(self, name: str, host: Host) -> None:
        instance, rng = host.instance, rng_stream(self._plan.seed, "polls", self._starts)
        assert instance is not None
        leave = self._leave[name] = trio.Event()
        consumer = LitePullConsumer(instance, GROUP, consume_from=FROM_FIRST)
        consumer.subscribe(self._clients.topic)
        read: dict[MessageQueue, int] = {}
        try:
            async with consumer:
                self._live[name] = consumer
                while not leave.is_set():
                    paused = [queue for queue in sorted(consumer.queues) if rng.random() < 0.1]
                    consumer.pause(paused)
                    messages: list[DeliveredMessage] = []
                    with trio.move_on_after(rng.choice(PATIENCE_S)):
                        messages = await consumer.poll(LOOK_S, max_messages=rng.choice((1, 32)))
                    await self._clients.sleep(rng.choice(DEALS_S))
                    if host.instance is not instance:
                        return  # it was killed: nothing happens any more
                    for message in messages:
                        queue = message.message_queue
                        read[queue] = message.queue_offset
                        if queue in paused:
                            self.record.of_paused.append(f"{name}: {queue}")
                        self._note(name, message, value_of(message.body), NOTHING)
                    consumer.resume(paused)
                    if self._clients.is_over:
                        continue  # a seek now would put back what is committed in the end
                    if read and rng.random() < 0.05:
                        queue = rng.choice(sorted(read))
                        consumer.seek(queue, rng.randint(max(0, read[queue] - 5), read[queue]))
                    if rng.random() < 0.1:
                        await consumer.commit()
        finally:
            if self._live.get(name) is consumer:
                del self._live[name]

    def _note(self, name: str, message: DeliveredMessage, value: int, began_ns: int) -> None:
        clients, queue = self._clients, message.message_queue
        is_retry = queue.topic != clients.topic
        number = NOTHING if is_retry else queue.queue_id
        self.record.consumed.append(
            Consumed(name, number, message.queue_offset, value, clients.now_ns, began_ns)
        )
        if not is_retry:
            # A row as of a read that may be old: what was there must agree, when proves nothing.
            op = clients.begin(clients.new_process(), F.PULL, queue)
            op.off, op.cnt, op.values, op.level = message.queue_offset, 1, (value,), Level.LOCAL
            clients.end(op)

    # -- coming and going ------------------------------------------------------------------

    async def run(self) -> None:
        """Let members come and go until the clients are to finish."""
        rng = rng_stream(self._plan.seed, "push members")
        names = sorted(self._machines)
        change_s = self._plan.workload.push_change_s
        for name in names[: (len(names) + 1) // 2] if change_s else names:
            await self._join(name)
        while change_s and not self._clients.is_over:
            await self._clients.sleep(rng.expovariate(1.0 / change_s))
            name = names[rng.randrange(len(names))]
            chance = rng.random()
            if self._clients.is_over:
                return
            if self._machines[name].is_down:
                await self._join(name)
            elif len(self._live) > 1 and chance < 0.5:
                self.left += 1
                self._leave[name].set()
            elif len(self._live) > 1:
                self.killed += 1
                self._live.pop(name, None)
                await self._machines[name].kill()

    async def _be_slow(self, name: str) -> None:
        self._slow[name] = None
        self._gets_slow.set()
        try:
            await self._clients.sleep(self._slow_s)
        finally:
            self._slow.pop(name, None)

    async def kill_slow_listener(self) -> None:
        """Wait for a listener that is slow, kill its member in the middle, and start it again."""
        rng = rng_stream(self._plan.seed, "slow listeners", self.killed)
        while True:
            await self._gets_slow.wait()
            await self._clients.sleep(rng.uniform(KILLED_AFTER_S, self._slow_s))
            if self._slow and not self._clients.is_over:
                break
            self._gets_slow = trio.Event()
        name = next(iter(self._slow))
        self._slow.clear()
        self._gets_slow = trio.Event()
        self.killed += 1
        self._live.pop(name, None)
        await self._machines[name].kill()
        await self._clients.sleep(rng.expovariate(1.0 / SLOW_KILL_PAUSE_S))
        if self._machines[name].is_down and not self._clients.is_over:
            await self._join(name)

    async def _join(self, name: str) -> None:
        self.joined += 1
        await self._machines[name].start()

    # -- the end ---------------------------------------------------------------------------

    async def settle(self, instance: ClientInstance) -> Verdict:
        """Let all members be there, wait until the group has come to rest, and judge it."""
        clients, record = self._clients, self.record
        record.stored = {
            queue.queue_id: (begin, values) for queue, (begin, values) in clients.drained.items()
        }
        end_ns = clients.now_ns + int(SETTLED_WITHIN_S * 1e9)
        while True:
            for name, machine in self._machines.items():
                if machine.is_down:
                    await self._join(name)
            await self._look(instance)
            verdict = check_record(record)
            if self._is_settled(verdict) or clients.now_ns > end_ns:
                break
            await clients.sleep(LOOK_S)
        for _ in range(HAND_OVERS if self._is_settled(verdict) else 0):
            if not await self._hand_over(instance):
                break
        await self._end()
        self.is_settled = True
        return check_record(record)

    async def _look(self, instance: ClientInstance) -> None:
        self.record.owners = {
            name: frozenset(q.queue_id for q in consumer.queues if q.topic == self._clients.topic)
            for name, consumer in self._live.items()
        }
        reader = PullConsumer(instance, GROUP)  # asks on behalf of a group it is no member of
        for queue in self._clients.drained:
            try:
                offset = await reader.committed_offset(queue)
            except MQError:
                continue
            if offset is not None:
                self.record.committed[queue.queue_id] = offset

    def _is_settled(self, verdict: Verdict) -> bool:
        record = self.record
        return (
            len(self._live) == len(self._machines)
            and not never_consumed(record)
            and not ownership(record.stored, record.owners)
            and not any(violation.name == NOT_COMMITTED for violation in verdict.violations)
        )

    async def _hand_over(self, instance: ClientInstance) -> bool:
        """Let the first member leave and join again; tell whether each queue had an owner."""
        name = next(iter(self._machines))
        if len(self._machines) < 2 or name not in self._live:
            return True
        self._leave[name].set()
        is_owned = await self._has_owners(
            instance, lambda: name not in self._live and self._machines[name].is_down
        )
        if is_owned:
            await self._join(name)
            gets_none = len(self.record.stored) < len(self._machines)
            is_owned = await self._has_owners(
                instance, lambda: name in self._live and (gets_none or self._owns(name))
            )
        return is_owned

    def _owns(self, name: str) -> bool:
        return any(queue.topic == self._clients.topic for queue in self._live[name].queues)

    async def _has_owners(self, instance: ClientInstance, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so and each queue has one owner; false: not in time."""
        end_ns = self._clients.now_ns + int(SETTLED_WITHIN_S * 1e9)
        while self._clients.now_ns < end_ns:
            was_so = is_so()
            await self._look(instance)
            if was_so and not ownership(self.record.stored, self.record.owners):
                return True
            await self._clients.sleep(LOOK_S)
        return False

    async def _end(self) -> None:
        """Let all members leave by themselves; their counts are taken then."""
        for name in list(self._live):
            self._leave[name].set()
        with trio.move_on_after(SETTLED_WITHIN_S):
            while self._live:
                await self._clients.sleep(LOOK_S)
