"""Derived files that the disk does not give back are made again from the log, meanwhile.

Sends go on, and pulls of all units that can be read. A query for a key that is not found is to be
asked again later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from commitlog.errors import CorruptEntryError, CorruptStoreError, DiskFullError
from dledger.raft.wakeup import Wakeup
from dledger.store import ReplicaStore
from remoting.seams import Clock, Executor

log = structlog.get_logger(__name__)

STEP_BYTES: Final = 256 << 10
"""Entries whose units or keys are put in one go: one or two milliseconds of the event loop."""

STEP_PAUSE_S: Final = 0.01
"""Between two of these: a quarter of a gigabyte of log in ten seconds, and time for all else."""

RETRY_S: Final = 1.0
"""How often is tried again what a damaged entry or a full disk prevents."""

COMPLETION: Final = "key index"
"""Name under which the executor measures the flush at the end."""


class DerivedRepair:
    """Puts missing units and keys, on every replica, whatever its role.

    Args:
        store: Of this replica.
        lock: Held while a checkpoint is written or the log is replaced.
        can_be_repaired: Whether another member may have a copy of a damaged entry.
    """

    def __init__(
        self,
        store: ReplicaStore,
        *,
        clock: Clock,
        executor: Executor,
        lock: trio.Lock,
        can_be_repaired: Callable[[], bool],
    ) -> None:
        self._store = store
        self._clock = clock
        self._executor = executor
        self._lock = lock
        self._can_be_repaired = can_be_repaired
        self._wake = Wakeup()
        store.on_derived_behind = self._wake.set
        self._wake.set()

    async def run(self) -> None:
        """Put what is missing until cancelled.

        Raises:
            FlushFailedError, OSError: The disk failed: the node must stop.
        """
        reason = ""
        while True:
            await self._wake.wait()
            while self._store.derived.is_behind:
                try:
                    await self._go_on()
                except (CorruptEntryError, CorruptStoreError, DiskFullError) as error:
                    if str(error) != reason:
                        reason = str(error)
                        log.warning("repair_of_derived_files_waits", reason=reason)
                    await self._clock.sleep(RETRY_S)

    async def _go_on(self) -> None:
        async with self._lock:
            try:
                self._store.put_missing_units(STEP_BYTES)
            finally:
                # Whatever units wait for, keys do not.
                if self._store.keys.is_behind:
                    await self._put_keys()
        await self._clock.sleep(STEP_PAUSE_S)

    async def _put_keys(self) -> None:
        store = self._store
        skip_damaged = not self._can_be_repaired()
        if not store.put_missing_keys(STEP_BYTES, skip_damaged=skip_damaged):
            job = store.keys.begin_completion()
            if job is not None:
                index = store.key_index
                try:
                    await self._executor.run(job.run, kind=COMPLETION)
                finally:
                    index.end_completion(job)
                log.info("key_index_is_whole", files_lost=index.files_lost)
