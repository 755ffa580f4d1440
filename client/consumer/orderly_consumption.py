"""Calls a listener with the messages of each queue in their order, one batch at a time.

A queue is read and consumed only while its lock is held. When the lock is lost, what was pulled is
forgotten, and the queue begins anew at its committed offset once the lock is back: somebody else
may have gone on meanwhile. A message that fails is tried again in place and holds up those behind
it, until it was tried often enough to go to the retry topic.

Spec: semantics fact sheet, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from client.consumer.config import PushConfig
from client.consumer.delivered_message import DeliveredMessage
from client.consumer.listener import ConsumeContext, ConsumeStatus, ListenerCall
from client.consumer.owned_queue import Gate, OwnedQueue
from client.consumer.process_queue import ProcessQueue
from client.consumer.queue_locks import QueueLocks
from client.consumer.ready_queues import Batch
from client.consumer.send_back import SendBack
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.seams import Clock

_log = get_logger(__name__)


class OrderlyConsumption:
    """Consumes queues in order.

    Attributes:
        counts: Messages ``consumed``, tries that ``failed``, messages ``given_up`` (to the retry
            topic), ``dropped`` (broadcasting), and locks ``lost`` while a queue was consumed.
    """

    def __init__(
        self,
        listener: ListenerCall,
        locks: QueueLocks | None,
        send_back: SendBack,
        config: PushConfig,
        clock: Clock,
        gate: Gate,
    ) -> None:
        """Prepare.

        Args:
            locks: None: the queues are nobody else's, as in broadcasting.
            gate: Closed while nothing is to be consumed.
        """
        self._listener = listener
        self._locks = locks
        self._send_back = send_back
        self._config = config
        self._clock = clock
        self._gate = gate
        self._max_tries = config.tries(orderly=True)
        self._limiter = trio.CapacityLimiter(config.consume_tasks)
        self.counts = dict.fromkeys(("consumed", "failed", "given_up", "dropped", "lost"), 0)

    async def run(
        self,
        owned: OwnedQueue,
        begin: Callable[[OwnedQueue], Awaitable[None]],
        read: Callable[[OwnedQueue], Awaitable[None]],
    ) -> None:
        """Consume *owned* until it is dropped.

        Args:
            begin: Finds out where to begin.
            read: Reads the queue for ever.
        Cancellation: What the listener had is delivered again.
        """
        while not owned.is_dropped:
            if self._locks is not None:
                owned.grant = await self._locks.held(owned.queue)
            await begin(owned)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, owned)
                await self._consume(owned)
                nursery.cancel_scope.cancel()
            if not owned.is_dropped:
                self.counts["lost"] += 1

    def holds(self, owned: OwnedQueue) -> bool:
        """Tell whether *owned* is held still, and nobody else can have had it meanwhile."""
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
            async with self._limiter:
                # All of it may have changed while waiting for a place.
                if self._may_consume(owned) and owned.messages is messages:
                    await self._consume_next(owned, messages)

    async def _wait_for_messages(self, owned: OwnedQueue) -> None:
        left_s = float("inf") if self._locks is None else self._locks.left_s(owned.queue)
        with trio.move_on_after(left_s):
            await owned.change()

    async def _consume_next(
        self, owned: OwnedQueue, messages: ProcessQueue[DeliveredMessage]
    ) -> None:
        batch = Batch(owned, messages, messages.take(self._config.consume_message_batch_max_size))
        token = None if self._locks is None else self._locks.tokens.get(owned.queue)
        context = ConsumeContext(owned.queue, lock_token=token)
        status = ConsumeStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
        try:
            status = await self._listener(batch.messages, context, owned.queue)
        except Exception as error:  # noqa: BLE001  # the listener's own; the messages come again
            _log.warning("listener_failed", queue=str(owned.queue), exc_info=error)
        if not self.holds(owned):
            batch.put_back(batch.messages)  # whoever has the lock consumes them
        elif status is ConsumeStatus.SUCCESS:
            self.counts["consumed"] += len(batch.messages)
            batch.acknowledge()
        else:
            await self._failed(batch, context)

    async def _failed(self, batch: Batch, context: ConsumeContext) -> None:
        self.counts["failed"] += len(batch.messages)
        again: list[DeliveredMessage] = []
        for message in batch.messages:
            if message.reconsume_times >= self._max_tries and await self._give_up(message):
                batch.acknowledge([message])
            else:
                message.tried_in_place()
                again.append(message)
        if not again:
            return
        batch.put_back(again)
        pause_ms = context.suspend_ms
        if pause_ms is None:
            pause_ms = self._config.suspend_current_queue_ms
        await self._rest(batch.owned, pause_ms / 1000)

    async def _rest(self, owned: OwnedQueue, pause_s: float) -> None:
        """Let *owned* rest, but not longer than it is this consumer's."""
        until = self._clock.monotonic() + pause_s
        while not owned.is_dropped and (left_s := until - self._clock.monotonic()) > 0:
            with trio.move_on_after(left_s):
                await owned.change()

    async def _give_up(self, message: DeliveredMessage) -> bool:
        """Get rid of a message that was tried too often; return whether it is gone."""
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
