"""Entries that are read from the log at once, with what is derived from all of them.

Of those that are applied at once, one that is not plain, or is damaged, is applied alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitlog.derive import derive_together
from commitlog.entry import KIND_RECORDS, EntryHeader, parse_header
from commitlog.entry_log import EntryLog
from commitlog.errors import CorruptEntryError, CorruptRecordError
from dledger.state.apply import EntriesTogether, entries_together

APPLIED_TOGETHER_BYTES: Final = 1 << 20
"""Entries applied at once, bytes: some 10 ms of the event loop with messages of 256 bytes."""

APPLIED_TOGETHER_RECORDS: Final = 1_024
"""Records in entries applied at once: each may be of another queue, which costs some 30
microseconds."""


def read_together(
    entry_log: EntryLog, first: int, last: int, delays: Mapping[int, int]
) -> EntriesTogether | int:
    """Return entries from *first* to *last*, or fewer, to apply at once.

    Returns:
        An index instead: that entry is to be applied alone, those before it may be read again.
    """
    try:
        frames, headers = read_plain(entry_log, first, last, APPLIED_TOGETHER_BYTES)
        if len(headers) < 2:
            return first
        return entries_together(frames, headers, derive_together(frames, headers, delay_ms=delays))
    except (CorruptEntryError, CorruptRecordError):
        return first  # alone the damaged entry is found


def read_plain(
    entry_log: EntryLog, first: int, last: int, max_bytes: int
) -> tuple[memoryview, list[EntryHeader]]:
    """Return entries from *first* to *last*, or fewer, back to back, and their headers.

    They end before an entry without records; none is returned when *first* is one.

    Args:
        max_bytes: Of entries; at least one is read.
    Raises:
        CorruptEntryError: One of the entries is damaged.
    """
    headers: list[EntryHeader] = []
    frames = entry_log.frames(first, max_bytes, last)[0]
    return frames[: _read_headers(frames, first, headers)], headers


def _read_headers(frames: memoryview, first: int, headers: list[EntryHeader]) -> int:
    """Read the headers of entries from *first* on that have records, up to a number of these.

    Returns:
        Their bytes.

    Raises:
        CorruptEntryError: Something else stands behind the entries in *headers*.
    """
    offset = records = 0
    while offset < len(frames):
        header = parse_header(frames, offset)
        index = first + len(headers)
        if header.index != index:
            raise CorruptEntryError(f"entry {header.index} stands where {index} should")
        records += header.record_count
        if header.kind != KIND_RECORDS or (headers and records > APPLIED_TOGETHER_RECORDS):
            break
        headers.append(header)
        offset += header.size
    return offset
