"""Where each entry stands: one fixed-width unit per Raft index.

Unit, 32 bytes, big-endian::

    0 position i64   8 term i64   16 chain u64   24 size u32   28 crc u32

`crc` covers the index (i64) and the unit before it, so a unit that a power cut lost, or that stands
at the wrong place, is distinguished from a good one. Everything here can be rebuilt from the
segments. Files are named by the Raft index of their first unit; they are read, not mapped.

Spec: docs/reference/formats.md, section 6.
"""

from __future__ import annotations

import errno
import struct
import zlib
from contextlib import suppress
from typing import Final

from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptStoreError, DiskFullError
from dledger.commitlog.seams import CANNOT_BE_READ, Disk, DiskFile
from dledger.commitlog.store_paths import StorePaths, parse_file_name

UNIT_BYTES: Final = 32
DEFAULT_UNITS_PER_FILE: Final = 262_144
"""8 MiB a file: cheap to allocate inline, and few files even for a billion entries."""

RECENT_UNITS: Final = 1024
"""Units kept in memory, a power of two: more than what is ever in flight between replicas."""

PAGE_UNITS: Final = 4096 // UNIT_BYTES
"""Units that a disk takes without having to read anything first."""

KEPT_PAGES: Final = 64
"""Pages of older units kept in memory: looking for an entry reads few of them again and again."""

SECTOR_BYTES: Final = 512
"""What of such a page may still be given back."""

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


def decode_unit(index: int, data: bytes | memoryview) -> Unit | None:
    """Return the unit of *index*, or None when these bytes are not it."""
    position, term, chain, size, crc = _UNIT.unpack(data)
    if zlib.crc32(data[: _BODY.size], zlib.crc32(_INDEX.pack(index))) != crc:
        return None
    return position, term, chain, size


class EntryIndex:
    """The unit files of one log, and the newest units in memory.

    `unit` is O(1). `flush` and `stored` may run in a worker thread; everything else belongs to one
    thread.
    """

    def __init__(self, disk: Disk, paths: StorePaths, units_per_file: int) -> None:
        self._disk = disk
        self._paths = paths
        self._units_per_file = units_per_file
        self._files: dict[int, DiskFile] = {}
        self._unreadable: set[int] = set()
        """First index of each page that the disk does not give back, until it is written."""
        self.pages_lost = 0
        self._pages: dict[int, tuple[int, bytes]] = {}
        self._generation = 0
        """Raised after units that had been written were changed."""
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

    def has_space(self, index: int) -> bool:
        """Tell whether the file for *index* is allocated."""
        return self._base(index) in self._files

    def make_room(self, index: int) -> None:
        """Allocate the file for *index*. Raises DiskFullError: nothing changed."""
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
        """Write the unit of *index*, which has space and follows the one before it."""
        base = index - index % self._units_per_file
        unit = encode_unit(index, position, term, chain, size)
        try:
            self._files[base].write_at((index - base) * UNIT_BYTES, unit)
        except OSError as error:
            self._write_again(error, index, unit)
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
            try:
                self._files[base].write_at(at, part)
            except OSError as error:
                self._write_again(error, first, part)
            self._dirty.add(base)
            first += len(part) // UNIT_BYTES
            view = view[len(part) :]
        self._generation += 1

    def _write_again(self, error: OSError, first: int, units: Buffer) -> None:
        """Write units of one file once more, beside which others cannot be read: they are lost."""
        if error.errno not in CANNOT_BE_READ:
            raise error
        view = memoryview(units)
        base, last = self._base(first), first + view.nbytes // UNIT_BYTES - 1
        for index in (first, last):
            self._note_unreadable(index - (index - base) % PAGE_UNITS)
            self.renew(index)
        self._files[base].write_at((first - base) * UNIT_BYTES, view)

    def _note_unreadable(self, page: int) -> None:
        if page not in self._unreadable:
            self._unreadable.add(page)
            self.pages_lost += 1

    def stored(self, index: int) -> Unit | None:
        """Return the unit on file, or None when there is none that is whole."""
        base = index - index % self._units_per_file
        page = index - (index - base) % PAGE_UNITS
        at = (index - page) * UNIT_BYTES
        kept = self._pages.get(page)
        if kept is not None and kept[0] == self._generation:
            return decode_unit(index, kept[1][at : at + UNIT_BYTES])
        file = self._files.get(base)
        if file is None:
            return None
        try:
            if page + PAGE_UNITS <= self._recent_last and (
                whole := self._read_page(file, page, (page - base) * UNIT_BYTES)
            ):
                return decode_unit(index, whole[at : at + UNIT_BYTES])
            data = file.read((index - base) * UNIT_BYTES, UNIT_BYTES)
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            if error.errno != errno.EBADF:
                self._note_unreadable(page)
            return None
        return decode_unit(index, data)

    def _read_page(self, file: DiskFile, page: int, at: int) -> bytes | None:
        """Read a page whose units have all been written, and keep it; None: it cannot be read."""
        generation = self._generation
        try:
            data = file.read(at, min(PAGE_UNITS * UNIT_BYTES, file.size - at))
        except OSError:
            return None  # the unit that is asked for may be on another sector
        if len(self._pages) >= KEPT_PAGES:
            self._pages.clear()
        self._pages[page] = (generation, data)
        return data

    def renew(self, index: int) -> range:
        """Write the page of *index* again if the disk does not give it back, to be filled again.

        Returns:
            The indexes whose units are to be restored: of the whole page then, else this one.
        """
        page = index - index % self._units_per_file % PAGE_UNITS
        if page not in self._unreadable:
            return range(index, index + 1)
        units = range(page, min(page + PAGE_UNITS, self._base(index) + self._units_per_file))
        known = range(max(self._recent_first, units.start), min(self._recent_last, units[-1]) + 1)
        content = self._readable_part(self._files[self._base(index)], page, len(units))
        for at in known:
            unit = encode_unit(at, *self._recent[at & _MASK])
            content[(at - page) * UNIT_BYTES : (at + 1 - page) * UNIT_BYTES] = unit
        self.put_bulk(page, content)
        self._unreadable.discard(page)
        return units

    def _readable_part(self, file: DiskFile, page: int, count: int) -> bytearray:
        content = bytearray(count * UNIT_BYTES)
        start = (page - self._base(page)) * UNIT_BYTES
        for at in range(0, len(content), SECTOR_BYTES):
            with suppress(OSError):  # what is not given back stays zero
                part = content[at : at + SECTOR_BYTES]
                content[at : at + len(part)] = file.read(start + at, len(part))
        return content

    def renew_unreadable(self) -> None:
        """Write all pages again that the disk did not give back; their units are to be put."""
        for page in sorted(self._unreadable):
            self.renew(page)

    def unit(self, index: int) -> Unit:
        """Return (position, term, chain, size) of an entry that is in the log.

        Raises CorruptStoreError: the unit is damaged; opening the log again rebuilds it.
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

        Raises CorruptStoreError: one of them is damaged.
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
        self._generation += 1

    def drop_before(self, first: int) -> None:
        """Remove the files that hold only units below *first*; durable with the next flush."""
        for base in sorted(base for base in self._files if base + self._units_per_file <= first):
            file = self._files.pop(base)
            self._dirty.discard(base)
            self._generation += 1
            file.close()
            self._disk.unlink(file.path)
            self._new_names = True

    def flush(self) -> None:
        """Make all units written so far durable.

        Raises FlushFailedError: the units are only a copy, but the disk cannot be trusted any more.
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
        self._generation += 1
        for file in self._files.values():
            file.close()
        self._files.clear()
