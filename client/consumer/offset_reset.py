"""An operator lets a group go on elsewhere while its consumers run (220).

The consumer stops handing out, forgets what it has pulled of the queues concerned, takes the new
offsets over and stores them, waits a moment for listeners that still have old messages, and goes
on. What such a listener says of an old message counts no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import trio

from client.consumer.owned_queues import OwnedQueues
from client.consumer.queue_offsets import QueueOffsets
from client.core.route import MessageQueue
from remoting.log import get_logger

OLD_MESSAGES_S: Final = 10.0
"""RocketMQ's pause: for so long listeners may finish before new messages are handed out."""

_log = get_logger(__name__)


class OffsetReset:
    """Resets the queues of one consumer, one request after the other."""

    def __init__(
        self,
        owned: OwnedQueues,
        offsets: QueueOffsets,
        *,
        suspend: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            suspend: Nothing is pulled or handed out after it.
            resume: Ends that.
        """
        self._owned = owned
        self._offsets = offsets
        self._suspend = suspend
        self._resume = resume
        # Of queues that are here when it is told; the newest word about each.
        self._told: dict[MessageQueue, int] = {}
        self._is_told = trio.Event()

    def tell(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Let the queues that are here go on at *offsets*; the others are somebody else's."""
        ours = {q: offset for q, offset in offsets.items() if self._owned.any_of(q) is not None}
        if ours:
            self._told |= ours
            self._is_told.set()

    async def run(self) -> None:
        """Do what it is told, for ever."""
        while True:
            await self._is_told.wait()
            self._is_told = trio.Event()
            told, self._told = self._told, {}
            self._suspend()
            try:
                await self._reset(told)
            finally:
                self._resume()

    async def _reset(self, told: Mapping[MessageQueue, int]) -> None:
        wanted = [
            (owned, offset)
            for queue, offset in told.items()
            if (owned := self._owned.any_of(queue)) is not None
        ]
        old = [(owned, owned.messages) for owned, _ in wanted]
        await self._offsets.reset(wanted)
        for owned, offset in wanted:
            owned.count("offset_reset")
            _log.info("offset_reset", queue=str(owned.queue), offset=offset)
        with trio.move_on_after(OLD_MESSAGES_S):
            for owned, messages in old:
                while messages is not None and messages.in_hand and not owned.is_dropped:
                    await owned.change()
