"""What one replica holds behind the last place at which it was compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commitlog.segment import ZERO_CHUNK_BYTES, encode_blank, segment_base
from spark_jobs.audit.folder import ReplicaFolder
from spark_jobs.audit.reference import Before, Side, whole_at


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of one replica's log.

    Attributes:
        last_index, end_position: Of its last whole entry.
        rest: The first byte behind it that is not zero, counted in the log; -1: all are.
    """

    last_index: int
    end_position: int
    rest: int


def tail_of(folder: ReplicaFolder, index: int, position: int) -> Tail:
    """Follow a log from the end of entry *index* at *position* on, by its own checksums.

    Raises:
        NewerEntryError: An entry is of a format that this version does not know.
    """
    size = folder.log_format.segment_bytes
    before: Before | None = None
    end = position
    while True:
        base = segment_base(position, size)
        side = Side(folder, base, folder.segment(base), folder.anchor.position, folder.due)
        found = whole_at(side, position, before) if len(side.view) else None
        if found is not None and found.header.index == index + 1:
            header = found.header
            before = Before(header.index, header.term, header.chain, header.store_time_ms)
            index, end = header.index, header.end_position
            position = end
        elif position > base and _is_blank(side, position, size):
            position = base + size
        else:
            return Tail(index, end, _rest(folder, position))


def _is_blank(side: Side, position: int, segment_bytes: int) -> bool:
    remaining = side.base + segment_bytes - position
    return side.bytes_at(position, 8) == encode_blank(remaining)


def _rest(folder: ReplicaFolder, position: int) -> int:
    """Return the first byte that is not zero in the segment at *position*."""
    size = folder.log_format.segment_bytes
    base = segment_base(position, size)
    view = folder.segment(base)
    for at in range(position - base, len(view), ZERO_CHUNK_BYTES):
        written = np.flatnonzero(np.frombuffer(view[at : at + ZERO_CHUNK_BYTES], np.uint8))
        if len(written):
            return base + at + int(written[0])
    return -1
