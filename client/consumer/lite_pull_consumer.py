"""Reads the queues of a group's member ahead, and gives messages to callers of `poll`.

The queues are dealt out among the group's members as for push consumers, or named by the caller.
What a poll returned counts as dealt with when the next poll is made: a crash in between repeats it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import Final

import trio

from dledger.client.consumer.config import LAST_OFFSETS_S, PERSIST_PERIOD_S
from dledger.client.consumer.listener import ConsumeHooks, DeliveredMessage, Handed, consume_trace
from dledger.client.consumer.offsets import FROM_LAST, BrokerOffsets, ConsumeFrom, QueueOffsets
from dledger.client.consumer.owned_queues import (
    Batch,
    Gate,
    LeaderWatch,
    OwnedQueue,
    OwnedQueues,
    Reading,
    ReadyQueues,
)
from dledger.client.consumer.process_queue import FlowLimits
from dledger.client.consumer.pull_consumer import ROCKETMQ_PULL_MESSAGES, PullConsumer
from dledger.client.consumer.rebalance import (
    SETTLE_S,
    AllocateMessageQueueStrategy,
    Averagely,
    Rebalance,
)
from dledger.client.consumer.subscriptions import SUB_ALL, SubscriptionExpression, Subscriptions
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import ClientClosedError
from dledger.client.core.hooks import ConsumeMessageHook, ConsumeReturnType
from dledger.client.core.route import MessageQueue
from dledger.client.trace import TraceDispatcher
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.bodies import ConsumerData, ConsumeType
from dledger.remoting.protocol.topic_names import TRACE_TOPIC

POLL_TIMEOUT_S: Final = 5.0
"""RocketMQ's pollTimeoutMillis."""
POLLED_LIMITS: Final = FlowLimits(max_offset_span=None)
"""Polled in order, acknowledged in order: there is no span to limit."""


