"""Answers what brokers ask of a push consumer for an operator: 220, 221, 307 and 309.

A broker passes them on: reset offsets, return the consumed ones, describe the running consumer,
consume one message at once.

Spec: docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    DeliveredMessage,
    ListenerCall,
)
from dledger.client.consumer.offsets import OffsetReset
from dledger.client.consumer.owned_queues import OwnedQueue, OwnedQueues
from dledger.client.consumer.process_queue import ConsumeMeter
from dledger.client.consumer.queue_locks import EXPIRES_S, QueueLocks
from dledger.client.consumer.subscriptions import Subscriptions
from dledger.client.core.broker_requests import wire_queue
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.client.trace import java_bool
from dledger.remoting.log import get_logger
from dledger.remoting.protocol import bodies

_log = get_logger(__name__)

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
    """A `dledger.client.core.broker_requests.CalledConsumer` made of a push consumer's parts.

    Attributes:
        started_at_ms: Since when, ms since the epoch.
        locks: Their locks; None: there are none.
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
        """See `dledger.client.core.broker_requests.CalledConsumer`."""
        self.resets.reset(offsets)

    def consumed_offsets(self, topic: str) -> dict[MessageQueue, int]:
        """See `dledger.client.core.broker_requests.CalledConsumer`."""
        return {
            owned.queue: owned.messages.commit_offset
            for owned in self.owned
            if owned.queue.topic == topic and owned.messages is not None
        }

    def running_info(self, *, with_stacks: bool) -> bodies.ConsumerRunningInfo:
        """See `dledger.client.core.broker_requests.CalledConsumer`."""
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
            "PROP_CONSUMEORDERLY": java_bool(self.is_orderly),
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
