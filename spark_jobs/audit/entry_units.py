"""The entry index of each replica against the entries of one segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from commitlog.entry import EntryHeader
from commitlog.entry_index import UNIT_BYTES, decode_unit, encode_unit
from spark_jobs.audit.finding import ENTRY_INDEX, Finding
from spark_jobs.audit.folder import ReplicaFolder
from spark_jobs.audit.reference import Before, Side


class EntryUnits:
    """Gathers the units that follow from the log; compares them with the files of every side."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._stretches: list[tuple[int, bytearray]] = []

    def add(self, header: EntryHeader) -> None:
        """Take in the next whole entry."""
        unit = encode_unit(header.index, header.position, header.term, header.chain, header.size)
        if self._stretches:
            first, units = self._stretches[-1]
            if first + len(units) // UNIT_BYTES == header.index:
                units += unit
                return
        self._stretches.append((header.index, bytearray(unit)))

    def at(self, position: int, before: Before | None) -> tuple[int, Before] | None:
        """Return end and facts of the entry at *position* as an index file tells them."""
        if before is None:
            return None
        index = before.index + 1
        for side in self._sides:
            _, found = next(iter(_stored(side.folder, index, 1)))
            unit = decode_unit(index, memoryview(found)) if len(found) == UNIT_BYTES else None
            if unit is not None and unit[0] == position:
                facts = Before(index, unit[1], unit[2], before.store_time_ms)
                return position + unit[3], facts
        return None

    def findings(self) -> Iterator[Finding]:
        """Yield the units that differ, of each replica up to its own commit mark."""
        for side in self._sides:
            folder = side.folder
            mark, extent = folder.mark, folder.extent
            if mark is None:
                continue
            durable = 0 if extent is None else extent.indexed.index
            promised = mark.index if folder.derived_promised else durable
            for first, units in self._stretches:
                low = max(first, folder.anchor.first_index)
                count = min(mark.index + 1 - low, first + len(units) // UNIT_BYTES - low)
                if count <= 0:
                    continue
                at = (low - first) * UNIT_BYTES
                expected = units[at : at + count * UNIT_BYTES]
                yield from _differences(folder, low, expected, promised)


def _differences(
    folder: ReplicaFolder, first: int, expected: bytearray, promised: int
) -> Iterator[Finding]:
    for path, found in _stored(folder, first, len(expected) // UNIT_BYTES):
        want = np.frombuffer(expected[: len(found)], np.uint8).reshape(-1, UNIT_BYTES)
        have = np.frombuffer(found, np.uint8).reshape(-1, UNIT_BYTES)
        rows = np.flatnonzero((want != have).any(axis=1))
        for row in rows.tolist():
            index = first + row
            if not have[row].any() and index > promised:
                continue
            byte = int(np.flatnonzero(want[row] != have[row])[0])
            per_file = folder.log_format.index_units_per_file
            yield Finding(
                replica=folder.name,
                kind=ENTRY_INDEX,
                file=folder.relative(path),
                byte=index % per_file * UNIT_BYTES + byte,
                index=index,
                detail="the unit is missing" if not have[row].any() else "not the entry's unit",
            )
        first += len(have)
        expected = expected[len(found) :]


def _stored(folder: ReplicaFolder, first: int, count: int) -> Iterator[tuple[Path, bytes]]:
    """Yield what stands in the files for *count* units from *first* on; zeros where none is."""
    per_file = folder.log_format.index_units_per_file
    while count > 0:
        base = first - first % per_file
        part = min(count, base + per_file - first)
        path = Path(folder.paths.entry_index_file(base))
        at = (first - base) * UNIT_BYTES
        found = bytes(folder.map(path)[at : at + part * UNIT_BYTES])
        yield path, found + bytes(part * UNIT_BYTES - len(found))
        first += part
        count -= part
