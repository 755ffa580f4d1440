"""Calls a listener with every message of its subscriptions, sharing them with its group.

::

    brokers: members of the group ──► Rebalance ──► owned queues ──► a reader each (long polls)
                                                                        │
    offsets ◄── committed every 5 s ◄── acknowledged ◄── listener ◄─── process queues
                                                            │
                                       failed ──► sent back ──► %RETRY% topic ──► owned as others

A message is delivered at least once. It comes twice when a consumer ends before its offset is
stored, when a queue changes hands while it is consumed, and when it was sent back and the answer
got lost.

When its broker asks for an operator, it reports of itself (`ConsumerAnswers`).

Spec: docs/internals/protocol/remoting.md, sections 5.1 and 11.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Final

import trio

from dledger.client.consumer.called_consumer import ConsumerAnswers
from dledger.client.consumer.config import LAST_OFFSETS_S, PushConfig
from dledger.client.consumer.consumption import ConcurrentConsumption, OrderlyConsumption, SendBack
from dledger.client.consumer.listener import (
    ConsumeHooks,
    Listener,
    ListenerCall,
    consume_trace,
    retry_topic_of,
)
from dledger.client.consumer.offsets import (
    BrokerOffsets,
    LocalOffsets,
    OffsetReset,
    OffsetStore,
    QueueOffsets,
    UnkeptOffsets,
    offsets_path,
)
from dledger.client.consumer.owned_queues import (
    Gate,
    LeaderWatch,
    OwnedQueue,
    OwnedQueues,
    Reading,
    ReadyQueues,
)
from dledger.client.consumer.process_queue import ConsumeMeter, FlowLimits
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.queue_locks import QueueLocks
from dledger.client.consumer.rebalance import Rebalance
from dledger.client.consumer.subscriptions import (
    SUB_ALL,
    TAG,
    SubscriptionExpression,
    Subscriptions,
)
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.client_state import ManagedScope
from dledger.client.core.errors import RequestFailedError
from dledger.client.core.route import MessageQueue
from dledger.client.trace import TraceDispatcher
from dledger.commitlog.errors import ConfigError, MQError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.bodies import CheckClientRequestBody, ConsumerData, ConsumeType
from dledger.remoting.protocol.codes import RequestCode, ResponseCode

HAND_OVER_S: Final = 1.0
"""How long a queue that goes to another client waits for its listeners, so that they need not be
repeated. The next owner is there within this anyway."""
ORDERLY_HAND_OVER_S: Final = 20.0
"""RocketMQ's delay of an unlock while messages are consumed: until then the queue stays locked."""

_log = get_logger(__name__)


