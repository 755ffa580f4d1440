"""Calls a listener: with messages in any order, many at a time, or with each queue in its order.

Concurrent: a message the listener fails on is sent back and comes again through the retry topic;
it is stored once more before it is acknowledged here, so nothing is lost, and one whose answer got
lost may come twice. When sending it back fails, it stays here and is tried again.

Orderly: a queue is read and consumed only while its lock is held. When the lock is lost, what was
pulled is dropped, and the queue starts at its committed offset once the lock is back: another
consumer may have advanced it meanwhile. A message that fails is tried again in place and holds up
those behind it, until it has been tried often enough to go to the retry topic.

Spec: docs/internals/protocol/semantics.md, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    DeliveredMessage,
    ListenerCall,
    retry_topic_of,
)
from dledger.client.consumer.owned_queues import Batch, Gate, OwnedQueue, ReadyQueues
from dledger.client.consumer.process_queue import ProcessQueue
from dledger.client.consumer.queue_locks import QueueLocks
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import refusal
from dledger.client.core.route import DEFAULT_TOPIC
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_WAIT,
    encode_properties,
)
from dledger.commitlog.record import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_TYPE_MASK
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.headers import ConsumerSendMsgBackHeader, SendMessageHeader
from dledger.remoting.protocol.outcome import STORED_CODES
from dledger.remoting.seams import Clock

_log = get_logger(__name__)

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry; each later one takes the next."""
SEND_BACK_TIMEOUT_S: Final = 5.0
"""For each of the two ways."""
_MOST_TRIES: Final = 0x7FFFFFFF  # what the field holds
INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
"""RocketMQ's name for the producer inside a consumer."""

# What belongs to the way the message came, not to the message.
_LEFT_BEHIND: Final = (
    PROPERTY_CLUSTER,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_WAIT,
)
_COMPRESSION_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK


@dataclass(eq=False, repr=False)
class SendBack:
    """Gives back the messages of one consumer group."""

    _instance: ClientInstance
    _group: str
    _max_reconsume_times: int

    def __post_init__(self) -> None:
        self._retry_topic = retry_topic_of(self._group)
        self.sent_back = 0
        self.sent_to_retry_topic = 0

    async def send_back(self, message: DeliveredMessage, delay_level: int) -> None:
        """Ask the broker to store *message* for another try; send it oneself when that fails.

        Raises ClientError: neither worked; the message may be stored, and is still the consumer's.
        """
        try:
            await self._ask(message, delay_level)
        except MQError as error:
            _log.warning("send_back_failed", message_id=message.message_id, error=str(error))
            await self.send_to_retry_topic(message, delay_level)
        else:
            self.sent_back += 1

    async def _ask(self, message: DeliveredMessage, delay_level: int) -> None:
        header = ConsumerSendMsgBackHeader(
            offset=message.phy_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=self._max_reconsume_times,
        )
        answer = await self._instance.ask_leader(
            message.broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            dict(header.encode()),
            topic=message.message_queue.topic,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(f"message {message.message_id} not taken back", answer)

    async def send_to_retry_topic(self, message: DeliveredMessage, delay_level: int = 0) -> None:
        """Send a copy of *message* to the group's retry topic, on the broker it came from.

        A broker puts one that was tried too often into the dead letters.

        Raises ClientError: it is not known to be stored.
        """
        record = message.record
        times = message.reconsume_times
        header = SendMessageHeader(
            producer_group=INNER_PRODUCER_GROUP,
            topic=self._retry_topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self._instance.config.default_topic_queue_nums,
            queue_id=-1,  # the broker knows how many there are
            sys_flag=record.sys_flag & _COMPRESSION_FLAGS,
            born_timestamp=record.born_timestamp_ms,
            flag=record.flag,
            properties=encode_properties(self._properties(message, delay_level)).decode(),
            reconsume_times=_times_sent(times, delay_level, self._max_reconsume_times),
            unit_mode=False,
            max_reconsume_times=self._max_reconsume_times,
        )
        answer = await self._instance.ask_leader(
            message.broker_name,
            RequestCode.SEND_MESSAGE_V2,
            dict(header.encode_v2()),
            bytes(record.body),
            topic=message.message_queue.topic,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )
        if answer.code not in STORED_CODES:
            raise refusal(f"message {message.message_id} not sent to {self._retry_topic}", answer)
        self.sent_to_retry_topic += 1

    def _properties(self, message: DeliveredMessage, delay_level: int) -> dict[str, str]:
        properties = {
            name: value for name, value in message.properties.items() if name not in _LEFT_BEHIND
        }
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_message_id)
        properties[PROPERTY_RETRY_TOPIC] = message.topic
        level = delay_level if delay_level > 0 else FIRST_RETRY_LEVEL + message.reconsume_times
        properties[PROPERTY_DELAY] = str(level)
        return properties


def _times_sent(times: int, delay_level: int, most: int) -> int:
    """Return the number of tries that a broker reads: more than *most* is a dead letter."""
    return min((most if delay_level < 0 else times) + 1, _MOST_TRIES)


