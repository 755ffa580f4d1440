"""Marks and the anchor: places in the log that are known by more than their index.

A mark names one entry together with its chain, so "the entry there is that one, and so is every
entry before it" is one comparison. The anchor is the mark just below the first kept entry.

Spec: docs/reference/formats.md, sections 7 and 9.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from commitlog.errors import CorruptStoreError, ForeignStoreError
from commitlog.seams import Disk

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
        """Return the mark at byte *offset* of *data*.

        Raises:
            CorruptStoreError: Too few bytes.
        """
        view = memoryview(data)
        if view.nbytes - offset < MARK_BYTES:
            raise CorruptStoreError(f"a mark has {MARK_BYTES} bytes, not {view.nbytes - offset}")
        return cls(*_MARK.unpack_from(view, offset))


_ANCHOR_MAGIC: Final = 0xD1EDA7C0
_ANCHOR_FORMAT: Final = 1
_ANCHOR: Final = struct.Struct(">IIqqqQq")
_CRC: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Anchor:
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
