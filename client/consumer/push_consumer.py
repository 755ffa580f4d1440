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

import traceback
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import trio

from client.consumer.config import LAST_OFFSETS_S, PushConfig
from client.consumer.consumption import ConcurrentConsumption, OrderlyConsumption, SendBack
from client.consumer.listener import (
    ConsumeContext,
    ConsumeHooks,
    ConsumeStatus,
    DeliveredMessage,
    Listener,
    ListenerCall,
    consume_trace,
    retry_topic_of,
)
from client.consumer.offsets import (
    BrokerOffsets,
    LocalOffsets,
    OffsetReset,
    OffsetStore,
    QueueOffsets,
    UnkeptOffsets,
    offsets_path,
)
from client.consumer.owned_queues import (
    Gate,
    LeaderWatch,
    OwnedQueue,
    OwnedQueues,
    Reading,
    ReadyQueues,
)
from client.consumer.process_queue import ConsumeMeter, FlowLimits
from client.consumer.pull_consumer import PullConsumer
from client.consumer.queue_locks import EXPIRES_S, QueueLocks
from client.consumer.rebalance import Rebalance
from client.consumer.subscriptions import SUB_ALL, TAG, SubscriptionExpression, Subscriptions
from client.core.broker_requests import wire_queue
from client.core.client_instance import ClientInstance
from client.core.client_state import ManagedScope
from client.core.errors import RequestFailedError
from client.core.message_ext import MessageExt
from client.core.route import MessageQueue
from client.trace import TraceDispatcher
from commitlog.errors import ConfigError, MQError
from remoting.log import get_logger
from remoting.protocol import bodies
from remoting.protocol.bodies import CheckClientRequestBody, ConsumerData, ConsumeType
from remoting.protocol.codes import RequestCode, ResponseCode

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
            listener: Called with messages; see `client.consumer.listener.Listener`.
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
            self._store(),
            reader,
            config.consume_from,
            self._clock,
            may_store=self._ordered.holds,
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
                "no disk: use one made by client.connect.connect, or no offset_folder"
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
        await self._offsets.save([owned], is_last=True)
        if self._locks is not None:
            await self._locks.unlock(_not_in_hand([owned]))


def _not_in_hand(leaving: Iterable[OwnedQueue]) -> list[MessageQueue]:
    """Return the queues whose listeners have ended.

    A plain function cannot be cancelled: its queue stays locked until the lock expires, or the
    consumer has ended.
    """
    return [
        owned.queue for owned in leaving if owned.messages is None or not owned.messages.in_hand
    ]


DIRECT_WORKER: Final = "direct"
"""Kind of worker for messages that an operator has consumed: beside all others."""
VERSION_DESC: Final = "V4_9_7"
"""The RocketMQ whose client these answers are like; its ordinal stands in every frame of ours."""
STACKS_MAX_CHARS: Final = 256 * 1024
"""Of the stacks of all tasks: an operator reads them, and an answer is one frame."""


class ConsumeResult(StrEnum):
    """What became of a message that was consumed directly."""

    CR_SUCCESS = "CR_SUCCESS"
    CR_LATER = "CR_LATER"
    CR_THROW_EXCEPTION = "CR_THROW_EXCEPTION"


