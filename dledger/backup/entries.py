"""The walk over stored entries: each one checked whole before anything is done with it. Pure.

An entry counts if both checksums fit, it continues the chain, and index, term, time and position
follow the entry before. What is walked goes up to a known entry: anything else ends the walk with
an error that names the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dledger.commitlog.entry import ENTRY_HEADER_BYTES, EntryHeader, parse_header, verify_frame
from dledger.commitlog.errors import CorruptEntryError, CorruptStoreError
from dledger.commitlog.mark import Mark
from dledger.commitlog.segment import BLANK_BYTES, encode_blank

READ_BYTES: Final = 1 << 20
"""Read at once: an entry is a few kilobytes, a call of the disk for each would cost more."""

BytesAt = Callable[[int, int], bytes]
"""Returns bytes from a position of the log on; fewer where the segment, or what is there, ends."""


class EntryDamagedError(CorruptStoreError):
    """No whole entry stands at *position*."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"byte {position} of the log: {why}")
        self.position = position


class Window:
    """Gives bytes of a log out of larger pieces that were read at once; *read*: reads them."""

    def __init__(self, read: BytesAt) -> None:
        self._read = read
        self._position = 0
        self._data = b""

    def at(self, position: int, size: int) -> memoryview:
        """Return *size* bytes from *position* on; fewer where there are no more."""
        if not self._position <= position <= position + size <= self._position + len(self._data):
            self._data = self._read(position, max(size, READ_BYTES))
            self._position = position
        begin = position - self._position
        return memoryview(self._data)[begin : begin + size]


def entries(
    read: BytesAt, before: Mark, before_ms: int, last: Mark, segment_bytes: int
) -> Iterator[tuple[EntryHeader, memoryview]]:
    """Yield every entry behind *before* up to *last* with its frame.

    Args:
        before: The entry before the first one, or an anchor's mark.
        before_ms: Its store time; 0: not known.
    Raises:
        EntryDamagedError: An entry, or the blank that ends a segment, is not what must be there.
    """
    window = Window(read)
    position = before.end_position
    index, term, chain, newest_ms = before.index, before.term, before.chain, before_ms
    while index < last.index:
        free = segment_bytes - position % segment_bytes
        if bytes(window.at(position, BLANK_BYTES)) == encode_blank(free):
            position += free
            continue
        try:
            header = parse_header(window.at(position, ENTRY_HEADER_BYTES))
            if header.position != position or header.size + BLANK_BYTES > free:
                raise EntryDamagedError(position, f"entry {header.index} does not belong there")
            frame = window.at(position, header.size)
            verify_frame(frame, header, chain)
        except CorruptEntryError as error:
            raise EntryDamagedError(position, f"no entry {index + 1}: {error}") from error
        if header.index != index + 1 or header.term < term or header.store_time_ms < newest_ms:
            raise EntryDamagedError(position, f"entry {header.index} does not follow entry {index}")
        yield header, frame
        index, term, chain = header.index, header.term, header.chain
        newest_ms = header.store_time_ms
        position = header.end_position
    if (index, term, chain, position) != (last.index, last.term, last.chain, last.end_position):
        raise EntryDamagedError(position, f"entry {index} is not the one that was committed")
