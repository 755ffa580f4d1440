"""Marks, the anchor, the extent: what a log knows of its places beside segments and index.

A mark names one entry together with its chain, so "the entry there is that one, and so is every
entry before it" is one comparison. The anchor is the mark just below the first kept entry.

The *extent* records how far the segments may have been written, so that recovery need not read a
gibibyte of zeros, and up to which entry the entry index is durable. The *truncation* names a cut
before it begins, so that a crash in the middle of it is finished and not taken for damage.

A slot file holds a small value that survives a power cut: two alternating slots, each with its own
checksum. A slot is written, then flushed; the other one keeps the value before it. Slots stand a
page apart, so that a device cannot rewrite both in one sector. Slot layout, big-endian::

    0 magic u32   4 length u32   8 sequence u64   16 crc u32   20 payload

`crc` covers length, sequence and payload.

Spec: docs/reference/formats.md, sections 7 and 9.
"""

from __future__ import annotations

import posixpath
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from typing_extensions import Buffer

from dledger.commitlog.errors import (
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    ForeignStoreError,
    InvariantBroken,
    MQError,
)
from dledger.commitlog.seams import CANNOT_BE_READ, Disk, DiskFile

_MARK: Final = struct.Struct(">qqqQq")

MARK_BYTES: Final = _MARK.size


@dataclass(frozen=True, slots=True)
class Mark:
    """One entry: where it stands and what the log was up to and with it."""

    index: int
    term: int
    position: int
    chain: int
    end_position: int

    def encode(self) -> bytes:
        """Return the 40 bytes of the mark."""
        return _MARK.pack(self.index, self.term, self.position, self.chain, self.end_position)

    @classmethod
    def decode(cls, data: Buffer, offset: int = 0) -> Mark:
        """Return the mark at byte *offset* of *data*. Raises CorruptStoreError: too few bytes."""
        view = memoryview(data)
        if view.nbytes - offset < MARK_BYTES:
            raise CorruptStoreError(f"a mark has {MARK_BYTES} bytes, not {view.nbytes - offset}")
        return cls(*_MARK.unpack_from(view, offset))


_ANCHOR_MAGIC: Final = 0xD1EDA7C0
_ANCHOR_FORMAT: Final = 1
_ANCHOR: Final = struct.Struct(">IIqqqQq")
_CRC: Final = struct.Struct(">I")


class Anchor(NamedTuple):
    """Where the kept log begins, and what stood just before it.

    Args:
        first_index: Raft index of the first kept entry.
        position: Where that entry starts.
        prev_term, prev_chain, prev_store_time_ms: Of entry *first_index* - 1; 0 when there is none.
    """

    first_index: int = 1
    position: int = 0
    prev_term: int = 0
    prev_chain: int = 0
    prev_store_time_ms: int = 0

    @property
    def mark(self) -> Mark:
        """The anchor as the mark of entry ``first_index - 1``, whose begin is not known."""
        return Mark(
            self.first_index - 1, self.prev_term, self.position, self.prev_chain, self.position
        )

    def encode(self) -> bytes:
        """Return the content of the anchor file."""
        body = _ANCHOR.pack(
            _ANCHOR_MAGIC,
            _ANCHOR_FORMAT,
            self.first_index,
            self.position,
            self.prev_term,
            self.prev_chain,
            self.prev_store_time_ms,
        )
        return body + _CRC.pack(zlib.crc32(body))


def load_anchor(disk: Disk, path: str) -> Anchor:
    """Return the anchor of a log; without a file the log begins at index 1, position 0.

    Raises:
        CorruptStoreError: The file is damaged: where the log begins is not known.
        ForeignStoreError: A newer version wrote it.
    """
    if not disk.exists(path):
        return Anchor()
    data = disk.read(path)
    body = data[: _ANCHOR.size]
    if len(data) != _ANCHOR.size + _CRC.size or _CRC.pack(zlib.crc32(body)) != data[len(body) :]:
        raise CorruptStoreError(f"the anchor file {path} does not fit its checksum")
    magic, version, first_index, position, term, chain, store_time_ms = _ANCHOR.unpack(body)
    if magic != _ANCHOR_MAGIC:
        raise CorruptStoreError(f"{path} is not an anchor file")
    if version != _ANCHOR_FORMAT:
        raise ForeignStoreError(f"{path} has format {version}; this version knows {_ANCHOR_FORMAT}")
    if first_index < 1 or position < 0:
        raise CorruptStoreError(f"{path} names entry {first_index} at {position}")
    return Anchor(first_index, position, term, chain, store_time_ms)


