"""A queue this consumer has been given, and the task that reads it.

The reader pulls ahead of the listener as far as the flow limits allow; a pull that finds nothing is
held by the broker, so a new message is here one way after it was stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from client.consumer.consume_meter import ConsumeMeter
from client.consumer.delivered_message import DeliveredMessage
from client.consumer.process_queue import FlowLimits, ProcessQueue
from client.consumer.pull_consumer import ROCKETMQ_PULL_MESSAGES, PullConsumer
from client.consumer.subscription_expression import SUB_ALL, SubscriptionExpression
from client.core.errors import ClientError, LockLostError, OffsetIllegalError
from client.core.message import PullResult
from client.core.route import MessageQueue
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.seams import Clock

SUSPEND_S: Final = 15.0
"""How long a broker holds a pull that finds nothing; RocketMQ's push consumer's."""
AGAIN_AFTER_ERROR_S: Final = 3.0
"""RocketMQ's pause after a pull that was refused."""
AGAIN_AFTER_LOCK_S: Final = 0.1
"""After one that was refused for its lock; whoever consumes the queue ends this reader by then."""

_log = get_logger(__name__)


class Gate:
    """Lets tasks through, or makes them wait."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether `passed` returns at once."""
        return self._open.is_set()

    async def passed(self) -> None:
        """Wait until the gate is open. A checkpoint."""
        await self._open.wait()

    def close(self) -> None:
        """Make everybody wait who comes from now on. Idempotent."""
        if self._open.is_set():
            self._open = trio.Event()

    def open(self) -> None:
        """Let all through. Idempotent."""
        self._open.set()


class OwnedQueue:
    """One queue that is this consumer's for now.

    Attributes:
        queue: Which.
        messages: What was pulled; None before it is known where to begin.
        is_dropped: It is somebody else's, or will be: nothing of it is handed out any more.
        scope: Ends its reader, and whatever works on it in order.
        gate: Closed while this queue alone is not to be read.
        grant: The grant of the lock under which it is consumed in order, see `QueueLocks`.
        counts: Pulls, messages and what held the reader back.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.messages: ProcessQueue[DeliveredMessage] | None = None
        self.is_dropped = False
        self.scope = trio.CancelScope()
        self.gate = Gate()
        self.grant: int | None = None
        self.counts: dict[str, int] = {}
        self._changed = trio.Event()
        self._pull = trio.CancelScope()

    def count(self, what: str, number: int = 1) -> None:
        """Note that *what* happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    def begin(self, offset: int) -> ProcessQueue[DeliveredMessage]:
        """Forget what is here and read from *offset* on."""
        self.messages = ProcessQueue(offset)
        self.interrupt()
        self.changed()
        return self.messages

    def pulling(self) -> trio.CancelScope:
        """Return a scope for a pull, which `interrupt` ends."""
        self._pull = trio.CancelScope()
        return self._pull

    def interrupt(self) -> None:
        """End the pull that is under way: where or whom it asks is out of date."""
        self._pull.cancel()

    def changed(self) -> None:
        """Wake whoever waits for a change of this queue."""
        event, self._changed = self._changed, trio.Event()
        event.set()

    async def change(self) -> None:
        """Wait for the next change: messages came or went, or the queue is dropped."""
        await self._changed.wait()

    def drop(self) -> None:
        """Hand out nothing more; what is in hand may still be acknowledged. Idempotent."""
        self.is_dropped = True
        self.interrupt()
        self.changed()

    async def empty_handed(self) -> None:
        """Wait until nothing of it is in hand."""
        while self.messages is not None and self.messages.in_hand:
            await self.change()


@dataclass(frozen=True, slots=True)
class Reading:
    """How owned queues are read.

    Attributes:
        reader: Pulls.
        clock: For pauses after errors.
        wanted: What is wanted of a topic now; None: nothing any more.
        limits: When to read no further.
        batch_messages: Asked for at a time.
        token: Fencing token to show when a queue is pulled.
        lock_lost: Told of a queue whose token is old.
        gate: Closed while nothing is to be read.
        arrived: Told of a queue that has something new.
        meter: Told of each pull that was answered; None: nobody is.
    """

    reader: PullConsumer
    clock: Clock
    wanted: Callable[[str], SubscriptionExpression | None]
    limits: FlowLimits
    gate: Gate
    arrived: Callable[[OwnedQueue], None]
    batch_messages: int = ROCKETMQ_PULL_MESSAGES
    token: Callable[[MessageQueue], int | None] = lambda _: None
    lock_lost: Callable[[MessageQueue], None] = lambda _: None
    meter: ConsumeMeter | None = None

    async def read(self, owned: OwnedQueue) -> None:
        """Read *owned* from where it stands until it is dropped.

        Cancellation: Nothing is lost: what was not put into the queue is pulled again.
        """
        while not owned.is_dropped:
            await self.gate.passed()
            await owned.gate.passed()
            messages = owned.messages
            assert messages is not None
            held_back = messages.held_back_by(self.limits)
            if held_back is not None:
                owned.count(held_back)
                await owned.change()
                continue
            await self._pull(owned, messages)

    async def _pull(self, owned: OwnedQueue, messages: ProcessQueue[DeliveredMessage]) -> None:
        queue = owned.queue
        wanted = self.wanted(queue.topic)
        result: PullResult | None = None
        began_s = 0.0 if self.meter is None else self.meter.pulling(queue)
        try:
            with owned.pulling():
                result = await self.reader.pull(
                    queue,
                    messages.next_offset,
                    max_messages=self.batch_messages,
                    tags=SUB_ALL if wanted is None else wanted,
                    timeout_s=SUSPEND_S,
                    lock_token=self.token(queue),
                )
        except LockLostError:
            owned.count("lock_lost")
            self.lock_lost(queue)
            owned.changed()
            await self.clock.sleep(AGAIN_AFTER_LOCK_S)
            return
        except OffsetIllegalError as error:
            _log.warning(
                "offset_moved",
                queue=str(queue),
                offset=messages.next_offset,
                next_begin_offset=error.next_begin_offset,
            )
            owned.count("offset_moved")
            if owned.messages is messages:
                owned.begin(error.next_begin_offset)
            return
        except (ClientError, MQError) as error:
            _log.warning("pull_failed", queue=str(queue), error=str(error))
            owned.count("pull_failed")
            await self.clock.sleep(AGAIN_AFTER_ERROR_S)
            return
        owned.count("pulls")
        if result is None or owned.is_dropped or owned.messages is not messages:
            return
        found = [DeliveredMessage(message, queue) for message in result.messages]
        messages.put(found, result.next_begin_offset)
        owned.count("messages", len(found))
        if found:
            if self.meter is not None:
                self.meter.pulled(queue.topic, len(found), began_s)
            owned.changed()
            self.arrived(owned)
