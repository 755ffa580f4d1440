"""Queues that have messages for a listener, served in turn so that none of them starves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from client.consumer.delivered_message import DeliveredMessage
from client.consumer.owned_queue import Gate, OwnedQueue
from client.consumer.process_queue import ProcessQueue


class Batch:
    """Messages of one queue that are in hand together.

    Attributes:
        owned: Their queue.
        messages: They themselves, in order.
        source: Where they were taken from; the queue may have begun anew since.
    """

    __slots__ = ("messages", "owned", "source")

    def __init__(
        self,
        owned: OwnedQueue,
        source: ProcessQueue[DeliveredMessage],
        messages: list[DeliveredMessage],
    ) -> None:
        self.owned = owned
        self.source = source
        self.messages = messages

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

        Args:
            wanted: Queues that are passed over are offered again by whoever made them so.
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