class PushConsumer(ManagedScope):
    """A member of a consumer group. Open it with ``async with`` inside its client instance.

    Attributes:
        group: The consumer group.
        config: See `PushConfig`.
        trace: Sends message trace; None: it is not enabled.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, str | SubscriptionExpression] | None = None,
        config: PushConfig | None = None,
        *,
        orderly: bool = False,
    ) -> None:
        """Prepare a consumer; *instance* must be open when the consumer is opened.

        Args:
            group: All consumers of a group must have the same subscriptions and settings.
            listener: Called with messages; see `dledger.client.consumer.listener.Listener`.
            subscriptions: Topic → expression; more with `subscribe`.
            orderly: Consume each queue in its order, one batch at a time, under a lock.
        Raises:
            ConfigError: The listener is a plain function and the instance cannot run one, or a
                subscription is none.
        """
        self.group = group
        self.config = config = config if config is not None else PushConfig()
        self._instance = instance
        self._clock = instance.clock
        self._orderly = orderly
        self._subscriptions = Subscriptions(instance.clock)
        self._gate = Gate()
        self._is_open = False
        self._owned = OwnedQueues(
            work=self._own,
            let_go=self._hand_over,
            freed=self._queue_freed,
            changed=self._queues_changed,
        )

        given = list(config.consume_message_hooks)
        self.trace: TraceDispatcher | None = None
        if config.enable_msg_trace:
            self.trace, trace_hook = consume_trace(instance, config.trace_topic)
            given.append(trace_hook)
        hooks = ConsumeHooks(
            given,
            group=group,
            clock=instance.clock,
            timeout_s=config.consume_timeout_s,
            orderly=orderly,
        )
        self._meter = ConsumeMeter(instance.clock)
        self._call = call = ListenerCall(
            listener, instance.executor, f"listener {group}", self._meter, hooks
        )
        # For its requests: the member of the group is this consumer.
        reader = PullConsumer(instance, group, follower_reads=config.follower_reads)
        self._ready = ReadyQueues(self._gate)
        self._send_back = SendBack(instance, group, config.tries(orderly=orderly))
        self._rebalance = Rebalance(
            instance,
            group,
            strategy=None if config.is_broadcasting else config.allocate_message_queue_strategy,
            topics=lambda: self._subscriptions,
            apply=self._owned.apply,
        )
        self._reading = Reading(
            reader,
            self._clock,
            self._subscriptions.get,
            self._limits(),
            self._gate,
            self._ready.offer,
            config.pull_batch_size,
            self.lock_token,
            self._lock_lost,
            self._meter,
        )
        self._locks: QueueLocks | None = None
        if orderly and not config.is_broadcasting:
            self._locks = QueueLocks(instance, group, self._owned.held)
        self._concurrent = ConcurrentConsumption(
            call, self._ready, self._send_back, config, self._clock
        )
        self._ordered = OrderlyConsumption(
            call, self._locks, self._send_back, config, self._clock, self._gate
        )
        self._offsets = QueueOffsets(
            self._store(), reader, config.consume_from, self._clock, may_store=self._ordered.holds
        )
        self._in_hand: list[MessageQueue] = []
        self._is_suspended = False
        self._resets = OffsetReset(
            self._owned, self._offsets, suspend=self._gate.close, resume=self._reset_done
        )
        for topic, expression in (subscriptions or {}).items():
            self.subscribe(topic, expression)

    def _store(self) -> OffsetStore:
        config, instance = self.config, self._instance
        if not config.is_broadcasting:
            return BrokerOffsets(instance, self.group, self.lock_token)
        if not config.offset_folder:
            return UnkeptOffsets()
        if instance.disk is None or instance.executor is None:
            raise ConfigError(
                "a broadcasting consumer keeps its offsets in a file, and this client instance has "
                "no disk: use one made by dledger.client.connect.connect, or no offset_folder"
            )
        settings = instance.config
        path = offsets_path(
            config.offset_folder, settings.client_ip, settings.instance_name, self.group
        )
        return LocalOffsets(instance.disk, instance.executor, path)

    def _limits(self) -> FlowLimits:
        limits = self.config.flow_limits
        # In order nothing is acknowledged out of it: there is no span to limit.
        return FlowLimits(limits.max_messages, limits.max_bytes, None) if self._orderly else limits

    # ------------------------------------------------------------------------------ what is wanted

    def subscribe(self, topic: str, expression: str | SubscriptionExpression = SUB_ALL) -> None:
        """Consume *topic*, too, from now on; a subscription it has is replaced.

        Args:
            expression: ``*``, tags joined by ``||``, or a `SubscriptionExpression`.
        Raises:
            SubscriptionIllegalError: The text is no expression over tags.
        """
        self._subscriptions.put(topic, expression)
        self._announce()

    def unsubscribe(self, topic: str) -> None:
        """Consume *topic* no more. What is in a listener's hands is finished. Idempotent."""
        if self._subscriptions.remove(topic):
            self._announce()

    def _announce(self) -> None:
        if self._is_open:
            self._instance.heartbeats.update_consumer(self._data())
            self._rebalance.wake()

    def _data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=self.config.message_model,
            consume_from_where=self.config.consume_from.where,
            subscription_data_set=self._subscriptions.data(),
        )

    # ------------------------------------------------------------------------------ what is there

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are this consumer's now, those of the retry topic included."""
        return self._owned.queues

    @property
    def counts(self) -> dict[str, int]:
        """What has happened so far: messages by what became of them, rebalances, flow control."""
        found = dict((self._ordered if self._orderly else self._concurrent).counts)
        found["sent_back"] = self._send_back.sent_back
        found["sent_to_retry_topic"] = self._send_back.sent_to_retry_topic
        found["rebalances"] = self._rebalance.counters.rounds
        found["rebalance_changes"] = self._rebalance.counters.changes
        return found

    def lock_token(self, queue: MessageQueue) -> int | None:
        """Return the fencing token of the lock on *queue*; None where there is none."""
        return None if self._locks is None else self._locks.tokens.get(queue)

    # ------------------------------------------------------------------------------ start and end

    def suspend(self) -> None:
        """Pull nothing and hand nothing out until `resume`; listeners that run go on. Idempotent.

        The queues stay this consumer's, and locks stay held.
        """
        self._is_suspended = True
        self._gate.close()

    def resume(self) -> None:
        """Go on after `suspend`. Idempotent."""
        self._is_suspended = False
        self._gate.open()

    def _reset_done(self) -> None:
        if not self._is_suspended:
            self._gate.open()

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        instance = self._instance
        instance.nursery  # noqa: B018  # raises ClientClosedError when it is not open
        if not self.config.is_broadcasting:
            self._subscriptions.put(retry_topic_of(self.group))
        await self._check_expressions()
        instance.heartbeats.add_sharing_consumer(self._data(), self._rebalance.wake)
        instance.consumer_calls.add(self.group, self._answers())
        self._is_open = True
        try:
            await self._meet_brokers()
            async with self.trace or nullcontext(), trio.open_nursery() as nursery:
                self._start(nursery)
                try:
                    yield
                finally:
                    with trio.CancelScope(shield=True):
                        await self._stop()
                    nursery.cancel_scope.cancel()
        finally:
            self._is_open = False
            if self._locks is not None and not instance.is_closed:
                # Only now have plain functions ended that could not be cancelled.
                with trio.move_on_after(LAST_OFFSETS_S, shield=True):
                    await self._locks.unlock(self._in_hand)
            instance.consumer_calls.remove(self.group)
            await instance.heartbeats.remove_consumer(self.group)

    def _answers(self) -> ConsumerAnswers:
        return ConsumerAnswers(
            self._instance,
            self.group,
            self.config,
            self._orderly,
            self._clock.wall_ms(),
            self._subscriptions,
            self._owned,
            self._locks,
            self._call,
            self._meter,
            self._resets,
        )

    def _start(self, nursery: trio.Nursery) -> None:
        self._owned.start(nursery)
        nursery.start_soon(self._rebalance.run)
        nursery.start_soon(self._resets.run)
        nursery.start_soon(self._offsets.run, self._owned, self.config.persist_period_s)
        nursery.start_soon(LeaderWatch(self._instance, self._owned).run)
        if self._locks is not None:
            nursery.start_soon(self._locks.run)
        if not self._orderly:
            nursery.start_soon(self._concurrent.run)

    async def _meet_brokers(self) -> None:
        """Register this consumer with every broker before the first rebalance."""
        for topic in self._subscriptions:
            try:
                await self._instance.route(topic)
            except MQError as error:
                _log.info("no_route_yet", topic=topic, error=str(error))
        await self._instance.heartbeats.send()

    async def _check_expressions(self) -> None:
        """Ask brokers whether they can filter with what is not made of tags.

        Raises:
            RequestFailedError: One cannot; its code and remark are carried.
            ClientError: No broker answered.
        """
        for data in self._subscriptions.data():
            if data.expression_type == TAG:
                continue
            route = await self._instance.route(data.topic)
            body = CheckClientRequestBody(
                client_id=self._instance.client_id, group=self.group, subscription_data=data
            ).encode()
            for broker_name in route.broker_names():
                answer = await self._instance.ask_leader(
                    broker_name, RequestCode.CHECK_CLIENT_CONFIG, None, body, topic=data.topic
                )
                if answer.code != ResponseCode.SUCCESS:
                    raise RequestFailedError(
                        f"{broker_name} cannot filter {data.topic} by {data.sub_string!r}: "
                        f"{answer.remark or ''}",
                        code=answer.code,
                        remark=answer.remark or "",
                    )

    async def _stop(self) -> None:
        """Finish what runs, store the last offsets and give the locks back, all of it bounded."""
        self._rebalance.stop()
        leaving = self._owned.drop_all()
        if self._instance.is_closed:
            return  # no broker is reachable: the others find out
        with trio.move_on_after(self.config.stop_timeout_s):
            for owned in leaving:
                await owned.empty_handed()
        for owned in leaving:
            # As in `_hand_over`: the next owner's listener must not begin beside one of ours.
            owned.scope.cancel()
        with trio.move_on_after(LAST_OFFSETS_S):
            await self._offsets.save(leaving, is_last=True)
        self._owned.clear()
        if self._locks is not None:
            with trio.move_on_after(LAST_OFFSETS_S):
                await self._locks.unlock(_not_in_hand(leaving))
            self._in_hand = [o.queue for o in leaving if o.messages and o.messages.in_hand]

    # ------------------------------------------------------------------------------ queues

    def _queues_changed(self) -> None:
        if self._locks is not None:
            self._locks.lock_now()

    def _lock_lost(self, queue: MessageQueue) -> None:
        if self._locks is not None:
            self._locks.lost(queue)

    def _queue_freed(self) -> None:
        self._rebalance.wake()

    async def _own(self, owned: OwnedQueue) -> None:
        if self._orderly:
            await self._ordered.run(owned, self._offsets.begin, self._reading.read)
        else:
            await self._offsets.begin(owned)
            await self._reading.read(owned)

    async def _hand_over(self, owned: OwnedQueue) -> None:
        """Let listeners finish, store the last offset, and let the next owner have the queue."""
        with trio.move_on_after(ORDERLY_HAND_OVER_S if self._orderly else HAND_OVER_S):
            await owned.empty_handed()
        owned.scope.cancel()
        await self._offsets.give_up(owned)
        if self._locks is not None:
            await self._locks.unlock(_not_in_hand([owned]))


def _not_in_hand(leaving: Iterable[OwnedQueue]) -> list[MessageQueue]:
    """Return the queues whose listeners have ended."""
    return [
        owned.queue for owned in leaving if owned.messages is None or not owned.messages.in_hand
    ]