def store_anchor(disk: Disk, path: str, anchor: Anchor) -> None:
    """Set the anchor, atomically and durably; segments below it may be removed afterwards."""
    disk.replace(path, anchor.encode())


# ------------------------------------------------------------------ what the log notes about itself


_LIMIT: Final = struct.Struct(">qI")
_CUT: Final = struct.Struct(">qqI")


@dataclass(frozen=True, slots=True)
class Extent:
    """Nothing was ever written at or past *limit*; index units up to *indexed* are durable.

    With *exact* the log ended at *limit* and all of it was durable: nothing may be missing.
    """

    limit: int
    indexed: Mark
    exact: bool

    def encode(self) -> bytes:
        """Return the payload of the slot file."""
        return _LIMIT.pack(self.limit, self.exact) + self.indexed.encode()

    @classmethod
    def decode(cls, payload: bytes) -> Extent:
        """Return what a slot file holds. Raises CorruptStoreError: the payload has another size."""
        if len(payload) != _LIMIT.size + MARK_BYTES:
            raise CorruptStoreError(f"an extent of {len(payload)} bytes")
        limit, exact = _LIMIT.unpack_from(payload)
        return cls(limit, Mark.decode(payload, _LIMIT.size), bool(exact))


@dataclass(frozen=True, slots=True)
class Truncation:
    """A cut: the log ends at *end_position*, everything up to *written_to* is to become zero.

    It is kept when it is *done*: an exact extent of before then ends here too.
    """

    end_position: int
    written_to: int
    done: bool = False

    def encode(self) -> bytes:
        """Return the payload of the slot file; an empty one means that there was no cut."""
        return _CUT.pack(self.end_position, self.written_to, self.done)

    @classmethod
    def decode(cls, payload: bytes) -> Truncation | None:
        """Return what a slot file holds, None when there was no cut since the log was opened.

        Raises CorruptStoreError: the payload has another size.
        """
        if not payload:
            return None
        if len(payload) != _CUT.size:
            raise CorruptStoreError(f"a truncation of {len(payload)} bytes")
        end_position, written_to, done = _CUT.unpack(payload)
        return cls(end_position, written_to, bool(done))


SLOT_MAGIC: Final = 0xD1ED5107
SLOT_HEADER_BYTES: Final = 20
SLOT_STRIDE_BYTES: Final = 4096
"""Distance between the slots: the largest sector a device rewrites as a whole."""

_HEADER: Final = struct.Struct(">IIQI")
_COVERED: Final = struct.Struct(">IQ")


def encode_slot(sequence: int, payload: bytes) -> bytes:
    """Return the bytes of one slot, without padding."""
    crc = zlib.crc32(payload, zlib.crc32(_COVERED.pack(len(payload), sequence)))
    return _HEADER.pack(SLOT_MAGIC, len(payload), sequence, crc) + payload


def decode_slot(slot: Buffer) -> tuple[int, bytes] | None:
    """Return (sequence, payload) of a slot, or None when it is not whole."""
    view = memoryview(slot)
    if view.nbytes < SLOT_HEADER_BYTES:
        return None
    magic, length, sequence, crc = _HEADER.unpack_from(view)
    if magic != SLOT_MAGIC or length > view.nbytes - SLOT_HEADER_BYTES:
        return None
    payload = bytes(view[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + length])
    if zlib.crc32(payload, zlib.crc32(_COVERED.pack(length, sequence))) != crc:
        return None
    return sequence, payload


def newest_payload(data: bytes) -> bytes | None:
    """Return the value in the bytes of a slot file; None when nothing was ever stored.

    Raises CorruptStoreError: neither slot is whole, and they are not simply empty.
    """
    slots = [decode_slot(data[at : at + SLOT_STRIDE_BYTES]) for at in (0, SLOT_STRIDE_BYTES)]
    whole = [slot for slot in slots if slot is not None]
    if whole:
        return max(whole)[1]
    if any(data):
        raise CorruptStoreError("neither slot is whole")
    return None


