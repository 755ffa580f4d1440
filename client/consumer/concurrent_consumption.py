"""Calls a listener with messages in any order, many at a time.

What a listener could not cope with is sent back and comes again through the retry topic; only
then does it count as dealt with here. When even that fails it stays here and is tried again.
"""

from __future__ import annotations

from typing import Final

import trio

from client.consumer.config import PushConfig
from client.consumer.delivered_message import DeliveredMessage
from client.consumer.listener import ConsumeContext, ConsumeStatus, ListenerCall
from client.consumer.ready_queues import Batch, ReadyQueues
from client.consumer.send_back import SendBack
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.seams import Clock

AGAIN_HERE_S: Final = 5.0
"""RocketMQ's pause before a message that could not be sent back is tried again."""
EXPIRY_CHECKS: Final = 15
"""Times within the consume timeout that is looked for messages that have exceeded it."""

_log = get_logger(__name__)


class _Running:
    """One call of the listener."""

    __slots__ = ("batch", "context", "is_expired", "scope", "since_s")

    def __init__(self, batch: Batch, context: ConsumeContext, since_s: float) -> None:
        self.batch = batch
        self.context = context
        self.since_s = since_s
        self.scope = trio.CancelScope()
        self.is_expired = False


class ConcurrentConsumption:
    """The workers of one consumer.

    Attributes:
        counts: Messages by what became of them: ``consumed``, ``failed``, ``expired``,
            ``kept`` (could not be sent back), ``dropped`` (broadcasting).
    """

    def __init__(
        self,
        listener: ListenerCall,
        ready: ReadyQueues,
        send_back: SendBack,
        config: PushConfig,
        clock: Clock,
    ) -> None:
        self._listener = listener
        self._ready = ready
        self._send_back = send_back
        self._config = config
        self._clock = clock
        self._running: dict[int, _Running] = {}
        self._nursery: trio.Nursery | None = None
        self.counts = dict.fromkeys(("consumed", "failed", "expired", "kept", "dropped"), 0)

    async def run(self) -> None:
        """Consume for ever.

        Cancellation: Async listeners are cancelled; what they had is delivered again.
        """
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._look_for_expired)
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
        failed = messages[done:]
        if failed:
            self.counts["failed"] += len(failed)
            await self._give_back(batch, failed, context.delay_level_when_next_consume)
        batch.acknowledge(messages[:done])

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
                # Whoever has the queue next gets them; copies would only double them.
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
            self._nursery.start_soon(self._again_here, batch, kept)

    async def _again_here(self, batch: Batch, messages: list[DeliveredMessage]) -> None:
        await self._clock.sleep(AGAIN_HERE_S)
        for message in messages:
            message.tried_in_place()
        batch.put_back(messages)
        self._ready.offer(batch.owned)

    async def _look_for_expired(self) -> None:
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
