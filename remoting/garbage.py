"""Garbage collection of a daemon that holds millions of objects for a long time.

The interpreter's full collection looks at every object there is: with a hundred thousand queues
the event loop stands still for a third of a second, again and again. Here a look covers only what
is new; what survives is frozen, which means that no later look covers it. Cycles among frozen
objects that become garbage stay until there are twice as many objects as there were, which costs
one full collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from remoting.seams import Clock

LOOK_INTERVAL_S: Final = 1.0

COLLECTIONS_MIN: Final = 5
"""Collections of young objects, each of some 7,000, after which the survivors are looked at."""

COLLECTIONS_MAX: Final = 10
"""Above it there are too many survivors for one turn of the loop: a snapshot was read. They are
frozen as they are."""

OBJECTS_MIN: Final = 200_000
"""With fewer a full collection takes a few hundredths of a second."""

FULL_INTERVAL_S: Final = 600.0
"""Between two full collections: a table that fills up doubles several times within a minute."""

NEVER: Final = 1_000_000_000

log = structlog.get_logger(__name__)


class GarbageCollection:
    """Takes the oldest generation out of the interpreter's hands, for the whole process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects = OBJECTS_MIN
        self._full_at = clock.monotonic()

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Leave old objects to `run` while the block runs: what it reads at its start, too."""
        young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        try:
            yield
        finally:
            gc.set_threshold(young, middle, old)
            gc.unfreeze()

    async def run(self) -> None:
        """Look once a second, for ever. To be called within `in_charge`."""
        while True:
            self.look()
            await self._clock.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Collect what became garbage among new objects, if there are enough of them."""
        collections = gc.get_count()[2]
        if collections < COLLECTIONS_MIN:
            return
        if collections > COLLECTIONS_MAX:
            gc.freeze()
            self._objects = max(self._objects, gc.get_freeze_count())
            return
        now = self._clock.monotonic()
        doubled = gc.get_freeze_count() > 2 * self._objects
        if doubled and now - self._full_at >= FULL_INTERVAL_S:
            gc.unfreeze()
            found = gc.collect()
            gc.freeze()
            self._objects = max(OBJECTS_MIN, gc.get_freeze_count())
            self._full_at = now
            log.info("full_garbage_collection", found=found, objects=self._objects)
            return
        gc.collect()
        gc.freeze()
