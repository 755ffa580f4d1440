"""Where each entry stands: one fixed-width unit per Raft index.

Unit, 32 bytes, big-endian::

    0 position i64   8 term i64   16 chain u64   24 size u32   28 crc u32

`crc` covers the index (i64) and the unit before it, so a unit that a power cut lost, or that
stands at the wrong place, is told from a good one. Everything here can be rebuilt from the
segments. Files are named by the Raft index of their first unit; unit 0 is unused.

Spec: docs/formats.md, section 6.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from commitlog.errors import CorruptStoreError, DiskFullError
from commitlog.seams import Disk, DiskFile
from commitlog.store_paths import StorePaths, parse_file_name

UNIT_BYTES: Final = 32
DEFAULT_UNITS_PER_FILE: Final = 262_144
"""8 MiB a file: cheap to allocate inline, and few files even for a billion entries."""

RECENT_UNITS: Final = 1024
"""Units kept in memory, a power of two: more than what is ever in flight between replicas."""

_MASK: Final = RECENT_UNITS - 1
_BODY: Final = struct.Struct(">qqQI")
_UNIT: Final = struct.Struct(">qqQII")
_INDEX: Final = struct.Struct(">q")

Unit = tuple[int, int, int, int]
"""(position, term, chain, size)"""


def encode_unit(index: int, position: int, term: int, chain: int, size: int) -> bytes:
    """Return the 32 bytes of one unit."""
    body = _BODY.pack(position, term, chain, size)
    return body + zlib.crc32(body, zlib.crc32(_INDEX.pack(index))).to_bytes(4, "big")


def decode_unit(index: int, data: memoryview) -> Unit | None:
    """Return the unit of *index*, or None when these bytes are not it."""
    position, term, chain, size, crc = _UNIT.unpack(data)
    if zlib.crc32(data[: _BODY.size], zlib.crc32(_INDEX.pack(index))) != crc:
        return None
    return position, term, chain, size


class EntryIndex:
    """The unit files of one log, and the newest units in memory.

    `unit` is O(1). `flush` may run in a worker thread; everything else belongs to one thread.
    """

    def __init__(self, disk: Disk, paths: StorePaths, units_per_file: int) -> None:
        self._disk = disk
        self._paths = paths
        self._units_per_file = units_per_file
        self._files: dict[int, DiskFile] = {}
        self._views: dict[int, memoryview] = {}
        self._dirty: set[int] = set()
        self._new_names = False
        self._recent: list[Unit] = [(0, 0, 0, 0)] * RECENT_UNITS
        # The newest units first … last are in `_recent`.
        self._recent_first = 1
        self._recent_last = 0

    def open(self) -> None:
        """Open the files that are there; a file of another size is removed, to be rebuilt."""
        folder = self._paths.entry_index
        self._disk.make_dir(folder)
        for name in self._disk.list_dir(folder):
            base = parse_file_name(name)
            if base is None or base % self._units_per_file:
                continue
            file = self._disk.open(self._paths.entry_index_file(base))
            if file.size == self._units_per_file * UNIT_BYTES:
                self._files[base] = file
                continue
            file.close()
            self._disk.unlink(file.path)
            self._new_names = True

    def _base(self, index: int) -> int:
        return index - index % self._units_per_file

    def has_room(self, index: int) -> bool:
        """Tell whether the file for *index* is allocated."""
        return self._base(index) in self._files

    def make_room(self, index: int) -> None:
        """Allocate the file for *index*.

        Raises:
            DiskFullError: Nothing changed.
        """
        base = self._base(index)
        if base in self._files:
            return
        path = self._paths.entry_index_file(base)
        try:
            self._files[base] = self._disk.create(
                path, self._units_per_file * UNIT_BYTES, reserve=True
            )
        except DiskFullError as error:
            raise DiskFullError(f"no space for the entry index: {error}") from error
        self._dirty.add(base)
        self._new_names = True

    def put(self, index: int, position: int, term: int, chain: int, size: int) -> None:
        """Write the unit of *index*, which has room and follows the one before it."""
        base = index - index % self._units_per_file
        self._files[base].write_at(
            (index - base) * UNIT_BYTES, encode_unit(index, position, term, chain, size)
        )
        self._dirty.add(base)
        self._recent[index & _MASK] = (position, term, chain, size)
        self._recent_last = index
        if index - self._recent_first >= RECENT_UNITS:
            self._recent_first = index - _MASK

    def put_bulk(self, first: int, units: bytearray) -> None:
        """Write encoded units from *first* on, without keeping them in memory."""
        view = memoryview(units)
        while view:
            self.make_room(first)
            base = self._base(first)
            at = (first - base) * UNIT_BYTES
            part = view[: self._units_per_file * UNIT_BYTES - at]
            self._files[base].write_at(at, part)
            self._dirty.add(base)
            first += len(part) // UNIT_BYTES
            view = view[len(part) :]

    def stored(self, index: int) -> Unit | None:
        """Return the unit on file, or None when there is none that is whole."""
        base = self._base(index)
        view = self._views.get(base)
        if view is None:
            file = self._files.get(base)
            if file is None:
                return None
            view = self._views[base] = file.view(0, file.size)
        at = (index - base) * UNIT_BYTES
        return decode_unit(index, view[at : at + UNIT_BYTES])

    def unit(self, index: int) -> Unit:
        """Return (position, term, chain, size) of an entry that is in the log.

        Raises:
            CorruptStoreError: The unit is damaged; opening the log again rebuilds it.
        """
        if self._recent_first <= index <= self._recent_last:
            return self._recent[index & _MASK]
        unit = self.stored(index)
        if unit is None:
            path = self._paths.entry_index_file(self._base(index))
            raise CorruptStoreError(f"{path}: the unit of entry {index} is damaged or missing")
        return unit

    def load_recent(self, first: int, last: int) -> None:
        """Take the newest units, none below *first*, into memory.

        Raises:
            CorruptStoreError: One of them is damaged.
        """
        self._recent_first, self._recent_last = 1, 0
        low = max(first, last - _MASK)
        for index in range(low, last + 1):
            self._recent[index & _MASK] = self.unit(index)
        self._recent_first, self._recent_last = low, last

    def cut_to(self, last: int) -> None:
        """Forget the units above *last*; what is on file is written over later."""
        self._recent_last = last
        self._recent_first = min(self._recent_first, last + 1)

    def drop_before(self, first: int) -> None:
        """Remove the files that hold only units below *first*; durable with the next flush."""
        for base in sorted(base for base in self._files if base + self._units_per_file <= first):
            file = self._files.pop(base)
            self._views.pop(base, None)
            self._dirty.discard(base)
            file.close()
            self._disk.unlink(file.path)
            self._new_names = True

    def flush(self) -> None:
        """Make all units written so far durable.

        Raises:
            FlushFailedError: The units are only a copy, but the disk cannot be trusted any more.
        """
        dirty = self._dirty.copy()
        self._dirty -= dirty
        for base in sorted(dirty):
            self._files[base].flush()
        if self._new_names:
            self._new_names = False
            self._disk.flush_dir(self._paths.entry_index)

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        self._views.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()
