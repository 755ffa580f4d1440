"""Segments: preallocated files that hold the log, and the arithmetic of positions in them.

A segment is named by the position of its first byte, a multiple of the segment size. An entry
never spans two: when it and the 8 bytes of a blank do not fit any more, a blank record fills the
rest and the entry begins the next segment. A blank has the same bytes on every replica.

The format of a folder records how its log was written: sizes that cannot change while files of the
old size are there.

Spec: docs/reference/formats.md, sections 5 and 9.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dledger.commitlog.errors import ConfigError, CorruptStoreError, ForeignStoreError
from dledger.commitlog.record import BLANK_MAGIC
from dledger.commitlog.seams import CANNOT_BE_READ, Disk, DiskFile
from dledger.commitlog.store_paths import StorePaths

DEFAULT_SEGMENT_BYTES: Final = 1 << 30
"""RocketMQ's mappedFileSizeCommitLog."""

BLANK_BYTES: Final = 8
"""The last bytes of a segment are always left for a blank."""

MAX_SEGMENT_BYTES: Final = 0x7FFFFFFF
"""A blank's size is a signed 32-bit number."""

ZERO_CHUNK_BYTES: Final = 1 << 20
"""Ranges are zeroed and searched in pieces of this size, so memory stays bounded."""

UNREADABLE: Final = b"\xff"
"""Stands for each byte that the disk does not give back."""

_ZEROS: Final = bytes(ZERO_CHUNK_BYTES)
_BLANK: Final = struct.Struct(">iI")


def segment_base(position: int, segment_bytes: int) -> int:
    """Return the base of the segment that holds the byte at *position*."""
    return position - position % segment_bytes


def place(end_position: int, size: int, segment_bytes: int) -> int:
    """Return where a frame of *size* bytes starts in a log that ends at *end_position*."""
    free_bytes = segment_bytes - end_position % segment_bytes
    return end_position if size + BLANK_BYTES <= free_bytes else end_position + free_bytes


def encode_blank(remaining: int) -> bytes:
    """Return the begin of the blank that fills *remaining* bytes; the rest of it is zero."""
    return _BLANK.pack(remaining, BLANK_MAGIC)


class Segment:
    """One segment file. Views pin the mapping: they stay valid after `close` and `unlink`."""

    __slots__ = ("base", "end", "file", "size")

    def __init__(self, base: int, file: DiskFile) -> None:
        self.base = base
        self.file = file
        self.size = file.size
        self.end = base + file.size

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.file.path

    def write(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write at an absolute position.

        Raises DiskFullError: what was at these bytes is undefined.
        """
        self.file.write_at(position - self.base, data)

    def bytes_at(self, position: int, size: int) -> memoryview:
        """Return *size* bytes at an absolute position, fewer at the end of the segment.

        A read-only view, which sees later writes.
        """
        at = position - self.base
        return self.file.view(at, min(size, self.size - at))

    def read_at(self, position: int, size: int) -> bytes:
        """Return a copy of *size* bytes at an absolute position, fewer at the end of the segment.

        Bytes on a bad sector come as `UNREADABLE`, which no entry and no blank has, and zeros
        are not: what stands there is damaged, and is found to be.
        """
        at = position - self.base
        size = max(0, min(size, self.size - at))
        try:
            return self.file.read(at, size)
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            return UNREADABLE * size

    def has_blank_at(self, position: int) -> bool:
        """Tell whether a blank that fills the rest of the segment begins at *position*."""
        remaining = self.end - position
        return remaining >= BLANK_BYTES and self.read_at(position, BLANK_BYTES) == encode_blank(
            remaining
        )

    def written_chunks(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield (position, content) of the pieces of [*start*, *stop*) that are not all zero."""
        stop = min(stop, self.end)
        while start < stop:
            # Pieces end at their own multiples: a range that is searched and then zeroed is cut
            # the same way both times.
            size = min(stop - start, ZERO_CHUNK_BYTES - start % ZERO_CHUNK_BYTES)
            content = self.read_at(start, size)
            if content != (_ZEROS if size == ZERO_CHUNK_BYTES else _ZEROS[:size]):
                yield start, content
            start += size

    def zero(self, start: int, stop: int) -> int:
        """Set [*start*, *stop*) to zero where it is not; return the bytes up to the last such one.

        Raises DiskFullError: a copy-on-write file system had no space.
        """
        last = start
        for position, content in self.written_chunks(start, stop):
            used = len(content.rstrip(b"\0"))
            self.write(position, _ZEROS[:used])
            last = position + used
        return last - start

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        self.file.close()


# --------------------------------------------------------------------------- the format of a folder


FORMAT_VERSION: Final = 1
MIN_SEGMENT_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class LogFormat:
    """Sizes a log was made with."""

    segment_bytes: int
    index_units_per_file: int

    def encode(self) -> bytes:
        """Return the content of the format file: one line of JSON."""
        fields = {
            "format": FORMAT_VERSION,
            "segment_bytes": self.segment_bytes,
            "index_units_per_file": self.index_units_per_file,
        }
        return json.dumps(fields).encode() + b"\n"


def check_format(disk: Disk, paths: StorePaths, wanted: LogFormat) -> LogFormat:
    """Return the format of the folder; a new folder gets *wanted*.

    The size of index files is taken from the folder, the segment size must be the same.

    Raises:
        ConfigError: A size that no log can have.
        ForeignStoreError: Another segment size, a newer version, or segments of another program.
        CorruptStoreError: The format file is damaged.
    """
    if not MIN_SEGMENT_BYTES <= wanted.segment_bytes <= MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"segment size {wanted.segment_bytes} is not within "
            f"{MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES} bytes"
        )
    if wanted.index_units_per_file < 1:
        raise ConfigError(f"{wanted.index_units_per_file} units do not make an index file")
    if not disk.exists(paths.format):
        if disk.list_dir(paths.commitlog):
            raise ForeignStoreError(
                f"{paths.commitlog} holds files of another program: {paths.format} is missing"
            )
        disk.make_dir(paths.raft)
        disk.replace(paths.format, wanted.encode())
        return wanted
    found = _decode(disk.read(paths.format), paths.format)
    if found.segment_bytes != wanted.segment_bytes:
        raise ForeignStoreError(
            f"{paths.root} was written with segments of {found.segment_bytes} bytes, "
            f"not {wanted.segment_bytes}"
        )
    return found


def read_format(disk: Disk, paths: StorePaths) -> LogFormat:
    """Return the format of a folder that has one; raises like `check_format`."""
    return _decode(disk.read(paths.format), paths.format)


def _decode(data: bytes, path: str) -> LogFormat:
    try:
        fields = json.loads(data)
        version = fields["format"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ForeignStoreError(
                f"{path} has format {version}; this version knows up to {FORMAT_VERSION}"
            )
        found = LogFormat(int(fields["segment_bytes"]), int(fields["index_units_per_file"]))
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"the format file {path} is damaged: {error}") from error
    if found.index_units_per_file < 1 or found.segment_bytes < MIN_SEGMENT_BYTES:
        raise CorruptStoreError(f"the format file {path} is damaged: {found}")
    return found
