"""Derived files of each replica against the entries of one segment: entry index, consume queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.commitlog.entry import EntryHeader
from dledger.commitlog.entry_index import UNIT_BYTES as INDEX_UNIT_BYTES
from dledger.commitlog.entry_index import decode_unit, encode_unit
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.queue_unit import FILLER_SIZE, UNIT_BYTES, UNIT_DTYPE, Units
from dledger.spark_jobs.audit.folder import Before, ReplicaFolder, Side
from dledger.spark_jobs.audit.segment_report import (
    ENTRY_INDEX,
    FINDINGS_MAX,
    Finding,
    QueueMismatch,
    QueueRun,
    SegmentReport,
)

UNITS_AT_ONCE: Final = 50_000
"""Units of one queue gathered before they are compared: bounds memory on long logs."""

_FIELDS: Final = ("phy_offset", "size", "tags_code")
_FIELD_BYTES: Final = {name: UNIT_DTYPE.fields[name][1] for name in _FIELDS}  # type: ignore[index]


class QueueUnits:
    """Gathers units and compares them queue by queue; at most `UNITS_AT_ONCE` wait."""

    def __init__(self, sides: Sequence[Side], report: SegmentReport) -> None:
        self._sides = sides
        self._report = report
        self._open: dict[tuple[str, int], QueueRun] = {}
        self._waiting: dict[tuple[str, int], list[Units]] = {}
        self._count = 0

    def add(self, topic: str, queue_id: int, offsets: npt.NDArray[np.int64], units: Units) -> None:
        """Take in the units of the next entry."""
        breaks = [0, *(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(offsets)]
        for begin, end in pairwise(breaks):
            self._add(topic, queue_id, int(offsets[begin]), units[begin:end])

    def _add(self, topic: str, queue_id: int, first: int, units: Units) -> None:
        key = (topic, queue_id)
        run = self._open.get(key)
        if run is None or run.end != first:
            self._compare(key)
            run = QueueRun(topic, queue_id, first, first, int(units["phy_offset"][0]))
            self._open[key] = run
            self._report.runs.append(run)
        run.end += len(units)
        self._count += len(units)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(units)
        if sum(map(len, waiting)) >= UNITS_AT_ONCE:
            self._compare(key)

    def finish(self) -> int:
        """Compare what is left; return how many units there were."""
        for key in list(self._waiting):
            self._compare(key)
        return self._count

    def _compare(self, key: tuple[str, int]) -> None:
        waiting = self._waiting.pop(key, [])
        if not waiting:
            return
        expected = np.concatenate(waiting)
        first = self._open[key].end - len(expected)
        positions = expected["phy_offset"].astype(np.int64)
        for side in self._sides:
            low = int(np.searchsorted(positions, side.first))
            high = int(np.searchsorted(positions, side.due))
            if low < high:
                self._compare_side(side.folder, key, first + low, expected[low:high])

    def _compare_side(
        self, folder: ReplicaFolder, key: tuple[str, int], first: int, expected: Units
    ) -> None:
        topic, queue_id = key
        found = np.concatenate(
            [part for _, _, part in stored_units(folder, topic, queue_id, first, len(expected))]
        )
        missing = (found["size"] == 0) | (found["size"] == FILLER_SIZE)
        wrong = found != expected
        if topic == SCHEDULE_TOPIC:
            # There it holds a delivery time, which follows from the broker's delay levels.
            wrong = (found["phy_offset"] != expected["phy_offset"]) | (
                found["size"] != expected["size"]
            )
        # A unit of zeros was never written; anything else that differs was.
        gone = missing & (found["phy_offset"] == 0) & (found["tags_code"] == 0)
        for stretch in _stretches(wrong, gone):
            if len(self._report.mismatches) >= FINDINGS_MAX:
                self._report.mismatches_left += 1
                continue
            begin = stretch.start
            offset = first + begin
            path, byte = place_of(folder, topic, queue_id, offset)
            within, field = _first_field(found[begin], expected[begin])
            self._report.mismatches.append(
                QueueMismatch(
                    replica=folder.name,
                    topic=topic,
                    queue_id=queue_id,
                    first=offset,
                    count=stretch.stop - begin,
                    position=int(expected["phy_offset"][stretch.stop - 1]),
                    file=folder.relative(path),
                    byte=byte + within,
                    missing=bool(gone[begin]),
                    detail=f"{topic} queue {queue_id} offset {offset}: "
                    + (
                        "the unit is missing"
                        if gone[begin]
                        else f"{field} is {found[begin][field]}, the log has "
                        f"{expected[begin][field]}"
                    ),
                )
            )


def _stretches(wrong: npt.NDArray[np.bool_], gone: npt.NDArray[np.bool_]) -> Iterator[slice]:
    """Yield stretches of units that are wrong in one way: missing, or something else."""
    kind = wrong.astype(np.int8) * (1 + gone.astype(np.int8))
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    for begin, end in pairwise(edges):
        if kind[begin]:
            yield slice(begin, end)


def _first_field(found: Any, expected: Any) -> tuple[int, str]:
    # Joining arrays turned them into this machine's byte order.
    have, want = (np.array(unit, UNIT_DTYPE).tobytes() for unit in (found, expected))
    within = next(i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b)
    field = next(name for name in reversed(_FIELDS) if _FIELD_BYTES[name] <= within)
    return within, field


def queue_files(folder: ReplicaFolder, topic: str, queue_id: int) -> list[tuple[int, Path]]:
    """Return the files of a queue with the byte of the queue they begin at."""
    return list(folder.numbered(Path(folder.paths.consume_queue(topic, queue_id))))


def stored_units(
    folder: ReplicaFolder, topic: str, queue_id: int, first: int, count: int
) -> list[tuple[Path | None, int, Units]]:
    """Return what the files hold of *count* units from *first* on; zeros where there is none."""
    parts: list[tuple[Path | None, int, Units]] = []
    at, end = first * UNIT_BYTES, (first + count) * UNIT_BYTES
    for start, path in queue_files(folder, topic, queue_id):
        data = folder.map(path)
        high = min(end, start + len(data) - len(data) % UNIT_BYTES)
        if high <= at or start >= end:
            continue
        if start > at:
            parts.append((None, at, np.zeros((start - at) // UNIT_BYTES, UNIT_DTYPE)))
            at = start
        parts.append((path, at, np.frombuffer(data[at - start : high - start], UNIT_DTYPE)))
        at = high
    if at < end:
        parts.append((None, at, np.zeros((end - at) // UNIT_BYTES, UNIT_DTYPE)))
    return _with_shared(folder, topic, queue_id, parts)


def _with_shared(
    folder: ReplicaFolder,
    topic: str,
    queue_id: int,
    parts: list[tuple[Path | None, int, Units]],
) -> list[tuple[Path | None, int, Units]]:
    """Put the units that stand in the shared file over what files of the queue have there."""
    tail = folder.shared_tails.get(topic, {}).get(queue_id)
    if tail is None:
        return parts
    mixed: list[tuple[Path | None, int, Units]] = []
    for path, byte, units in parts:
        first = byte // UNIT_BYTES
        shared = np.frombuffer(tail.within(first, first + len(units)), UNIT_DTYPE)
        at = max(tail.first - first, 0) if len(shared) else len(units)
        pieces = (
            (path, 0, units[:at]),
            (Path(folder.paths.shared_units), at, shared),
            (path, at + len(shared), units[at + len(shared) :]),
        )
        mixed += [(place, byte + n * UNIT_BYTES, part) for place, n, part in pieces if len(part)]
    return mixed


def place_of(folder: ReplicaFolder, topic: str, queue_id: int, offset: int) -> tuple[Path, int]:
    """Return the file in which a unit stands, or should, and its byte there."""
    byte = offset * UNIT_BYTES
    for start, path in queue_files(folder, topic, queue_id):
        if start <= byte < start + len(folder.map(path)):
            return path, byte - start
    return Path(folder.paths.consume_queue(topic, queue_id)), -1


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
            if first + len(units) // INDEX_UNIT_BYTES == header.index:
                units += unit
                return
        self._stretches.append((header.index, bytearray(unit)))

    def at(self, position: int, before: Before | None) -> tuple[int, Before] | None:
        """Return end and facts of the entry at *position* as an index file has them."""
        if before is None:
            return None
        index = before.index + 1
        for side in self._sides:
            _, found = next(iter(_stored(side.folder, index, 1)))
            unit = decode_unit(index, memoryview(found)) if len(found) == INDEX_UNIT_BYTES else None
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
                count = min(mark.index + 1 - low, first + len(units) // INDEX_UNIT_BYTES - low)
                if count <= 0:
                    continue
                at = (low - first) * INDEX_UNIT_BYTES
                expected = units[at : at + count * INDEX_UNIT_BYTES]
                yield from _differences(folder, low, expected, promised)


def _differences(
    folder: ReplicaFolder, first: int, expected: bytearray, promised: int
) -> Iterator[Finding]:
    for path, found in _stored(folder, first, len(expected) // INDEX_UNIT_BYTES):
        want = np.frombuffer(expected[: len(found)], np.uint8).reshape(-1, INDEX_UNIT_BYTES)
        have = np.frombuffer(found, np.uint8).reshape(-1, INDEX_UNIT_BYTES)
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
                byte=index % per_file * INDEX_UNIT_BYTES + byte,
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
        at = (first - base) * INDEX_UNIT_BYTES
        found = bytes(folder.map(path)[at : at + part * INDEX_UNIT_BYTES])
        yield path, found + bytes(part * INDEX_UNIT_BYTES - len(found))
        first += part
        count -= part
