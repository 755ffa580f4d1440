"""Reads the log of a stopped broker from its segment files, touching nothing."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commitlog.entry import (
    ENTRY_HEADER_BYTES,
    EntryHeader,
    parse_header,
    verify_frame,
)
from commitlog.errors import CorruptEntryError, StoreError
from commitlog.record import BLANK_MAGIC

SEGMENT_NAME_DIGITS = 20
_BLANK = (BLANK_MAGIC & 0xFFFFFFFF).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file, mapped for reading."""

    start: int
    data: memoryview

    @property
    def end(self) -> int:
        """Absolute byte after the file."""
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry as it stands in a segment; *frame* is a view of the file."""

    header: EntryHeader
    frame: memoryview


class LogDamageError(StoreError):
    """The log cannot be followed beyond ``position``."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"at byte {position}: {why}")
        self.position = position


def open_segments(commit_log: Path) -> list[Segment]:
    """Return the segments of a log folder in order; they stay mapped while views live.

    Raises:
        LogDamageError: A segment between two others is missing.
    """
    segments: list[Segment] = []
    for path in sorted(commit_log.iterdir() if commit_log.is_dir() else ()):
        if len(path.name) != SEGMENT_NAME_DIGITS or not path.name.isdecimal():
            continue
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        segment = Segment(int(path.name), data)
        if segments and segments[-1].end != segment.start:
            raise LogDamageError(segments[-1].end, f"the segment before {path.name} is missing")
        segments.append(segment)
    return segments


def walk(segments: list[Segment]) -> Iterator[LogEntry]:
    """Yield the entries in order, each checked whole: CRCs, chain, index, position, time.

    The end is where a segment goes on with zeros.

    Raises:
        LogDamageError: Something else stands there, or an entry does not follow the one before.
    """
    last: EntryHeader | None = None
    for number, segment in enumerate(segments):
        at = 0
        while at < len(segment.data):
            rest = segment.data[at:]
            if rest[4:8] == _BLANK and int.from_bytes(rest[:4], "big") == len(rest):
                break
            if len(rest) < ENTRY_HEADER_BYTES and not any(rest):
                break
            if not any(rest[:ENTRY_HEADER_BYTES]):
                if number + 1 < len(segments) and any(segments[number + 1].data[:8]):
                    raise LogDamageError(segment.start + at, "zeros before the end of the log")
                return
            header, frame = _entry(segment, at, last)
            yield LogEntry(header, frame)
            last = header
            at += header.size


def _entry(segment: Segment, at: int, last: EntryHeader | None) -> tuple[EntryHeader, memoryview]:
    position = segment.start + at
    try:
        header = parse_header(segment.data, at)
        frame = segment.data[at : at + header.size]
        if last is not None:
            verify_frame(frame, header, last.chain)
        elif header.index == 1:
            verify_frame(frame, header, 0)
    except CorruptEntryError as error:
        raise LogDamageError(position, str(error)) from None
    if header.position != position:
        raise LogDamageError(
            position, f"entry {header.index} names {header.position} as its position"
        )
    if last is not None:
        if header.index != last.index + 1:
            raise LogDamageError(position, f"entry {header.index} follows entry {last.index}")
        if header.term < last.term:
            raise LogDamageError(position, f"entry {header.index} is of an older term")
        if header.store_time_ms < last.store_time_ms:
            raise LogDamageError(position, f"entry {header.index} is older than the one before")
    return header, frame


def equal_bytes(left: list[Segment], right: list[Segment], end: int) -> int | None:
    """Return the first byte before *end* in which two logs differ; None when they are equal."""
    starts = [max(side[0].start, 0) if side else 0 for side in (left, right)]
    at = max(starts)
    while at < end:
        a, b = _at(left, at, end), _at(right, at, end)
        size = min(len(a), len(b))
        if size == 0:
            return at
        if a[:size] != b[:size]:
            return at + _first_difference(a[:size], b[:size])
        at += size
    return None


_COMPARE_BYTES = 1 << 20
"""Compared at once: small enough to find the place, large enough to be quick."""


def _at(segments: list[Segment], position: int, end: int) -> memoryview:
    for segment in segments:
        if segment.start <= position < segment.end:
            stop = min(segment.end, end, position + _COMPARE_BYTES)
            return segment.data[position - segment.start : stop - segment.start]
    return memoryview(b"")


def _first_difference(left: memoryview, right: memoryview) -> int:
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
