"""What a replica records of itself beside log and tables: lost or damaged entries, installations.

Spec: docs/reference/formats.md, section 9.
"""

from __future__ import annotations

import zlib
from enum import Enum
from typing import Final

import cbor2

from commitlog.errors import ForeignStoreError
from commitlog.seams import Disk
from commitlog.slot_file import SlotFile
from commitlog.store_paths import StorePaths

DAMAGE_FORMAT: Final = 1
"""Version of the list of damaged entries."""


DAMAGED: Final = b"damaged"
TORN: Final = b"torn"
ASYNC: Final = b"async"
"""What `raft/doubt` holds: entries below the mark are lost, above it, or would be unflushed."""


class DoubtRecord:
    """Whether acknowledged entries may be lost here, in a file that is there while they may.

    Args:
        sync_flush: Whether what is acknowledged is flushed before.
    """

    def __init__(self, disk: Disk, paths: StorePaths, *, sync_flush: bool) -> None:
        self._disk = disk
        self._paths = paths
        self._sync_flush = sync_flush

    def load(self, *, unclean: bool) -> tuple[bool, bool]:
        """Return whether entries below the mark are lost, and whether any may be.

        Args:
            unclean: The last run did not end in order.
        """
        path = self._paths.doubt
        noted = self._disk.read(path).split() if self._disk.exists(path) else []
        damaged = DAMAGED in noted
        return damaged, damaged or TORN in noted or (unclean and ASYNC in noted)

    def store(self, *, damaged: bool, torn: bool) -> None:
        """Record it, durably."""
        wanted = [
            word
            for word, holds in ((DAMAGED, damaged), (TORN, torn), (ASYNC, not self._sync_flush))
            if holds
        ]
        path = self._paths.doubt
        if wanted:
            self._disk.replace(path, b" ".join(wanted))
        elif self._disk.exists(path):
            self._disk.unlink(path)
            self._disk.flush_dir(self._paths.raft)


class DamageRecord:
    """The list of damaged entries, in a file that is there while there are some."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        # None: a file without content.
        self._recorded: list[tuple[int, int]] | None = []

    def load(self) -> list[tuple[int, int]] | None:
        """Return the damaged entries as runs (first, last); None when the file itself is damaged.

        Raises:
            ForeignStoreError: A newer version wrote it.
        """
        if not self._disk.exists(self._path):
            return []
        ranges = decode_damage(self._disk.read(self._path), self._path)
        self._recorded = ranges
        return ranges

    def store(self, ranges: list[tuple[int, int]]) -> None:
        """Record *ranges*, durably, if they have changed.

        Raises:
            DiskFullError: No space; the older list holds.
            FlushFailedError: Either list may be there after a crash.
        """
        if ranges == self._recorded:
            return
        if ranges:
            self._disk.replace(self._path, encode_damage(ranges))
        else:
            self._disk.unlink(self._path)
            self._disk.flush_dir(self._path.rpartition("/")[0])
        self._recorded = ranges


def encode_damage(ranges: list[tuple[int, int]]) -> bytes:
    """Return the content of the damage file: a checksum, then CBOR."""
    body = cbor2.dumps({"v": DAMAGE_FORMAT, "ranges": [list(pair) for pair in ranges]})
    return zlib.crc32(body).to_bytes(4, "big") + body


def decode_damage(data: bytes, path: str) -> list[tuple[int, int]] | None:
    """Return the damaged entries as runs (first, last); None when the file itself is damaged.

    Raises:
        ForeignStoreError: A newer version wrote it.
    """
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        return None
    record = cbor2.loads(data[4:])
    if record["v"] > DAMAGE_FORMAT:
        raise ForeignStoreError(
            f"{path} has format {record['v']}; this version knows up to {DAMAGE_FORMAT}"
        )
    return [(first, last) for first, last in record["ranges"]]


class Phase(Enum):
    """Of an installation; the value is what stands on disk."""

    OFFERED = b"offered"
    REFILLING = b"refilling"
    DONE = b"done"


class InstallationRecord:
    """How far the installation of a leader's snapshot has come, in a slot file.

    ::

        done ──► offered ──► refilling ──► done

    * *offered*: the snapshot is on disk and replaces the log, whatever the log holds by now. The
      next start empties the log before it opens it.
    * *refilling*: the log was emptied and begins at the snapshot's floor. What it holds has come
      since, from leaders, and is kept. Derived files are made again from it.
    * *done*: the log is as far as the snapshot, and so is a checkpoint of this replica. A file of
      a snapshot that is still there means nothing.

    Attributes:
        phase: None when none was ever recorded: there was no installation, or it was one of a
            version that kept no record.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        """Load the record.

        Raises:
            CorruptStoreError: Both copies are damaged.
            ForeignStoreError: A newer version wrote a phase that is unknown here.
        """
        self._slots = SlotFile(disk, path)
        recorded = self._slots.load()
        try:
            self.phase = None if recorded is None else Phase(recorded)
        except ValueError as error:
            raise ForeignStoreError(f"{path} holds {recorded!r}, an unknown phase") from error

    def become(self, phase: Phase) -> None:
        """Record *phase*, durably.

        Raises:
            DiskFullError: No space to make the file; the phase is as it was.
            FlushFailedError: Either phase may be there after a crash.
        """
        if phase is not self.phase:
            self._slots.store(phase.value)
            self.phase = phase

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._slots.close()
