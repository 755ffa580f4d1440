"""Consume queue units of many queues in one file.

A group of a hundred thousand queues has no descriptors, and no time at a checkpoint, for a file
each. Units of a queue whose own file is not open stand here until they are moved into files of
their queue. What counts is in memory as well: the file is read once, when the store is opened.

A file is a row of chunks, each of them one flush. When the next chunk does not fit, a new file
begins with what counts. How far the newest file goes is in a slot file, written after the chunk:
what stands beyond that may be torn, what stands before it may not. A whole chunk beyond it counts.

Spec: docs/reference/formats.md, section 3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from dledger.commitlog.errors import CorruptStoreError, DiskFullError
from dledger.commitlog.mark import SlotFile, newest_payload
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.seams import CANNOT_BE_READ, Disk, DiskFile

CHUNK_MAGIC: Final = 0xD1ED5A01
FILE_BYTES_MIN: Final = 4 << 20
"""A file takes chunks for a while before what counts is written once more."""

FILE_GROWTH: Final = 4
"""A new file has space for this many times what counts when it is made."""

_CHUNK: Final = struct.Struct(">III")
_ROW: Final = struct.Struct(">BHiqI")
_END: Final = struct.Struct(">QQ")
_END_NAME: Final = "end"
_NAME_DIGITS: Final = 20


class RowKind(IntEnum):
    """What a row of a chunk does."""

    UNITS = 1
    """Units from an offset on, over all that stand there and behind."""
    FROM = 2
    """Units before an offset count here no more."""
    TOPIC_DELETED = 3


class Row(NamedTuple):
    """One change; in a file all changes follow each other."""

    kind: RowKind
    topic: str
    queue_id: int = 0
    first: int = 0
    units: bytes = b""


class Tail:
    """Units of one queue in memory, from offset *first* on without a gap."""

    __slots__ = ("first", "units")

    def __init__(self, first: int = 0, units: bytes | bytearray = b"") -> None:
        self.first = first
        self.units = bytearray(units)

    @property
    def end(self) -> int:
        """The offset behind the last unit."""
        return self.first + len(self.units) // UNIT_BYTES

    def takes(self, first: int) -> bool:
        """Whether units at *first* leave no gap here."""
        return not self.units or self.first <= first <= self.end

    def put(self, first: int, units: bytes) -> None:
        """Add units over all that stand at *first* and behind."""
        if not self.takes(first) or not self.units:
            self.first, self.units = first, bytearray(units)
            return
        del self.units[(first - self.first) * UNIT_BYTES :]
        self.units += units

    def cut_before(self, offset: int) -> None:
        """Forget the units before *offset*."""
        if offset > self.first:
            gone = min(offset, self.end) - self.first
            del self.units[: gone * UNIT_BYTES]
            self.first += gone

    def cut_from(self, offset: int) -> None:
        """Forget the units at and behind *offset*."""
        if offset < self.end:
            del self.units[max(offset - self.first, 0) * UNIT_BYTES :]

    def within(self, first: int, end: int) -> bytes:
        """Return a copy of the units of ``first … end - 1`` that are here."""
        low, high = max(first, self.first), min(end, self.end)
        if low >= high:
            return b""
        at = (low - self.first) * UNIT_BYTES
        return bytes(self.units[at : at + (high - low) * UNIT_BYTES])


Tails = dict[str, dict[int, Tail]]


class SharedUnits:
    """The units of many queues, on disk and in memory.

    Not thread-safe: opened by one thread, then written by one worker at a time.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        """Read what is in *folder*. Raises CorruptStoreError: units that were durable are lost."""
        self._disk = disk
        self._folder = folder
        self._file: DiskFile | None = None
        self._number = 0
        self._end = 0
        self._end_slots = SlotFile(disk, f"{folder}/{_END_NAME}")
        self.tails: Tails = {}
        """Units that count, by topic and queue id; none of them is empty."""
        if disk.exists(folder):
            self._load()

    def _load(self) -> None:
        recorded = self._end_slots.load()
        if recorded is not None:
            self._number, promised = _END.unpack(recorded)
        elif names := self._names():
            # The first flush never came to its end, or the record is lost: of the first file its
            # whole chunks count, and of a later one it is not known how far it went.
            if names != [self._name(1)]:
                raise CorruptStoreError(f"{self._folder}/{_END_NAME} is missing")
            self._number, promised = 1, 0
        else:
            return
        path = self._path(self._number)
        try:
            file = self._disk.open(path)
        except FileNotFoundError as error:
            raise CorruptStoreError(f"{path} is missing") from error
        try:
            if promised > file.size:
                raise CorruptStoreError(f"{path} has {file.size} bytes in place of {promised}")
            if self._end_slots.is_damaged and self._disk.exists(self._path(self._number + 1)):
                raise CorruptStoreError(f"it is not known whether {path} is the newest file")
            end = whole_chunks_end(file.read, file.size, promised)
            take_chunks(self.tails, file.read(0, end), path)
        except OSError as error:
            file.close()
            raise CorruptStoreError(f"{path} cannot be read: {error}") from error
        except CorruptStoreError:
            file.close()
            raise
        self._file, self._end = file, end
        self._remove_others(path)

    def _names(self) -> list[str]:
        names = self._disk.list_dir(self._folder)
        return [name for name in names if len(name) == _NAME_DIGITS and name.isdecimal()]

    def _remove_others(self, kept: str) -> None:
        for name in self._names():
            path = f"{self._folder}/{name}"
            if path != kept:
                self._disk.unlink(path)

    def write(self, rows: Sequence[Row]) -> None:
        """Make *rows* durable. Blocking. After an error the same rows may be written again.

        Raises:
            DiskFullError: No space for a new file.
            FlushFailedError: The node must stop.
        """
        if not rows:
            return
        for row in rows:
            _take(self.tails, row)
        chunk = _chunk(rows)
        if self._file is None or self._end + len(chunk) > self._file.size:
            self._begin_file()
            return
        try:
            self._file.write_at(self._end, chunk)
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            # Of the rest of a page; what counts is in memory as well.
            self._begin_file()
            return
        self._file.flush()
        self._end += len(chunk)
        self._note_end()

    def _begin_file(self) -> None:
        """Write what counts into a new file; the old one counts until the new one is whole."""
        chunk = _chunk(
            Row(RowKind.UNITS, topic, queue_id, tail.first, bytes(tail.units))
            for topic, queues in self.tails.items()
            for queue_id, tail in queues.items()
        )
        path = self._path(self._number + 1)
        self._disk.unlink(path)  # left by an attempt that failed
        size = max(FILE_BYTES_MIN, FILE_GROWTH * len(chunk))
        file = self._disk.create(path, size, reserve=False)
        try:
            file.write_at(0, chunk)
            file.flush()
            self._disk.flush_dir(self._folder)
        except DiskFullError:
            file.close()
            self._disk.unlink(path)
            raise
        old, self._file = self._file, file
        self._number, self._end = self._number + 1, len(chunk)
        self._note_end()
        if old is not None:
            old.close()
            self._disk.unlink(old.path)

    def _note_end(self) -> None:
        self._end_slots.store(_END.pack(self._number, self._end))

    @staticmethod
    def _name(number: int) -> str:
        return f"{number:0{_NAME_DIGITS}d}"

    def _path(self, number: int) -> str:
        return f"{self._folder}/{self._name(number)}"

    def close(self) -> None:
        """Give the descriptors back."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._end_slots.close()


def read_tails(folder: str, read: Callable[[str], bytes]) -> Tails:
    """Return what counts in a folder of shared units, by topic and queue id. Changes nothing.

    Raises CorruptStoreError: units that were durable are lost.
    """
    try:
        recorded = newest_payload(read(f"{folder}/{_END_NAME}"))
    except FileNotFoundError:
        recorded = None
    tails: Tails = {}
    number, promised = (1, 0) if recorded is None else _END.unpack(recorded)
    path = f"{folder}/{number:0{_NAME_DIGITS}d}"
    try:
        data = read(path)
    except FileNotFoundError as error:
        if recorded is None:
            return tails
        raise CorruptStoreError(f"{path} is missing") from error
    end = whole_chunks_end(lambda at, size: data[at : at + size], len(data), promised)
    take_chunks(tails, data[:end].ljust(promised, b"\0"), path)
    return tails


def whole_chunks_end(read: Callable[[int, int], bytes], size: int, at: int) -> int:
    """Return where the whole chunks end that stand at *at* and behind; *at*: there are none."""
    while (begin := at + _CHUNK.size) <= size:
        magic, length, crc = _CHUNK.unpack(read(at, _CHUNK.size))
        if magic != CHUNK_MAGIC or begin + length > size:
            break
        if zlib.crc32(read(begin, length)) != crc:
            break
        at = begin + length
    return at


def take_chunks(tails: Tails, data: bytes, path: str) -> None:
    """Bring *tails* up to date with the chunks in *data*, which came from the file *path*.

    Raises CorruptStoreError: a chunk is damaged; *tails* has those before it.
    """
    at = 0
    while at < len(data):
        head = data[at : at + _CHUNK.size].ljust(_CHUNK.size, b"\0")
        magic, length, crc = _CHUNK.unpack(head)
        body = data[at + _CHUNK.size : at + _CHUNK.size + length]
        if magic != CHUNK_MAGIC or len(body) != length or zlib.crc32(body) != crc:
            raise CorruptStoreError(f"{path} is damaged at byte {at}")
        for row in decode_rows(body):
            _take(tails, row)
        at += _CHUNK.size + length


def _take(tails: Tails, row: Row) -> None:
    kind, topic, queue_id, first, units = row
    if kind is RowKind.TOPIC_DELETED:
        tails.pop(topic, None)
        return
    queues = tails.setdefault(topic, {})
    tail = queues.setdefault(queue_id, Tail())
    if kind is RowKind.UNITS:
        tail.put(first, units)
    else:
        tail.cut_before(first)
    if not tail.units:
        del queues[queue_id]
        if not queues:
            del tails[topic]


def _chunk(rows: Iterable[Row]) -> bytes:
    body = encode_rows(rows)
    return _CHUNK.pack(CHUNK_MAGIC, len(body), zlib.crc32(body)) + body


def encode_rows(rows: Iterable[Row]) -> bytes:
    """Return the bytes of *rows*."""
    parts: list[bytes] = []
    for kind, topic, queue_id, first, units in rows:
        name = topic.encode()
        parts.append(_ROW.pack(kind, len(name), queue_id, first, len(units) // UNIT_BYTES))
        parts.append(name)
        parts.append(units)
    return b"".join(parts)


def decode_rows(body: bytes) -> Iterator[Row]:
    """Yield the rows in *body*. Raises CorruptStoreError: these are no rows."""
    at = 0
    try:
        while at < len(body):
            kind, name_bytes, queue_id, first, count = _ROW.unpack_from(body, at)
            at += _ROW.size
            name_end = at + name_bytes
            end = name_end + count * UNIT_BYTES
            if end > len(body):
                raise CorruptStoreError(f"a row of {end - at} bytes has only {len(body) - at}")
            yield Row(
                RowKind(kind), body[at:name_end].decode(), queue_id, first, body[name_end:end]
            )
            at = end
    except (struct.error, ValueError) as error:
        raise CorruptStoreError(f"no row of shared units: {error}") from error
