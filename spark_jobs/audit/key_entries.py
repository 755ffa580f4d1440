"""Key index files of each replica: what is in them by itself, and against one segment.

Entries of a file stand in the order of the log, so those of a segment are a stretch of it. They are
found by position and not by number, so that one wrong entry shifts no other.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger.commitlog.key_index import (
    ENTRIES_PER_FILE,
    ENTRY_BYTES,
    ENTRY_DTYPE,
    HEADER_BYTES,
    MAX_TIME_DIFF_S,
    SLOT_BYTES,
    SLOTS_PER_FILE,
)
from dledger.spark_jobs.audit.folder import ReplicaFolder, Side
from dledger.spark_jobs.audit.segment_report import KEY_INDEX, Finding

ENTRIES_A_SLOT: Final = 4
"""RocketMQ's ratio: it gives the shape of a file from its size."""
NAMED_MAX: Final = 20
"""Wrong entries named per file and segment; the count goes on."""

_NAME_LENGTH: Final = 17
_HEADER: Final = struct.Struct(">qqqqii")
_Entries = npt.NDArray[Any]


class Header(NamedTuple):
    """An index file's header, as in docs/reference/formats.md."""

    begin_ms: int
    end_ms: int
    begin_phy: int
    end_phy: int
    used_slots: int
    next_entry: int


@dataclass(frozen=True, slots=True)
class KeyFile:
    """One index file, mapped; *entries*: those its header counts, the first one being number 1."""

    folder: ReplicaFolder
    path: Path
    header: Header
    slots: int
    table: npt.NDArray[np.int32]
    entries: _Entries

    @property
    def name(self) -> str:
        """Its name below the folder."""
        return self.folder.relative(self.path)

    def byte_of(self, number: int) -> int:
        """Return where entry *number* stands in the file."""
        return HEADER_BYTES + self.slots * SLOT_BYTES + number * ENTRY_BYTES

    def finding(self, byte: int, detail: str, *, count: int = 1, position: int = -1) -> Finding:
        """Return a finding in this file."""
        return Finding(
            replica=self.folder.name,
            kind=KEY_INDEX,
            file=self.name,
            byte=byte,
            position=position,
            count=count,
            detail=detail,
        )


def shape_of(size: int) -> tuple[int, int] | None:
    """Return slots and entry numbers of an index file of *size* bytes; None: not known."""
    if size == HEADER_BYTES + SLOTS_PER_FILE * SLOT_BYTES + ENTRIES_PER_FILE * ENTRY_BYTES:
        return SLOTS_PER_FILE, ENTRIES_PER_FILE
    slots, rest = divmod(size - HEADER_BYTES, SLOT_BYTES + ENTRIES_A_SLOT * ENTRY_BYTES)
    return (slots, slots * ENTRIES_A_SLOT) if slots > 0 and rest == 0 else None


def key_files(folder: ReplicaFolder) -> list[Path]:
    """Return the index files of a replica, oldest first; those without a byte do not count."""
    root = Path(folder.paths.index)
    return [
        path
        for path in sorted(root.iterdir() if root.is_dir() else ())
        if len(path.name) == _NAME_LENGTH and path.name.isdecimal() and path.stat().st_size
    ]


def open_key_file(folder: ReplicaFolder, path: Path) -> KeyFile | None:
    """Return an index file; None when nothing was flushed to it or its shape is not known."""
    data = folder.map(path)
    shape = shape_of(len(data))
    if shape is None:
        return None
    slots, capacity = shape
    header = Header(*_HEADER.unpack(data[:HEADER_BYTES]))
    counted = min(max(header.next_entry, 0), capacity)
    if not counted:
        return None
    at = HEADER_BYTES + slots * SLOT_BYTES
    table = np.frombuffer(data[HEADER_BYTES:at], np.dtype(">i4"))
    entries = np.frombuffer(data[at + ENTRY_BYTES : at + counted * ENTRY_BYTES], ENTRY_DTYPE)
    return KeyFile(folder, path, header, slots, table, entries)


