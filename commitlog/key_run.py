"""A run of the key index: the keys of entries that follow each other, in one file or in memory.

A file is written once, as a whole, and never changed: pairs of key hash and position, sorted by
both, in blocks with a checksum each. The first hash of each block stands in the head, so that a
search reads the blocks that may have the hash and no others.

Spec: docs/reference/formats.md, section 4.
"""

from __future__ import annotations

import re
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.seams import Disk

RUN_MAGIC: Final = 0xD1ED1D01
PAIR_DTYPE: Final = np.dtype([("key_hash", ">i4"), ("position", ">i8")])
PAIRS_PER_BLOCK: Final = 340
"""A block of them and its checksum take 4,084 bytes: one page of a disk, or two."""

_HEAD: Final = struct.Struct(">II")
_FIELDS: Final = struct.Struct(">qqqqq")
_CRC: Final = struct.Struct(">I")
_FENCE: Final = np.dtype(">i4")
_FENCES_AT: Final = _HEAD.size + _FIELDS.size
_BLOCK_PAIRS_BYTES: Final = PAIRS_PER_BLOCK * PAIR_DTYPE.itemsize
_BLOCK_BYTES: Final = _BLOCK_PAIRS_BYTES + _CRC.size
_NAME_DIGITS: Final = 20
_NAME: Final = re.compile("[0-9]{20}-[0-9]{20}")

Pairs = npt.NDArray[Any]
"""Array of `PAIR_DTYPE`."""

Read = Callable[[int, int], bytes]
"""Returns bytes of a file, from an offset on."""


