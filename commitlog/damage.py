"""How entries are found whose bytes went bad after they were written.

The entry index has position, size, term and chain of every entry, apart from the segments; so a
frame that does not fit its checksums or its unit is recognized wherever it stands. Units that are
damaged themselves are made from the frames, see `LogRepair.restore_unit`.

Spec: docs/reference/formats.md, section 10.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from commitlog.entry import ENTRY_HEADER_BYTES, parse_header, verify_frame
from commitlog.entry_index import Unit
from commitlog.errors import CorruptEntryError
from commitlog.log_reader import LogReader


@dataclass(slots=True)
class Checked:
    """What a check has covered: entries before *next_index*, and which of them are suspect."""

    next_index: int
    size_bytes: int
    suspects: list[int]


def check_entries(entry_log: LogReader, first: int, last: int, max_bytes: int) -> Checked:
    """Compare entries *first* … *last* with their checksums, their units and each other.

    Blocking; may run in a worker thread beside the thread that owns the log. What it suspects is
    to be checked again by that one.

    Args:
        max_bytes: Stop after this number of bytes; at least one entry is checked.
    """
    checked = Checked(first, 0, [])
    chain = entry_log.stored_chain(first - 1)
    for index in range(first, last + 1):
        unit = entry_log.stored_unit(index)
        if unit is None or not _is_whole(entry_log.bytes_at(unit[0], unit[3]), index, unit, chain):
            checked.suspects.append(index)
        chain = None if unit is None else unit[2]
        checked.size_bytes += ENTRY_HEADER_BYTES if unit is None else unit[3]
        checked.next_index = index + 1
        if checked.size_bytes >= max_bytes:
            break
    return checked


def _is_whole(frame: bytes, index: int, unit: Unit, prev_chain: int | None) -> bool:
    try:
        header = parse_header(frame)
        found = (header.position, header.term, header.chain, header.size)
        if header.index != index or found != unit:
            return False
        if prev_chain is not None:
            verify_frame(frame, header, prev_chain)
    except CorruptEntryError:
        return False
    return (
        zlib.crc32(memoryview(frame)[ENTRY_HEADER_BYTES:]) == header.body_crc
        if prev_chain is None
        else True
    )
