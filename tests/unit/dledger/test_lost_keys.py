"""Files of the key index that a flush gives up: their keys are put again before others."""

from __future__ import annotations

import errno
from typing import Any, cast

import numpy as np

from dledger.commitlog.derive import Derived
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptEntryError, OffsetOutOfRangeError
from dledger.commitlog.key_index import KeyIndex
from dledger.derived_files import TO_BE_FOUND, KeyIndexing
from dledger.testing.crash_disk import CrashDisk, no_fault


class Log:
    """A log of damaged entries; notes which ones were read."""

    first_index = 1

    def __init__(self) -> None:
        self.read: list[int] = []

    def frame(self, index: int) -> memoryview:
        self.read.append(index)
        raise CorruptEntryError("damaged")

    def index_of(self, position: int) -> int:
        raise OffsetOutOfRangeError(f"{position}")


class Keys:
    """What follows from an entry of one key."""

    def __init__(self, position: int) -> None:
        self.key_hashes = np.array([5], np.int32)
        self.key_phy_offsets = np.array([position], np.int64)
        self.key_store_times = np.array([1], np.int64)


def lost_by_completion() -> KeyIndexing:
    """Return an index whose completion has found a bad sector."""
    disk = CrashDisk()
    disk.make_dir("/raft")
    keys = KeyIndexing(KeyIndex(disk, "/index", 7, 20, mark="/raft/keyindex"))
    keys.begin(nothing_derived=True)
    keys.put(cast(Derived, Keys(100)))
    keys.index.is_behind = True

    def bad_sector(kind: str, path: str) -> None:
        if kind == "write":
            raise OSError(errno.EIO, "bad sector", path)

    job: Any = keys.begin_completion()
    disk.fault = bad_sector
    job.run()
    disk.fault = no_fault
    keys.index.end_completion(job)
    assert (keys.index.files_lost, keys.index.end_phy_offset) == (1, -1)
    return keys


def test_keys_that_a_completion_lost_are_put_again() -> None:
    keys, log = lost_by_completion(), Log()
    keys.step(cast(EntryLog, log), 3, {}, 1 << 20, skip_damaged=True)
    assert log.read == [1, 2, 3]


def test_a_new_key_waits_for_those_that_were_lost() -> None:
    """It would be the newest of the index, and those before it would be passed over."""
    keys = lost_by_completion()
    asked: list[int] = []
    keys.on_behind = lambda: asked.append(1)
    keys.put(cast(Derived, Keys(200)))
    assert (keys.next_index, keys.index.end_phy_offset, asked) == (TO_BE_FOUND, -1, [1])