class Keys:
    """The keys of entries *first* … *last*, in log order, in memory."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = first - 1
        self._hashes = array("i")
        self._positions = array("q")

    def __len__(self) -> int:
        return len(self._hashes)

    def add(
        self, last: int, hashes: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> None:
        """Add the keys of the entries that follow, up to *last*."""
        self._hashes.frombytes(hashes.tobytes())
        self._positions.frombytes(positions.tobytes())
        self.last = last

    def copy(self) -> Keys:
        """Return a copy, which another thread may read."""
        found = Keys(self.first)
        found._hashes, found._positions = self._hashes[:], self._positions[:]
        found.last = self.last
        return found

    def cut(self, last: int, count: int) -> None:
        """Forget the entries up to *last*, which have *count* keys."""
        self.first = last + 1
        del self._hashes[:count]
        del self._positions[:count]

    def positions_of(self, key_hash: int) -> list[int]:
        """Return the positions of a hash, newest first."""
        if not self._hashes:
            return []
        rows = np.flatnonzero(np.frombuffer(self._hashes, np.int32) == key_hash)
        return [self._positions[row] for row in reversed(rows.tolist())]

    def pairs(self) -> Pairs:
        """Return them in log order."""
        pairs = np.empty(len(self), PAIR_DTYPE)
        pairs["key_hash"] = self._hashes
        pairs["position"] = self._positions
        return pairs


@dataclass(eq=False)
class Run:
    """The file with the *count* keys of entries *first* … *last*.

    Attributes:
        low, high: Positions of the first and of the last record with a key; 0 where there is none.
        fences: The first hash of each block.
    """

    path: str
    first: int
    last: int
    count: int
    low: int
    high: int
    fences: npt.NDArray[np.int32] = field(repr=False)

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return -(-self.count // PAIRS_PER_BLOCK)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        beside = self.blocks * (_FENCE.itemsize + _CRC.size)
        return _FENCES_AT + beside + self.count * PAIR_DTYPE.itemsize

    def walk(self, disk: Disk, key_hash: int) -> Iterator[list[int]]:
        """Yield the positions of *key_hash*, newest first, those of one block at a time.

        Raises:
            CorruptStoreError: What is read does not fit its checksum.
            OSError: The file is not there, or cannot be read.
        """
        file = disk.open(self.path)
        try:
            low = max(int(np.searchsorted(self.fences, key_hash)) - 1, 0)
            high = int(np.searchsorted(self.fences, key_hash, side="right"))
            for block in range(high - 1, low - 1, -1):
                pairs = self._read_block(file.read, block)
                hashes = pairs["key_hash"].astype(np.int32)
                begin, end = np.searchsorted(hashes, [key_hash, key_hash + 1]).tolist()
                yield pairs["position"][begin:end][::-1].tolist()
        finally:
            file.close()

    def read(self, disk: Disk) -> Pairs:
        """Return all pairs, sorted. Raises like `walk`."""
        file = disk.open(self.path)
        try:
            return self.pairs(file.read)
        finally:
            file.close()

    def pairs(self, read: Read) -> Pairs:
        """Return all pairs, sorted. Raises CorruptStoreError: some do not fit their checksum."""
        blocks = [self._read_block(read, block) for block in range(self.blocks)]
        return np.concatenate([np.empty(0, PAIR_DTYPE), *blocks])

    def _read_block(self, read: Read, block: int) -> Pairs:
        count = min(PAIRS_PER_BLOCK, self.count - block * PAIRS_PER_BLOCK)
        at = _FENCES_AT + self.blocks * _FENCE.itemsize + block * _BLOCK_BYTES
        data = read(at, count * PAIR_DTYPE.itemsize + _CRC.size)
        if zlib.crc32(data[: -_CRC.size]) != _CRC.unpack(data[-_CRC.size :])[0]:
            raise CorruptStoreError(f"block {block} of {self.path} does not fit its checksum")
        return np.frombuffer(data, PAIR_DTYPE, count)


def is_run_name(name: str) -> bool:
    """Whether a file of that name is a run."""
    return _NAME.fullmatch(name) is not None


def open_run(disk: Disk, path: str) -> Run:
    """Return the run in a file. Raises like `decode_run`; OSError: it cannot be read."""
    file = disk.open(path)
    try:
        return decode_run(path, file.read, file.size)
    finally:
        file.close()


def decode_run(path: str, read: Read, size: int) -> Run:
    """Return the run in a file of *size* bytes, of which the head is read.

    Raises CorruptStoreError: it is none, or its head is damaged.
    """
    head = read(0, min(_FENCES_AT, size)).ljust(_FENCES_AT, b"\0")
    magic, crc = _HEAD.unpack_from(head)
    first, last, count, low, high = _FIELDS.unpack_from(head, _HEAD.size)
    run = Run(path, first, last, count, low, high, np.empty(0, np.int32))
    if (magic, run.size_bytes) != (RUN_MAGIC, size):
        raise CorruptStoreError(f"{path} is not a run of the key index")
    fences = read(_FENCES_AT, run.blocks * _FENCE.itemsize)
    if zlib.crc32(head[_HEAD.size :] + fences) != crc:
        raise CorruptStoreError(f"the head of {path} does not fit its checksum")
    run.fences = np.frombuffer(fences, _FENCE).astype(np.int32)
    return run


def write_run(disk: Disk, root: str, first: int, last: int, pairs: Pairs) -> Run:
    """Write the run of entries *first* … *last*, durably. Blocking.

    *pairs*: theirs; those of one hash in log order.

    Raises:
        DiskFullError: No space; there is no such file.
        FlushFailedError: The node must stop.
    """
    path = f"{root}/{first:0{_NAME_DIGITS}d}-{last:0{_NAME_DIGITS}d}"
    hashes, positions = pairs["key_hash"].astype(np.int32), pairs["position"].astype(np.int64)
    ends = (int(positions.min()), int(positions.max())) if len(pairs) else (0, 0)
    order = np.argsort(hashes, kind="stable")
    pairs = np.empty(len(order), PAIR_DTYPE)
    pairs["key_hash"], pairs["position"] = hashes[order], positions[order]
    fences = hashes[order[::PAIRS_PER_BLOCK]]
    run = Run(path, first, last, len(pairs), *ends, fences)
    fields = _FIELDS.pack(first, last, run.count, *ends) + fences.astype(_FENCE).tobytes()
    head = _HEAD.pack(RUN_MAGIC, zlib.crc32(fields)) + fields
    data = bytearray(run.size_bytes)
    data[: len(head)] = head
    at, rest = len(head), pairs.view(np.uint8).data
    while rest:
        block, rest = rest[:_BLOCK_PAIRS_BYTES], rest[_BLOCK_PAIRS_BYTES:]
        data[at : at + len(block)] = block
        _CRC.pack_into(data, at + len(block), zlib.crc32(block))
        at += len(block) + _CRC.size
    disk.replace(path, data)
    return run
