"""The queues a consumer owns: how each is read, handed to a listener in turn, and released.

A reader pulls ahead of the listener as far as the flow limits allow; a pull that finds nothing is
held by the broker, so a new message arrives one way after it was stored. A queue that goes to
another consumer is released in a task of its own; if it comes back meanwhile it waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import trio

from dledger.client.consumer.listener import DeliveredMessage
from dledger.client.consumer.process_queue import ConsumeMeter, FlowLimits, ProcessQueue
from dledger.client.consumer.pull_consumer import ROCKETMQ_PULL_MESSAGES, PullConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, LockLostError, OffsetIllegalError
from dledger.client.core.message_ext import PullResult
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.remoting.log import get_logger
from dledger.remoting.seams import Clock

_log = get_logger(__name__)

SUSPEND_S: Final = 15.0
"""How long a broker holds a pull that finds nothing; RocketMQ's push consumer's."""
AGAIN_AFTER_ERROR_S: Final = 3.0
"""RocketMQ's pause after a pull that was refused."""
AGAIN_AFTER_LOCK_S: Final = 0.1
"""After one that was refused for its lock; the consumer of the queue ends this reader by then."""

UNWANTED_S: Final = 0.1
"""Before a topic that is not subscribed any more is checked again: it is given up soon."""


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
        """Make every later caller wait. Idempotent."""
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
        is_dropped: Another client owns it, or will: nothing of it is handed out any more.
        is_given_up: Its offset was stored for the last time.
        scope: Ends its reader, and whatever works on it in order.
        gate: Closed while this queue alone is not to be read.
        grant: The grant of the lock under which it is consumed in order, see `QueueLocks`.
        counts: Pulls, messages and what held the reader back.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.messages: ProcessQueue[DeliveredMessage] | None = None
        self.is_dropped = False
        self.is_given_up = False
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
        """Wake all that wait for a change of this queue."""
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
        lock_lost: Called with a queue whose token is old.
        gate: Closed while nothing is to be read.
        arrived: Called with a queue that has new messages.
        meter: Counts each pull that was answered; None: pulls are not counted.
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
            wanted = self.wanted(owned.queue.topic)
            if wanted is None:
                await self.clock.sleep(UNWANTED_S)
            else:
                await self._pull(owned, messages, wanted)

    async def _pull(
        self,
        owned: OwnedQueue,
        messages: ProcessQueue[DeliveredMessage],
        wanted: SubscriptionExpression,
    ) -> None:
        queue = owned.queue
        result: PullResult | None = None
        began_s = 0.0 if self.meter is None else self.meter.pulling(queue)
        try:
            with owned.pulling():
                result = await self.reader.pull(
                    queue,
                    messages.next_offset,
                    max_messages=self.batch_messages,
                    tags=wanted,
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
            if owned.messages is not messages:
                return
            if error.next_begin_offset > messages.next_offset:
                # Retention has overtaken this reader; what it has pulled is still to be consumed.
                messages.put((), error.next_begin_offset)
            else:
                # What this reader has pulled is dropped: what is not dealt with is pulled again.
                owned.begin(min(error.next_begin_offset, messages.commit_offset))
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


@dataclass(eq=False, repr=False)
class OwnedQueues:
    """Queue → what is owned of it.

    *work*: what is done with an owned queue; cancelled when it has been let go.
    *let_go*: what is still to be done with one that was given up.
    *freed*: called when one has been let go: it may be owned again.
    *changed*: called when queues came or went.
    """

    work: Callable[[OwnedQueue], Awaitable[None]]
    let_go: Callable[[OwnedQueue], Awaitable[None]]
    freed: Callable[[], None]
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._owned: dict[MessageQueue, OwnedQueue] = {}
        # Of each topic: there may be thousands of both.
        self._of_topic: dict[str, frozenset[MessageQueue]] = {}
        self._leaving: dict[MessageQueue, OwnedQueue] = {}
        self._nursery: trio.Nursery | None = None

    def __iter__(self) -> Iterator[OwnedQueue]:
        """Yield what is owned now; it may change meanwhile."""
        return iter(list(self._owned.values()))

    def get(self, queue: MessageQueue) -> OwnedQueue | None:
        """Return what is owned of *queue*."""
        return self._owned.get(queue)

    def any_of(self, queue: MessageQueue) -> OwnedQueue | None:
        """Return what is owned of *queue*, or what is being let go of it."""
        return self._owned.get(queue) or self._leaving.get(queue)

    @property
    def queues(self) -> frozenset[MessageQueue]:
        """The queues that are owned."""
        return frozenset(self._owned)

    @property
    def topics(self) -> list[str]:
        """The topics of the queues that are owned."""
        return list(self._of_topic)

    def held(self) -> list[MessageQueue]:
        """Return the queues no other client may have: owned ones, and those not given up yet."""
        leaving = [queue for queue, owned in self._leaving.items() if not owned.is_given_up]
        return [*self._owned, *leaving]

    def start(self, nursery: trio.Nursery) -> None:
        """Run tasks in *nursery* from now on."""
        self._nursery = nursery

    async def apply(self, topic: str, queues: frozenset[MessageQueue]) -> None:
        """Own exactly *queues* of *topic*. Those that go are let go in the background."""
        assert self._nursery is not None
        before = self._of_topic.pop(topic, frozenset())
        gone = sorted(before - queues)
        new = sorted(q for q in queues - before if q not in self._leaving)
        if owned_now := before.difference(gone).union(new):
            self._of_topic[topic] = owned_now
        for queue in gone:
            owned = self._leaving[queue] = self._owned.pop(queue)
            owned.drop()
            self._nursery.start_soon(self._leave, owned)
        for queue in new:
            owned = self._owned[queue] = OwnedQueue(queue)
            self._nursery.start_soon(self._run, owned)
        if gone or new:
            self.changed()

    async def _run(self, owned: OwnedQueue) -> None:
        with owned.scope:
            await self.work(owned)

    async def _leave(self, owned: OwnedQueue) -> None:
        try:
            await self.let_go(owned)
        finally:
            owned.scope.cancel()
            self._leaving.pop(owned.queue, None)
        self.freed()

    def drop_all(self) -> list[OwnedQueue]:
        """Drop everything, what is being let go included, and return it."""
        everything = [*self._owned.values(), *self._leaving.values()]
        for owned in everything:
            owned.drop()
        return everything

    def clear(self) -> None:
        """Own nothing any more."""
        self._owned.clear()
        self._of_topic.clear()


@dataclass(eq=False, repr=False, slots=True)
class Batch:
    """Messages of one queue that are in hand together.

    *source*: where they were taken from; the queue may have begun again since.
    """

    owned: OwnedQueue
    source: ProcessQueue[DeliveredMessage]
    messages: list[DeliveredMessage]

    def acknowledge(self, messages: list[DeliveredMessage] | None = None) -> None:
        """They, or some of them, are dealt with."""
        self.source.acknowledge(self.messages if messages is None else messages)
        self.owned.changed()

    def put_back(self, messages: list[DeliveredMessage]) -> None:
        """These are not in hand any more, and not dealt with."""
        self.source.put_back(messages)
        self.owned.changed()


class ReadyQueues:
    """Hands out batches, from one queue after the other."""

    def __init__(self, gate: Gate) -> None:
        """Hand out nothing while *gate* is closed."""
        self._gate = gate
        self._queues: deque[OwnedQueue] = deque()
        self._known: set[int] = set()
        self._idle = trio.lowlevel.ParkingLot()

    def offer(self, owned: OwnedQueue) -> None:
        """*owned* has something to take."""
        if id(owned) not in self._known:
            self._known.add(id(owned))
            self._queues.append(owned)
        self._idle.unpark()

    async def take(
        self, most: int, *, wanted: Callable[[OwnedQueue], bool] = lambda _: True
    ) -> Batch:
        """Wait for messages and return up to *most*, of one queue.

        Cancellation: Nothing was taken.
        """
        while True:
            await self._gate.passed()
            batch = self.take_nowait(most, wanted)
            if batch is not None:
                return batch
            await self._idle.park()

    def take_nowait(
        self, most: int, wanted: Callable[[OwnedQueue], bool] = lambda _: True
    ) -> Batch | None:
        """Return up to *most* messages of one queue, or None when there are none."""
        while self._queues:
            owned = self._queues.popleft()
            messages = owned.messages
            if owned.is_dropped or messages is None or not messages.waiting or not wanted(owned):
                self._known.discard(id(owned))
                continue
            taken = messages.take(most)
            if messages.waiting:
                self._queues.append(owned)
                self._idle.unpark()
            else:
                self._known.discard(id(owned))
            return Batch(owned, messages, taken)
        return None


LEADER_CHECK_PERIOD_S: Final = 1.0
"""A comparison costs nothing: it compares what this client knows."""


class LeaderWatch:
    """Ends reads at brokers that lead no more, for one consumer."""

    def __init__(self, instance: ClientInstance, owned: Iterable[OwnedQueue]) -> None:
        """Watch over *owned*, whatever that is at the time."""
        self._instance = instance
        self._owned = owned
        self._led_by: dict[str, str] = {}

    async def run(self) -> None:
        """Compare leaders until cancelled."""
        while True:
            await self._instance.clock.sleep(LEADER_CHECK_PERIOD_S)
            self.interrupt_moved()

    def interrupt_moved(self) -> None:
        """Interrupt the pulls at brokers that another one has taken over from."""
        owned = list(self._owned)
        moved = set()
        for broker_name in {item.queue.broker_name for item in owned}:
            address = self._instance.leaders.address(broker_name)
            if address is None:
                continue
            if self._led_by.get(broker_name, address) != address:
                moved.add(broker_name)
            self._led_by[broker_name] = address
        for item in owned:
            if item.queue.broker_name in moved:
                item.interrupt()