class LitePullConsumer(ManagedScope):
    """A member of a consumer group that is polled. Open it with ``async with``.

    Attributes:
        group: The consumer group.
        trace: Sends message trace; None: it is not enabled.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        *,
        consume_from: ConsumeFrom = FROM_LAST,
        strategy: AllocateMessageQueueStrategy | None = None,
        auto_commit: bool = True,
        auto_commit_period_s: float = PERSIST_PERIOD_S,
        flow_limits: FlowLimits = POLLED_LIMITS,
        pull_batch_size: int = ROCKETMQ_PULL_MESSAGES,
        consume_message_hooks: tuple[ConsumeMessageHook, ...] = (),
        enable_msg_trace: bool = False,
        trace_topic: str = TRACE_TOPIC,
    ) -> None:
        """Prepare a consumer; *instance* must be open when the consumer is opened.

        Args:
            consume_from: Where the group begins in a queue it knows nothing of.
            strategy: How queues are dealt out; None: averagely.
            auto_commit: Store offsets every *auto_commit_period_s* and at the end.
            consume_message_hooks: Called for what polls return; see `dledger.client.core.hooks`.
            enable_msg_trace: Send to *trace_topic* what becomes of messages.
        """
        self.group = group
        self._instance = instance
        self._auto_commit_period_s = auto_commit_period_s if auto_commit else None
        self._subscriptions = Subscriptions(instance.clock)
        self._assigned: frozenset[MessageQueue] | None = None
        self._nursery: trio.Nursery | None = None
        self._is_open = False
        self._is_owning_again = False
        self._polled: list[tuple[Batch, Handed | None]] = []
        hooks = list(consume_message_hooks)
        self.trace: TraceDispatcher | None = None
        if enable_msg_trace:
            self.trace, trace_hook = consume_trace(instance, trace_topic)
            hooks.append(trace_hook)
        self._hooks = ConsumeHooks(hooks, group=group, clock=instance.clock)
        self._waits: set[trio.CancelScope] = set()
        self._paused: set[MessageQueue] = set()
        self._sought: dict[MessageQueue, int] = {}
        gate = Gate()
        self._reader = PullConsumer(instance, group)  # for its requests: this one is the member
        self._ready = ReadyQueues(gate)
        self._offsets = QueueOffsets(
            BrokerOffsets(instance, group), self._reader, consume_from, instance.clock
        )
        self._reading = Reading(
            self._reader,
            instance.clock,
            self._wanted_of,
            flow_limits,
            gate,
            self._ready.offer,
            pull_batch_size,
        )
        self._owned = OwnedQueues(work=self._own, let_go=self._hand_over, freed=self._queue_freed)
        self._rebalance = Rebalance(
            instance,
            group,
            strategy=strategy if strategy is not None else Averagely(),
            topics=lambda: self._subscriptions if self._assigned is None else (),
            apply=self._deal_out,
        )

    # ------------------------------------------------------------------------------ start and end

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        instance = self._instance
        instance.nursery  # noqa: B018  # raises ClientClosedError when it is not open
        instance.heartbeats.add_sharing_consumer(self._data(), self._rebalance.wake)
        self._is_open = True
        try:
            await instance.heartbeats.send()
            async with self.trace or nullcontext(), trio.open_nursery() as nursery:
                self._nursery = nursery
                self._owned.start(nursery)
                nursery.start_soon(self._rebalance.run)
                nursery.start_soon(LeaderWatch(instance, self._owned).run)
                if self._auto_commit_period_s is not None:
                    nursery.start_soon(self._offsets.run, self._owned, self._auto_commit_period_s)
                await self._own_assigned()
                try:
                    yield
                finally:
                    with trio.CancelScope(shield=True):
                        await self._stop()
                    nursery.cancel_scope.cancel()
        finally:
            self._is_open = False
            await instance.heartbeats.remove_consumer(self.group)

    async def _stop(self) -> None:
        self._is_open = False
        self._rebalance.stop()
        leaving = self._owned.drop_all()
        if self._auto_commit_period_s is not None:
            with trio.move_on_after(LAST_OFFSETS_S):
                await self._offsets.save(leaving, is_last=True)
        self._owned.clear()
        for wait in self._waits:
            wait.cancel()
        for _, handed in self._polled:
            if handed is not None:
                self._hooks.after(handed, ConsumeReturnType.FAILED)
        self._polled.clear()

    async def _own(self, owned: OwnedQueue) -> None:
        if owned.queue in self._paused:
            owned.gate.close()
        self._offsets.forget(owned.queue)
        sought = self._sought.pop(owned.queue, None)
        if sought is not None:
            owned.begin(sought)
        elif owned.messages is None:
            await self._offsets.begin(owned)
        await self._reading.read(owned)

    async def _hand_over(self, owned: OwnedQueue) -> None:
        if self._auto_commit_period_s is not None:
            await self._offsets.give_up(owned)

    async def _deal_out(self, topic: str, queues: frozenset[MessageQueue]) -> None:
        if self._assigned is None:  # a rebalance that began before the assignment is void
            await self._owned.apply(topic, queues)

    # ------------------------------------------------------------------------------ what is read

    def subscribe(self, topic: str, expression: str | SubscriptionExpression = SUB_ALL) -> None:
        """Read this member's part of *topic*, as the group's strategy deals it out.

        Raises:
            SubscriptionIllegalError: The text is no expression over tags.
            ConfigError: Queues were assigned by hand.
        """
        if self._assigned is not None:
            raise ConfigError("queues are assigned by hand: a consumer does one or the other")
        self._subscriptions.put(topic, expression)
        self._announce()

    def unsubscribe(self, topic: str) -> None:
        """Read *topic* no more. Idempotent."""
        if self._subscriptions.remove(topic):
            self._announce()

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly *queues*, whichever other client reads them.

        Raises:
            ConfigError: There are subscriptions.
        """
        if len(self._subscriptions):
            raise ConfigError("there are subscriptions: a consumer does one or the other")
        self._assigned = frozenset(queues)
        if self._is_open:
            await self._own_assigned()

    async def _own_assigned(self) -> None:
        if self._assigned is None:
            return
        own: dict[str, list[MessageQueue]] = {topic: [] for topic in self._owned.topics}
        for queue in self._assigned:
            own.setdefault(queue.topic, []).append(queue)
        for topic, queues in own.items():
            await self._owned.apply(topic, frozenset(queues))

    def _queue_freed(self) -> None:
        if self._assigned is None:
            self._rebalance.wake()
        elif self._is_open and self._nursery is not None and not self._is_owning_again:
            self._is_owning_again = True
            self._nursery.start_soon(self._own_again)

    async def _own_again(self) -> None:
        """Own what was assigned again while it was let go; one look does for thousands."""
        await self._instance.clock.sleep(SETTLE_S)
        self._is_owning_again = False
        if self._is_open:
            await self._own_assigned()

    def _announce(self) -> None:
        if self._is_open:
            self._instance.heartbeats.update_consumer(self._data())
            self._rebalance.wake()

    def _data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            subscription_data_set=self._subscriptions.data(),
        )

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are this consumer's now."""
        return self._owned.queues

    async def fetch_message_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """As `PullConsumer.fetch_message_queues`."""
        return await self._reader.fetch_message_queues(topic)

    # ------------------------------------------------------------------------------ reading

    async def poll(
        self, timeout_s: float = POLL_TIMEOUT_S, *, max_messages: int = ROCKETMQ_PULL_MESSAGES
    ) -> list[DeliveredMessage]:
        """Return messages of one queue, in order, or an empty list after *timeout_s*.

        What the poll before returned counts as dealt with now.

        Raises:
            ClientClosedError: The consumer or its instance is not open, or is closed meanwhile.
        Cancellation: Nothing was taken.
        """
        self._check_open()
        self._acknowledge()
        await trio.lowlevel.checkpoint()
        # Without time to wait there may still be something that was read ahead.
        batch = self._ready.take_nowait(max_messages, self._is_wanted)
        if batch is None:
            with trio.move_on_after(timeout_s) as wait:
                self._waits.add(wait)
                try:
                    batch = await self._ready.take(max_messages, wanted=self._is_wanted)
                finally:
                    self._waits.discard(wait)
        if batch is None:
            self._check_open()
            return []
        handed = None
        if self._hooks:
            handed = self._hooks.before(batch.messages, batch.owned.queue)
        self._polled.append((batch, handed))
        return batch.messages

    def _check_open(self) -> None:
        if not self._is_open or self._instance.is_closed:
            raise ClientClosedError(f"the consumer of {self.group} is not open; use 'async with'")

    def _put_back(self, messages: list[DeliveredMessage]) -> None:
        """What a poll returned has not reached its caller: the next poll returns it again."""
        others = []
        for batch, handed in self._polled:
            if batch.messages is not messages:
                others.append((batch, handed))
                continue
            batch.put_back(messages)
            self._ready.offer(batch.owned)
            if handed is not None:
                self._hooks.after(handed, ConsumeReturnType.FAILED)
        self._polled = others

    def _wanted_of(self, topic: str) -> SubscriptionExpression | None:
        if self._assigned is not None:
            return SubscriptionExpression()  # of queues that are assigned all is read
        return self._subscriptions.get(topic)

    def _is_wanted(self, owned: OwnedQueue) -> bool:
        return owned.queue not in self._paused

    def _acknowledge(self, queue: MessageQueue | None = None) -> None:
        """What was polled of *queue* is dealt with; None: of all."""
        others = []
        for batch, handed in self._polled:
            if queue is not None and batch.owned.queue != queue:
                others.append((batch, handed))
                continue
            batch.acknowledge()
            if handed is not None:
                self._hooks.after(handed, ConsumeReturnType.SUCCESS)
        self._polled = others

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at *offset*; messages of *queue* read ahead are forgotten.

        What was polled of *queue* counts no more; of other queues it is dealt with at the next
        poll, as without a seek. A queue that is not this consumer's yet begins there when it is.
        """
        owned = self._owned.get(queue)
        if owned is None:
            self._sought[queue] = offset
        else:
            # An older one that is not carried out yet counts no more.
            self._sought.pop(queue, None)
            self._acknowledge(queue)
            owned.begin(offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on at the first offset the queue holds. Raises as `PullConsumer.min_offset`."""
        self.seek(queue, await self._reader.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on behind the last message of now. Raises as `PullConsumer.max_offset`."""
        self.seek(queue, await self._reader.max_offset(queue))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Read and return nothing of *queues* until `resume`; they stay this consumer's."""
        for queue in queues:
            self._paused.add(queue)
            owned = self._owned.get(queue)
            if owned is not None:
                owned.gate.close()

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Go on with *queues*. Idempotent."""
        for queue in queues:
            self._paused.discard(queue)
            owned = self._owned.get(queue)
            if owned is not None:
                owned.gate.open()
                self._ready.offer(owned)

    async def commit(self) -> None:
        """Store that everything polled so far is dealt with. What fails is tried again later."""
        self._acknowledge()
        await self._offsets.save(self._owned)

    async def committed(self, queue: MessageQueue) -> int | None:
        """As `PullConsumer.committed_offset`."""
        return await self._reader.committed_offset(queue)