AGAIN_HERE_S: Final = 5.0
"""RocketMQ's pause before a message that could not be sent back is tried again."""
EXPIRY_CHECKS: Final = 15
"""Times within the consume timeout that is looked for messages that have exceeded it."""


@dataclass(eq=False, repr=False, slots=True)
class _Running:
    """One call of the listener."""

    batch: Batch
    context: ConsumeContext
    since_s: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_expired: bool = False


@dataclass(eq=False, repr=False)
class ConcurrentConsumption:
    """The workers of one consumer.

    *counts*: messages by what became of them: ``consumed``, ``failed``, ``expired``, ``kept``
    (could not be sent back), ``dropped`` (broadcasting).
    """

    _listener: ListenerCall
    _ready: ReadyQueues
    _send_back: SendBack
    _config: PushConfig
    _clock: Clock

    def __post_init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self._nursery: trio.Nursery | None = None
        self.counts = dict.fromkeys(("consumed", "failed", "expired", "kept", "dropped"), 0)

    async def run(self) -> None:
        """Consume until cancelled.

        Cancellation: Async listeners are cancelled; what they had is delivered again.
        """
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._end_overdue_calls)
            for number in range(self._config.consume_tasks):
                self._nursery.start_soon(self._work, number)

    async def _work(self, number: int) -> None:
        most = self._config.consume_message_batch_max_size
        while True:
            await self._consume(await self._ready.take(most), number)

    async def _consume(self, batch: Batch, worker: int) -> None:
        context = ConsumeContext(batch.owned.queue)
        running = _Running(batch, context, self._clock.monotonic())
        self._running[id(running)] = running
        status = ConsumeStatus.RECONSUME_LATER
        try:
            with running.scope:
                status = await self._listener(batch.messages, context, worker)
        except Exception as error:  # noqa: BLE001  # the listener's own; the messages come again
            _log.warning("listener_failed", queue=str(context.queue), exc_info=error)
        except BaseException:
            if not running.is_expired:
                batch.put_back(batch.messages)  # a consumer that stops does not wait for them
            raise
        finally:
            del self._running[id(running)]
        if not running.is_expired:  # else they were sent back meanwhile
            await self._finish(batch, context, status)

    async def _finish(self, batch: Batch, context: ConsumeContext, status: ConsumeStatus) -> None:
        messages = batch.messages
        done = 0
        if status is ConsumeStatus.SUCCESS:
            ack_index = context.ack_index
            done = len(messages) if ack_index is None else max(0, min(ack_index + 1, len(messages)))
        self.counts["consumed"] += done
        batch.acknowledge(messages[:done])  # at once: sending back the others may take long
        failed = messages[done:]
        if failed:
            self.counts["failed"] += len(failed)
            await self._give_back(batch, failed, context.delay_level_when_next_consume)

    async def _give_back(
        self, batch: Batch, messages: list[DeliveredMessage], delay_level: int
    ) -> None:
        if self._config.is_broadcasting:
            for message in messages:
                _log.warning("message_dropped", message_id=message.message_id)
            self.counts["dropped"] += len(messages)
            batch.acknowledge(messages)
            return
        kept: list[DeliveredMessage] = []
        for place, message in enumerate(messages):
            if batch.owned.is_dropped:
                # The next owner of the queue gets them; copies would only double them.
                batch.put_back(messages[place:])
                break
            try:
                await self._send_back.send_back(message, delay_level)
            except MQError as error:
                _log.warning(
                    "message_not_sent_back", message_id=message.message_id, error=str(error)
                )
                kept.append(message)
            else:
                batch.acknowledge([message])
        if kept and self._nursery is not None:
            self.counts["kept"] += len(kept)
            self._nursery.start_soon(self._retry_in_place, batch, kept)

    async def _retry_in_place(self, batch: Batch, messages: list[DeliveredMessage]) -> None:
        await self._clock.sleep(AGAIN_HERE_S)
        for message in messages:
            message.tried_in_place()
        batch.put_back(messages)
        self._ready.offer(batch.owned)

    async def _end_overdue_calls(self) -> None:
        timeout_s = self._config.consume_timeout_s
        while True:
            await self._clock.sleep(timeout_s / EXPIRY_CHECKS)
            before_s = self._clock.monotonic() - timeout_s
            for running in list(self._running.values()):
                if running.since_s <= before_s and not running.is_expired:
                    running.is_expired = True
                    running.scope.cancel()
                    assert self._nursery is not None
                    self._nursery.start_soon(self._expire, running)

    async def _expire(self, running: _Running) -> None:
        batch = running.batch
        _log.warning("consume_timeout", queue=str(batch.owned.queue), messages=len(batch.messages))
        self.counts["expired"] += len(batch.messages)
        await self._give_back(batch, batch.messages, running.context.delay_level_when_next_consume)