class SlotFile:
    """One value in a file of two slots.

    Not thread-safe: one user at a time. After a failed `store` the file is unusable, because
    which of the two values a power cut would leave is not known.
    """

    def __init__(self, disk: Disk, path: str, slot_bytes: int = 512) -> None:
        self._disk = disk
        self._path = path
        self._slot_bytes = slot_bytes
        self._stride = max(SLOT_STRIDE_BYTES, slot_bytes)
        self._file: DiskFile | None = None
        self._loaded = False
        self._sequence = 0
        self._slot = 1
        self._value: bytes | None = None
        self._broken = False
        self.is_doubled = False
        """Whether both slots held the value when it was loaded."""
        self.is_damaged = False
        """Whether a slot was not whole when the value was loaded: it may have been a newer one."""

    def load(self) -> bytes | None:
        """Return the newest whole value; None when none was ever stored.

        Raises CorruptStoreError: neither slot is whole, and they are not simply empty.
        """
        if self._loaded:
            return self._value
        if self._disk.exists(self._path):
            file = self._disk.open(self._path)
            if file.size < self._stride + self._slot_bytes:
                self._discard_short(file)
            else:
                self._file = file
                self._choose(file)
        self._loaded = True
        return self._value

    def _discard_short(self, file: DiskFile) -> None:
        # A crash while the file was made leaves it short and empty.
        try:
            empty = not any(file.read(0, file.size))
        finally:
            file.close()
        if not empty:
            raise CorruptStoreError(f"{self._path} has only {file.size} bytes")
        self._disk.unlink(self._path)

    def _choose(self, file: DiskFile) -> None:
        slots = [self._read(file, i) for i in range(2)]
        whole = [(decoded, i) for i, slot in enumerate(slots) if (decoded := decode_slot(slot))]
        if whole:
            (self._sequence, self._value), self._slot = max(whole)
            self.is_doubled = [payload for (_, payload), _ in whole] == [self._value] * 2
            self.is_damaged = len(whole) < len(slots)
        elif slots[1].strip(b"\0"):
            # Slot 1 holds something only after slot 0 was whole.
            raise CorruptStoreError(f"neither slot of {self._path} is whole")

    def _read(self, file: DiskFile, slot: int) -> bytes:
        try:
            return file.read(slot * self._stride, self._slot_bytes)
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            return b"\xff"  # no slot has such bytes

    def store_twice(self, payload: Buffer) -> None:
        """Make *payload* the value in both slots. Blocks for two flushes.

        For a value whose predecessor must not come back: damage to the newest slot makes the other
        one count.

        Raises:
            DiskFullError: The value is as it was.
            FlushFailedError: Either value may be there after a crash.
        """
        self.store(payload)
        with self._as_failed_flush():
            self.store(payload)

    @contextmanager
    def _as_failed_flush(self) -> Iterator[None]:
        """Raise `FlushFailedError` where the disk is full: the first copy of a value counts."""
        try:
            yield
        except DiskFullError as error:
            raise FlushFailedError(f"{self._path} has one copy only: {error}") from error

    def store(self, payload: Buffer) -> None:
        """Make *payload* the value, durably. Blocks for one flush.

        Raises:
            DiskFullError: No space to make the file, or a copy-on-write file system has none to
                write to it; the value is as it was.
            FlushFailedError: Either value may be there after a crash; the file is unusable.
        """
        data = bytes(payload)
        if len(data) > self._slot_bytes - SLOT_HEADER_BYTES:
            raise InvariantBroken(f"{len(data)} bytes do not fit a slot of {self._slot_bytes}")
        self.load()
        if self._broken:
            raise FlushFailedError(f"an earlier flush of {self._path} failed")
        if self._file is None:
            self._file = self._make()
        if self._value is None:
            # The first value goes into both slots: from then on damage to one never resembles
            # a file in which nothing was stored.
            self._write(self._file, data)
            with self._as_failed_flush():
                self._write(self._file, data)
        else:
            self._write(self._file, data)

    def _write(self, file: DiskFile, data: bytes) -> None:
        slot = 1 - self._slot
        encoded = encode_slot(self._sequence + 1, data)
        self._broken = True
        try:
            file.write_at(slot * self._stride, encoded + bytes(self._slot_bytes - len(encoded)))
        except DiskFullError:
            self._broken = False  # the slot that counts is the other one
            raise
        file.flush()
        self._broken = False
        self._slot = slot
        self._sequence += 1
        self._value = data

    def _make(self) -> DiskFile:
        file = self._disk.create(self._path, self._stride + self._slot_bytes, reserve=True)
        try:
            file.flush()
            self._disk.flush_dir(posixpath.dirname(self._path))
        except MQError:
            self._broken = True
            raise
        return file

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._loaded = False
        self._sequence = 0
        self._slot = 1
        self._value = None