def check_file(file: KeyFile, *, slots_promised: bool) -> Iterator[Finding]:
    """Yield where a file contradicts itself: header, chains, slots."""
    header, entries = file.header, file.entries
    if header.next_entry != len(entries) + 1:
        yield file.finding(36, f"counts {header.next_entry} entries, more than it can hold")
        return
    if not len(entries):
        return
    hashes = entries["key_hash"].astype(np.int64)
    phys = entries["phy_offset"].astype(np.int64)
    slots = hashes % file.slots
    numbers = np.arange(1, len(entries) + 1)
    order = np.argsort(slots, kind="stable")
    previous = np.zeros(len(entries), np.int64)
    same = slots[order][1:] == slots[order][:-1]
    previous[order[1:]] = np.where(same, numbers[order][:-1], 0)
    for row in np.flatnonzero(np.diff(phys) < 0)[:NAMED_MAX].tolist():
        # The one that fits neither neighbour is wrong: a high one before it, or a low one.
        low_one = row == 0 or phys[row + 1] < phys[row - 1]
        number = row + 2 if low_one else row + 1
        yield file.finding(
            file.byte_of(number) + 4, f"entry {number} points out of the order of the log"
        )
    wrong = np.flatnonzero(entries["previous"] != previous)
    for row in wrong[:NAMED_MAX].tolist():
        yield file.finding(
            file.byte_of(row + 1) + 16,
            f"entry {row + 1} follows entry {int(entries['previous'][row])} of its slot, "
            f"not {int(previous[row])}",
            count=len(wrong),
        )
    for at, name, found, expected in (
        (16, "beginPhyOffset", header.begin_phy, int(phys[0])),
        (24, "endPhyOffset", header.end_phy, int(phys[-1])),
        (32, "hashSlotCount", header.used_slots, len(np.unique(slots))),
    ):
        if found != expected:
            yield file.finding(at, f"{name} is {found}, the entries say {expected}")
    if not slots_promised:
        return
    table = np.zeros(file.slots, np.int64)
    np.maximum.at(table, slots, numbers)
    wrong = np.flatnonzero(table != file.table)
    for slot in wrong[:NAMED_MAX].tolist():
        yield file.finding(
            HEADER_BYTES + slot * SLOT_BYTES,
            f"slot {slot} names entry {int(file.table[slot])}, its newest is {int(table[slot])}",
            count=len(wrong),
        )


class ExpectedKeys:
    """The keys of one segment, in log order."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._hashes: list[npt.NDArray[np.int32]] = []
        self._phys: list[npt.NDArray[np.int64]] = []
        self._times: list[npt.NDArray[np.int64]] = []
        self._holes: list[tuple[int, int]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        hashes: npt.NDArray[np.int32],
        phys: npt.NDArray[np.int64],
        times: npt.NDArray[np.int64],
    ) -> None:
        """Take in the keys of the next entry."""
        self._hashes.append(hashes)
        self._phys.append(phys)
        self._times.append(times)
        self._count += len(hashes)

    def add_hole(self, begin: int, end: int) -> None:
        """Between these bytes the keys of the log are not known."""
        self._holes.append((begin, end))

    def compare(self, begin: int, stop: int) -> Iterator[Finding]:
        """Yield what is wrong in each replica's files about the log between *begin* and *stop*."""
        empty = np.empty(0, np.int64)
        hashes = np.concatenate([*self._hashes, empty]).astype(np.int64)
        phys = np.concatenate([*self._phys, empty])
        times = np.concatenate([*self._times, empty])
        for side in self._sides:
            low = max(begin, side.first)
            rows = slice(*np.searchsorted(phys, [low, min(stop, side.due)]).tolist())
            expected = _Keys(hashes[rows], phys[rows], times[rows])
            yield from _compare_side(side.folder, expected, low, min(stop, side.due), self._holes)


class _Keys(NamedTuple):
    hashes: npt.NDArray[np.int64]
    phys: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]