@dataclass(eq=False, repr=False)
class OrderlyConsumption:
    """Consumes queues in order; without *locks*, as in broadcasting, no other consumer has them.

    *counts*: messages ``consumed``, tries that ``failed``, messages ``given_up`` (to the retry
    topic), ``dropped`` (broadcasting), and locks ``lost`` while a queue was consumed.
    """

    _listener: ListenerCall
    _locks: QueueLocks | None
    _send_back: SendBack
    _config: PushConfig
    _clock: Clock
    _gate: Gate

    def __post_init__(self) -> None:
        self._max_tries = self._config.tries(orderly=True)
        self._limiter = trio.CapacityLimiter(self._config.consume_tasks)
        self.counts = dict.fromkeys(("consumed", "failed", "given_up", "dropped", "lost"), 0)

    async def run(
        self,
        owned: OwnedQueue,
        begin: Callable[[OwnedQueue], Awaitable[None]],
        read: Callable[[OwnedQueue], Awaitable[None]],
    ) -> None:
        """Consume *owned* until it is dropped.

        Cancellation: What the listener had is delivered again.
        """
        while not owned.is_dropped:
            if self._locks is not None:
                owned.grant = await self._locks.held(owned.queue)
            await begin(owned)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, owned)
                nursery.start_soon(self._end_with_lock, owned, nursery.cancel_scope)
                await self._consume(owned)
                nursery.cancel_scope.cancel()
            if not owned.is_dropped:
                self.counts["lost"] += 1

    async def _end_with_lock(self, owned: OwnedQueue, scope: trio.CancelScope) -> None:
        """Cancel *scope*, an async listener in it included, when *owned* is not held any more."""
        if self._locks is not None and owned.grant is not None:
            await self._locks.ended(owned.queue, owned.grant)
            scope.cancel()

    def holds(self, owned: OwnedQueue) -> bool:
        """Return whether *owned* is still held, and was by no other consumer meanwhile."""
        return self._locks is None or self._locks.grant(owned.queue) == owned.grant

    def _may_consume(self, owned: OwnedQueue) -> bool:
        return not owned.is_dropped and self.holds(owned)

    async def _consume(self, owned: OwnedQueue) -> None:
        """Consume while it may be."""
        while self._may_consume(owned):
            await self._gate.passed()
            messages = owned.messages
            assert messages is not None
            if not messages.waiting:
                await self._wait_for_messages(owned)
                continue
            pause_s = 0.0
            async with self._limiter:
                # All of it may have changed while waiting for a place.
                if self._may_consume(owned) and owned.messages is messages:
                    pause_s = await self._consume_next(owned, messages)
            # Without a place: other queues are consumed meanwhile.
            await self._rest(owned, pause_s)

    async def _wait_for_messages(self, owned: OwnedQueue) -> None:
        left_s = float("inf") if self._locks is None else self._locks.left_s(owned.queue)
        with trio.move_on_after(left_s):
            await owned.change()

    async def _consume_next(
        self, owned: OwnedQueue, messages: ProcessQueue[DeliveredMessage]
    ) -> float:
        """Consume one batch; return for how long the queue is to rest."""
        batch = Batch(owned, messages, messages.take(self._config.consume_message_batch_max_size))
        token = None if self._locks is None else self._locks.tokens.get(owned.queue)
        context = ConsumeContext(owned.queue, lock_token=token)
        status = ConsumeStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
        try:
            status = await self._listener(batch.messages, context, owned.queue)
        except Exception as error:  # noqa: BLE001  # the listener's own; the messages come again
            _log.warning("listener_failed", queue=str(owned.queue), exc_info=error)
        except BaseException:
            batch.put_back(batch.messages)
            raise
        if not self.holds(owned):
            batch.put_back(batch.messages)  # the holder of the lock consumes them
        elif status is ConsumeStatus.SUCCESS:
            self.counts["consumed"] += len(batch.messages)
            batch.acknowledge()
        else:
            return await self._failed(batch, context)
        return 0.0

    async def _failed(self, batch: Batch, context: ConsumeContext) -> float:
        """Put messages back, or give them up; return for how long the queue is to rest."""
        self.counts["failed"] += len(batch.messages)
        again = dict.fromkeys(batch.messages)
        try:
            for message in batch.messages:
                if message.reconsume_times >= self._max_tries and await self._give_up(message):
                    batch.acknowledge([message])
                    del again[message]
                else:
                    message.tried_in_place()
        finally:
            batch.put_back(list(again))
        if not again:
            return 0.0
        pause_ms = context.suspend_ms
        if pause_ms is None:
            pause_ms = self._config.suspend_current_queue_ms
        return pause_ms / 1000

    async def _rest(self, owned: OwnedQueue, pause_s: float) -> None:
        """Let *owned* rest, but not longer than it is this consumer's."""
        until = self._clock.monotonic() + pause_s
        while not owned.is_dropped and (left_s := until - self._clock.monotonic()) > 0:
            with trio.move_on_after(left_s):
                await owned.change()

    async def _give_up(self, message: DeliveredMessage) -> bool:
        """Move a message that was tried too often away; return whether that is done."""
        if self._config.is_broadcasting:
            _log.warning("message_dropped", message_id=message.message_id)
            self.counts["dropped"] += 1
            return True
        try:
            await self._send_back.send_to_retry_topic(message)
        except MQError as error:
            _log.warning("message_not_given_up", message_id=message.message_id, error=str(error))
            return False
        self.counts["given_up"] += 1
        return True
