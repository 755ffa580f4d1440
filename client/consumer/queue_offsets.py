"""The offsets of the queues a consumer owns: found when one is taken, stored as it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from client.consumer.consume_from import ConsumeFrom, first_offset
from client.consumer.offset_store import OffsetStore
from client.consumer.owned_queue import OwnedQueue
from client.consumer.pull_consumer import PullConsumer
from client.core.errors import ClientError
from client.core.route import MessageQueue
from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.seams import Clock

ASK_AGAIN_S = 1.0
"""Pause before it is asked again where to begin."""

_log = get_logger(__name__)


class QueueOffsets:
    """Loads and stores the offsets of owned queues.

    An offset that is stored already is not stored again. Nothing is stored of a queue after its
    last time: by then it is somebody else's.
    """

    def __init__(
        self,
        store: OffsetStore,
        reader: PullConsumer,
        begin: ConsumeFrom,
        clock: Clock,
        *,
        may_store: Callable[[OwnedQueue], bool] = lambda _: True,
    ) -> None:
        """Prepare.

        Args:
            may_store: Whether a queue is this consumer's so that its offset may be stored.
        """
        self._store = store
        self._reader = reader
        self._begin = begin
        self._clock = clock
        self._may_store = may_store
        self._stored: dict[MessageQueue, int] = {}
        # Where an operator wants queues to go on, until that is stored.
        self._told: dict[MessageQueue, int] = {}
        # An old offset on its way must not overtake the last one.
        self._saving = trio.Lock()

    async def begin(self, owned: OwnedQueue) -> None:
        """Let *owned* begin where it was left, or where a group begins that was never here.

        Asks until somebody says.
        """
        queue = owned.queue
        while not owned.is_dropped and queue not in self._told:
            try:
                stored = await self._store.load(queue)
                at = stored
                if at is None:
                    now_ms = self._clock.wall_ms()
                    at = await first_offset(self._reader, queue, self._begin, now_ms)
            except ClientError as error:
                _log.info("no_offset_yet", queue=str(queue), error=str(error))
                await self._clock.sleep(ASK_AGAIN_S)
                continue
            if queue in self._told:
                break
            if stored is None:
                self._stored.pop(queue, None)
            else:
                self._stored[queue] = stored
            owned.begin(at)
            return
        if not owned.is_dropped:
            owned.begin(self._told[queue])

    async def reset(self, wanted: Iterable[tuple[OwnedQueue, int]]) -> None:
        """Let queues go on where they are told, whatever is stored of them, and store that.

        What cannot be stored now, also for want of a lock, is stored as soon as it can be.
        """
        wanted = list(wanted)
        async with self._saving:
            for owned, offset in wanted:
                self._told[owned.queue] = offset
                owned.begin(offset)
        await self.save([owned for owned, _ in wanted])

    async def run(self, owned: Iterable[OwnedQueue], period_s: float) -> None:
        """Store what has changed of *owned*, whatever that is then, every *period_s*, for ever."""
        while True:
            await self._clock.sleep(period_s)
            await self.save(owned)

    async def save(self, owned: Iterable[OwnedQueue], *, is_last: bool = False) -> None:
        """Store what has changed; what cannot be stored is tried again the next time.

        Args:
            is_last: The queues are given up; nothing more will be stored of them.
        """
        async with self._saving:
            offsets: dict[MessageQueue, int] = {}
            for item in owned:
                messages = item.messages
                if is_last:
                    self._told.pop(item.queue, None)
                if messages is None or (item.is_dropped and not is_last):
                    continue
                if not self._may_store(item):
                    continue
                if self._stored.get(item.queue) == messages.commit_offset:
                    self._told.pop(item.queue, None)
                else:
                    offsets[item.queue] = messages.commit_offset
            if not offsets:
                return
            try:
                saved = await self._store.save(offsets)
            except (MQError, OSError) as error:
                _log.warning("offsets_not_stored", queues=len(offsets), error=str(error))
                return
            for queue in saved:
                self._stored[queue] = offsets[queue]
                self._told.pop(queue, None)