def _compare_side(
    folder: ReplicaFolder,
    expected: _Keys,
    low: int,
    high: int,
    holes: Sequence[tuple[int, int]],
) -> Iterator[Finding]:
    paths = key_files(folder)
    if any(shape_of(len(folder.map(path))) is None for path in paths):
        return  # reported once, for the folder
    files = [f for path in paths if (f := open_key_file(folder, path)) is not None]
    if not folder.derived_promised:
        # What was not flushed yet is put again at the next start.
        last = files[-1].header.end_phy if files else -1
        count = int(np.searchsorted(expected.phys, last, side="right"))
        expected = _Keys(*(column[:count] for column in expected))
        high = min(high, last + 1)
    parts: list[tuple[KeyFile, npt.NDArray[np.int64]]] = []
    for file in files:
        phys = file.entries["phy_offset"]
        within = (phys >= low) & (phys < high)
        for begin, end in holes:
            within &= (phys < begin) | (phys >= end)
        rows = np.flatnonzero(within)
        if len(rows):
            parts.append((file, rows))
    found = np.concatenate([f.entries[rows] for f, rows in parts] or [np.empty(0, ENTRY_DTYPE)])
    if len(found) == len(expected.phys) and (
        np.array_equal(found["key_hash"], expected.hashes)
        and np.array_equal(found["phy_offset"], expected.phys)
    ):
        begin = 0
        for file, rows in parts:
            yield from _compare_times(file, rows, expected.times[begin : begin + len(rows)])
            begin += len(rows)
        return
    yield from _differences(folder, expected, parts)


def _compare_times(
    file: KeyFile, rows: npt.NDArray[np.int64], times: npt.NDArray[np.int64]
) -> Iterator[Finding]:
    begin_ms = file.header.begin_ms
    if rows[0] == 0 and begin_ms != int(times[0]):
        yield file.finding(0, f"beginTimestamp is {begin_ms}, the log has {int(times[0])}")
        begin_ms = int(times[0])
    expected = np.clip((times - begin_ms) // 1000, 0, MAX_TIME_DIFF_S)
    stored = file.entries["time_diff_s"][rows]
    wrong = np.flatnonzero(stored != expected)
    for row in wrong[:NAMED_MAX].tolist():
        number = int(rows[row]) + 1
        yield file.finding(
            file.byte_of(number) + 12,
            f"entry {number} has timeDiff {int(stored[row])}, the log has {int(expected[row])}",
            count=len(wrong),
        )
    if rows[-1] == len(file.entries) - 1:
        end_ms = int(times[-1])
        # A file that was cut back knows its end in whole seconds only.
        rounded = begin_ms + (end_ms - begin_ms) // 1000 * 1000
        if file.header.end_ms not in (end_ms, rounded):
            yield file.finding(8, f"endTimestamp is {file.header.end_ms}, the log has {end_ms}")


def _differences(
    folder: ReplicaFolder,
    expected: _Keys,
    parts: Sequence[tuple[KeyFile, npt.NDArray[np.int64]]],
) -> Iterator[Finding]:
    wanted = Counter(zip(expected.phys.tolist(), expected.hashes.tolist(), strict=True))
    strangers: list[Finding] = []
    for file, rows in parts:
        for row in rows.tolist():
            phy, key_hash = int(file.entries[row]["phy_offset"]), int(file.entries[row]["key_hash"])
            if wanted[phy, key_hash] > 0:
                wanted[phy, key_hash] -= 1
                continue
            strangers.append(
                file.finding(
                    file.byte_of(row + 1),
                    f"entry {row + 1} points with hash {key_hash} at byte {phy}, "
                    "where the log has no such key",
                    position=phy,
                )
            )
    missing = sorted(wanted.elements())
    yield from strangers[:NAMED_MAX]
    for phy, key_hash in missing[:NAMED_MAX]:
        yield Finding(
            replica=folder.name,
            kind=KEY_INDEX,
            file="index",
            position=phy,
            count=len(missing),
            detail=f"no entry for hash {key_hash} of the record at byte {phy}",
        )
