"""All queues a consumer owns, each with the task that works on it, and how one is given up.

A queue that goes to somebody else is let go in a task of its own: while that takes, it is nobody's
here, and if it comes back meanwhile it waits until it has been let go.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio

from client.consumer.owned_queue import OwnedQueue
from client.core.route import MessageQueue


class OwnedQueues:
    """Queue → what is owned of it."""

    def __init__(
        self,
        *,
        work: Callable[[OwnedQueue], Awaitable[None]],
        let_go: Callable[[OwnedQueue], Awaitable[None]],
        freed: Callable[[], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            work: What is done with an owned queue; cancelled when it has been let go.
            let_go: What is still to be done with one that was given up.
            freed: Told when one has been let go: it may be owned again.
            changed: Told when queues came or went.
        """
        self._work = work
        self._let_go = let_go
        self._freed = freed
        self._changed = changed
        self._owned: dict[MessageQueue, OwnedQueue] = {}
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

    def held(self) -> list[MessageQueue]:
        """Return the queues nobody else may have: owned ones, and those not let go yet."""
        return [*self._owned, *self._leaving]

    def start(self, nursery: trio.Nursery) -> None:
        """Run tasks in *nursery* from now on."""
        self._nursery = nursery

    async def apply(self, topic: str, queues: frozenset[MessageQueue]) -> None:
        """Own exactly *queues* of *topic*. Those that go are let go in the background."""
        assert self._nursery is not None
        gone = [q for q in self._owned if q.topic == topic and q not in queues]
        new = sorted(queues - self._owned.keys() - self._leaving.keys())
        for queue in gone:
            owned = self._leaving[queue] = self._owned.pop(queue)
            owned.drop()
            self._nursery.start_soon(self._leave, owned)
        for queue in new:
            owned = self._owned[queue] = OwnedQueue(queue)
            self._nursery.start_soon(self._run, owned)
        if gone or new:
            self._changed()

    async def _run(self, owned: OwnedQueue) -> None:
        with owned.scope:
            await self._work(owned)

    async def _leave(self, owned: OwnedQueue) -> None:
        try:
            await self._let_go(owned)
        finally:
            owned.scope.cancel()
            self._leaving.pop(owned.queue, None)
        self._freed()

    def drop_all(self) -> list[OwnedQueue]:
        """Drop everything, what is being let go included, and return it."""
        everything = [*self._owned.values(), *self._leaving.values()]
        for owned in everything:
            owned.drop()
        return everything

    def clear(self) -> None:
        """Own nothing any more."""
        self._owned.clear()