@dataclass(frozen=True, slots=True)
class ConsumerAnswers:
    """A `client.core.broker_requests.CalledConsumer` made of a push consumer's parts.

    Attributes:
        instance: Its client.
        group: Its group.
        config: Its settings.
        is_orderly: It consumes each queue in its order.
        started_at_ms: Since when, ms since the epoch.
        subscriptions: What it wants.
        owned: Its queues.
        locks: Their locks; None: there are none.
        listener: Consumes.
        meter: Counts for it.
        resets: Does what `reset_offsets` asks for.
    """

    instance: ClientInstance
    group: str
    config: PushConfig
    is_orderly: bool
    started_at_ms: int
    subscriptions: Subscriptions
    owned: OwnedQueues
    locks: QueueLocks | None
    listener: ListenerCall
    meter: ConsumeMeter
    resets: OffsetReset

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """See `client.core.broker_requests.CalledConsumer`."""
        self.resets.reset(offsets)

    def consumed_offsets(self, topic: str) -> dict[MessageQueue, int]:
        """See `client.core.broker_requests.CalledConsumer`."""
        return {
            owned.queue: owned.messages.commit_offset
            for owned in self.owned
            if owned.queue.topic == topic and owned.messages is not None
        }

    def running_info(self, *, with_stacks: bool) -> bodies.ConsumerRunningInfo:
        """See `client.core.broker_requests.CalledConsumer`."""
        return bodies.ConsumerRunningInfo(
            properties=self._properties(),
            subscription_set=sorted(self.subscriptions.data(), key=lambda data: data.topic),
            mq_table={wire_queue(owned.queue): self._queue_info(owned) for owned in self.owned},
            status_table={topic: self.meter.status(topic) for topic in self.subscriptions},
            jstack=stacks() if with_stacks else None,
        )

    def _properties(self) -> dict[str, str]:
        config = self.config
        return {
            "PROP_NAMESERVER_ADDR": ";".join(self.instance.name_servers.list.addresses),
            "PROP_CONSUME_TYPE": bodies.ConsumeType.CONSUME_PASSIVELY.value,
            "PROP_CLIENT_VERSION": VERSION_DESC,
            "PROP_CONSUMEORDERLY": _java_bool(self.is_orderly),
            "PROP_THREADPOOL_CORE_SIZE": str(config.consume_tasks),
            "PROP_CONSUMER_START_TIMESTAMP": str(self.started_at_ms),
            "consumerGroup": self.group,
            "messageModel": config.message_model.value,
            "consumeFromWhere": config.consume_from.where.value,
            "consumeThreadMin": str(config.consume_tasks),
            "consumeThreadMax": str(config.consume_tasks),
            "consumeMessageBatchMaxSize": str(config.consume_message_batch_max_size),
            "pullBatchSize": str(config.pull_batch_size),
            "pullThresholdForQueue": str(config.flow_limits.max_messages),
            "maxReconsumeTimes": str(config.max_reconsume_times),
            "suspendCurrentQueueTimeMillis": str(config.suspend_current_queue_ms),
            "consumeTimeout": str(int(config.consume_timeout_s // 60)),
        }

    def _queue_info(self, owned: OwnedQueue) -> bodies.ProcessQueueInfo:
        queue, messages = owned.queue, owned.messages
        info = bodies.ProcessQueueInfo(
            droped=owned.is_dropped,
            locked=self.locks is not None and self.locks.is_held(queue),
            last_lock_timestamp=self._locked_at_ms(queue),
            last_pull_timestamp=self.meter.pulled_at_ms.get(queue, 0),
            last_consume_timestamp=self.meter.consumed_at_ms.get(queue, 0),
        )
        if messages is None:
            return info
        info.commit_offset = messages.commit_offset
        info.cached_msg_count = len(messages)
        info.cached_msg_size_in_mi_b = messages.cached_bytes >> 20
        if messages.offset_span is not None:
            info.cached_msg_min_offset, info.cached_msg_max_offset = messages.offset_span
        span = messages.span_in_hand if self.is_orderly else None
        if span is not None:
            info.transaction_msg_count = messages.in_hand
            info.transaction_msg_min_offset, info.transaction_msg_max_offset = span
        return info

    def _locked_at_ms(self, queue: MessageQueue) -> int:
        if self.locks is None or not self.locks.is_held(queue):
            return 0
        age_s = EXPIRES_S - self.locks.left_s(queue)
        return self.instance.clock.wall_ms() - int(age_s * 1000)

    async def consume_directly(self, message: MessageExt) -> bodies.ConsumeMessageDirectlyResult:
        """See `client.core.broker_requests.CalledConsumer`; an error of the listener is an answer.

        Cancellation: An async listener is cancelled.
        """
        queue = MessageQueue(message.topic, message.broker_name, message.queue_id)
        delivered = DeliveredMessage(message, queue)
        result = bodies.ConsumeMessageDirectlyResult(order=self.is_orderly)
        clock = self.instance.clock
        began_s = clock.monotonic()
        try:
            status = await self.listener([delivered], ConsumeContext(queue), DIRECT_WORKER)
        except Exception as error:  # noqa: BLE001  # the listener's own; the operator gets it
            _log.warning("listener_failed", queue=str(queue), exc_info=error)
            result.consume_result = ConsumeResult.CR_THROW_EXCEPTION
            result.remark = f"{type(error).__name__}: {error}"
        else:
            is_success = status is ConsumeStatus.SUCCESS
            result.consume_result = (
                ConsumeResult.CR_SUCCESS if is_success else ConsumeResult.CR_LATER
            )
        result.spent_time_mills = int((clock.monotonic() - began_s) * 1000)
        return result


def _java_bool(value: bool) -> str:
    return "true" if value else "false"


def stacks() -> str:
    """Return where every task of this program is, as far as `STACKS_MAX_CHARS` reach."""
    parts: list[str] = []
    left = STACKS_MAX_CHARS
    root = trio.lowlevel.current_root_task()
    waiting = [] if root is None else [root]
    while waiting and left > 0:
        task = waiting.pop()
        for nursery in task.child_nurseries:
            waiting += nursery.child_tasks
        frames = traceback.StackSummary.extract(task.iter_await_frames())
        text = f"TASK {task.name}\n" + "".join(frames.format()) + "\n"
        parts.append(text[:left])
        left -= len(text)
    return "".join(parts)
