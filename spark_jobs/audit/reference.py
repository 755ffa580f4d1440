"""Which bytes stand at a place of the log: one whole entry, distinguished from what is damaged.

All replicas have the same entries at the same positions, so they are looked at side by side. An
entry is whole if it fits its checksums and continues the chain; where replicas hold different
whole entries, that one counts which replicas know to be committed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commitlog.entry import (
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    KIND_RECORDS,
    EntryHeader,
    parse_header,
    record_sizes,
    verify_frame,
)
from commitlog.errors import CorruptEntryError, NewerEntryError
from commitlog.segment import BLANK_BYTES
from spark_jobs.audit.folder import ReplicaFolder

MAGIC: Final = ENTRY_MAGIC.to_bytes(4, "big")


@dataclass(slots=True)
class Side:
    """One replica within one segment.

    Attributes:
        first: Where its log begins.
        due: Up to where it must have everything.
        equal_end, equal_index: Up to where, and up to which entry, it was last found equal to
            what stands there; -1: never.
    """

    folder: ReplicaFolder
    base: int
    view: memoryview
    first: int
    due: int
    equal_end: int = -1
    equal_index: int = -1

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.folder.name

    def bytes_at(self, position: int, size: int) -> memoryview:
        """Return bytes of the segment; fewer, or none, where the file is missing."""
        at = position - self.base
        return self.view[at : at + size]


@dataclass(frozen=True, slots=True)
class Before:
    """The entry before a place, as far as it is known: at the begin of a segment it is not."""

    index: int
    term: int
    chain: int
    store_time_ms: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole entry and the replicas that hold it."""

    header: EntryHeader
    frame: memoryview
    holders: tuple[Side, ...]


def whole_at(side: Side, position: int, before: Before | None) -> Whole | None:
    """Return the entry that stands at *position* of one replica, if it is whole.

    Raises:
        NewerEntryError: It is whole, and of a format that this version does not know.
    """
    try:
        header = parse_header(side.view, position - side.base)
        if header.position != position or header.end_position + BLANK_BYTES > side.base + len(
            side.view
        ):
            return None
        frame = side.bytes_at(position, header.size)
        if before is not None:
            if (
                header.index != before.index + 1
                or header.term < before.term
                or header.store_time_ms < before.store_time_ms
            ):
                return None
            verify_frame(frame, header, before.chain)
        elif not fits_itself(frame, header):
            return None
    except NewerEntryError:
        raise
    except CorruptEntryError:
        return None
    return Whole(header, frame, (side,))


def fits_itself(frame: memoryview, header: EntryHeader) -> bool:
    """Whether a frame fits its own checksums; what stands before it is not known."""
    if zlib.crc32(frame[ENTRY_HEADER_BYTES:]) != header.body_crc:
        return False
    if header.kind != KIND_RECORDS:
        return True
    return int(record_sizes(frame, header).sum(dtype=np.int64)) == header.size - header.body_start


def choose(found: Sequence[Whole]) -> Whole:
    """Return the entry that counts: most replicas that must have it, then most, then most known."""
    groups: list[Whole] = []
    for one in found:
        for number, group in enumerate(groups):
            if group.frame == one.frame:
                groups[number] = Whole(group.header, group.frame, (*group.holders, *one.holders))
                break
        else:
            groups.append(one)
    return max(groups, key=_weight)


def _weight(group: Whole) -> tuple[int, int, int]:
    end = group.header.end_position
    return (
        sum(side.due >= end for side in group.holders),
        len(group.holders),
        max(side.due for side in group.holders),
    )


def next_whole(sides: Sequence[Side], position: int) -> int | None:
    """Return where the next entry that fits itself begins at or after *position*, on any side."""
    found: list[int] = []
    for side in sides:
        data = bytes(side.view[position - side.base :]) if position >= side.base else b""
        at = data.find(MAGIC)
        while at >= 0:
            if whole_at(side, position + at, None) is not None:
                found.append(position + at)
                break
            at = data.find(MAGIC, at + 1)
    return min(found, default=None)
