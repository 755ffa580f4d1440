"""Pieces of work of an audit: one segment compared over all replicas, in any process and order.

A segment begins with an entry, so segments can be looked at by themselves, in any order and in
different processes; `dledger.spark_jobs.audit.compare` joins what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from dledger.commitlog.derive import derive
from dledger.commitlog.entry import EntryHeader
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError, NewerEntryError
from dledger.commitlog.record import decode_record
from dledger.commitlog.segment import BLANK_BYTES, encode_blank, segment_base
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.spark_jobs.audit.folder import (
    Before,
    ReplicaFolder,
    Side,
    Whole,
    choose,
    next_whole,
    whole_at,
)
from dledger.spark_jobs.audit.key_entries import ExpectedKeys, check_file, key_files
from dledger.spark_jobs.audit.segment_report import (
    ANCHOR,
    FINDINGS_MAX,
    MARK,
    Edge,
    Finding,
    SegmentReport,
    Suspect,
    SuspectKind,
)
from dledger.spark_jobs.audit.units import EntryUnits, QueueUnits
from dledger.state.state_record import TopicsChange, decode_change
from dledger.state.topics import TOPICS_QUEUE

# ---------------------------------------------------------------------------------- one segment


COMPARE_BYTES: Final = 1 << 20
"""Compared in one go when whole segments may be equal."""


class SegmentAudit:
    """Walks one segment of all replicas side by side.

    Args:
        base: Where the segment begins.
        stop: End of the entry that the newest commit mark names: what follows is not compared.
    """

    def __init__(self, folders: Sequence[ReplicaFolder], base: int, stop: int) -> None:
        self._base = base
        self._segment_bytes = folders[0].log_format.segment_bytes
        self._segment_end = base + self._segment_bytes
        self._stop = min(stop, self._segment_end)
        self._sides = [
            Side(folder, base, folder.segment(base), folder.anchor.position, folder.due)
            for folder in folders
            if folder.anchor.position < self._segment_end
        ]
        self._sides.sort(key=lambda side: -side.due)
        self._before: Before | None = None
        self._report = SegmentReport(base=base)
        self._queues = QueueUnits(self._sides, self._report)
        self._keys = ExpectedKeys(self._sides)
        self._units = EntryUnits(self._sides)

    def run(self) -> SegmentReport:
        """Return the report of this segment.

        Raises NewerEntryError: an entry is of a format that this version does not know.
        """
        report, sides = self._report, self._sides
        if not sides or not any(len(side.view) for side in sides):
            self._nobody(self._base, self._stop)
            return self._ended()
        start = max(self._base, min(side.first for side in sides))
        alike = _alike(sides, start, self._stop)
        at: int | None = start
        while at is not None and at < self._stop:
            whole = self._whole(at, alike)
            if whole is not None:
                self._take(whole, alike)
                at = whole.header.end_position
            elif self._take_blank(at):
                at = None
            else:
                at = self._skip(at)
        report.units = self._queues.finish()
        report.keys = len(self._keys)
        for finding in (*self._keys.compare(self._base, self._stop), *self._units.findings()):
            report.findings.append(finding)
        return self._ended()

    def _ended(self) -> SegmentReport:
        self._report.equal_ends = {
            side.name: (side.equal_end, side.equal_index)
            for side in self._sides
            if side.equal_end >= 0
        }
        return self._report

    def _whole(self, at: int, alike: bool) -> Whole | None:
        if alike:
            found = whole_at(self._sides[0], at, self._before)
            return None if found is None else Whole(found.header, found.frame, tuple(self._sides))
        candidates = [
            found
            for side in self._sides
            if side.first <= at and (found := whole_at(side, at, self._before)) is not None
        ]
        return choose(candidates) if candidates else None

    def _take(self, whole: Whole, alike: bool) -> None:
        header, report = whole.header, self._report
        edge = Edge(
            header.index,
            header.term,
            header.chain,
            header.store_time_ms,
            header.position,
            header.end_position,
            whole.holders[0].name,
        )
        report.first = report.first or edge
        report.last = edge
        report.entries += 1
        report.records += header.record_count
        report.alone += len(whole.holders) == 1
        for side in self._sides:
            self._check_begin(side, header)
            if alike or side in whole.holders:
                side.equal_end, side.equal_index = header.end_position, header.index
            elif side.first <= header.position:
                self._differs(side, whole)
            self._check_mark(side, header)
        self._before = Before(header.index, header.term, header.chain, header.store_time_ms)
        self._units.add(header)
        self._derive(whole)

    def _check_begin(self, side: Side, header: EntryHeader) -> None:
        """Compare a replica's own begin with the entry that stands before it, where known."""
        if side.first != header.position or header.index == side.folder.anchor.first_index:
            return
        self._report.findings.append(
            Finding(
                replica=side.name,
                kind=ANCHOR,
                file="raft/anchor",
                index=header.index,
                position=header.position,
                detail=f"names entry {side.folder.anchor.first_index} as the first one",
            )
        )

    def _check_mark(self, side: Side, header: EntryHeader) -> None:
        mark = side.folder.mark
        if mark is None or mark.index != header.index:
            return
        there = (header.term, header.position, header.chain, header.end_position)
        if there != (mark.term, mark.position, mark.chain, mark.end_position):
            self._report.findings.append(
                Finding(
                    replica=side.name,
                    kind=MARK,
                    file="raft/commit_mark",
                    index=mark.index,
                    position=header.position,
                    detail=f"chain {mark.chain:016x} in the mark, {header.chain:016x} in the log",
                )
            )

    def _differs(self, side: Side, whole: Whole) -> None:
        header = whole.header
        got = side.bytes_at(header.position, header.size)
        kind: SuspectKind = "damaged"
        if not any(got):
            kind = "zeros"
        elif whole_at(side, header.position, self._before) is not None:
            kind = "fork"
        byte, count = _first_difference(got, whole.frame)
        weight = sum(other.due >= header.end_position for other in whole.holders)
        self._suspect(
            Suspect(
                replica=side.name,
                kind=kind,
                position=header.position,
                end=header.end_position,
                index=header.index,
                byte=header.position + byte,
                count=count,
                tied=kind == "fork" and weight <= 1 and side.due >= header.end_position,
            )
        )

    def _suspect(self, suspect: Suspect) -> None:
        """Keep a suspect; a log that ends or goes another way is one, however long it is."""
        suspects = self._report.suspects
        for last in reversed(suspects[-len(self._sides) :]):
            follows = last.replica == suspect.replica and last.end == suspect.position
            # Behind another entry nothing stands where the other replicas have theirs.
            if follows and (last.kind == "fork" or last.kind == suspect.kind == "zeros"):
                last.end = suspect.end
                last.count += suspect.count
                last.entries += 1
                return
        if len(suspects) < FINDINGS_MAX:
            suspects.append(suspect)
        else:
            self._report.suspects_left += 1

    def _take_blank(self, at: int) -> bool:
        """Compare the blank that fills the segment from *at* on, if one stands there."""
        remaining = self._segment_end - at
        head = encode_blank(remaining)
        if self._stop < self._segment_end or remaining < BLANK_BYTES:
            return False
        if not any(side.bytes_at(at, BLANK_BYTES) == head for side in self._sides):
            return False
        expected = memoryview(head + bytes(remaining - len(head)))
        for side in self._sides:
            got = side.bytes_at(at, remaining)
            if got == expected:
                side.equal_end = self._segment_end
                continue
            byte, count = _first_difference(got, expected)
            self._suspect(
                Suspect(
                    replica=side.name,
                    kind="blank" if any(got) else "zeros",
                    position=at,
                    end=self._segment_end,
                    index=self._before.index if self._before else -1,
                    byte=at + byte,
                    count=count,
                )
            )
        return True

    def _skip(self, at: int) -> int | None:
        """No replica has a whole entry at *at*: report it, and return where the log can be
        followed."""
        known = self._units.at(at, self._before)
        end = known[0] if known is not None else next_whole(self._sides, at + 1)
        self._nobody(at, self._stop if end is None else end)
        if known is not None:
            self._before = known[1]
            return known[0]
        self._before = None
        return end

    def _nobody(self, at: int, end: int) -> None:
        self._keys.add_hole(at, end)
        for side in self._sides:
            if side.first > at:
                continue
            got = side.bytes_at(at, end - at)
            self._suspect(
                Suspect(
                    replica=side.name,
                    kind="damaged" if any(got) else "zeros",
                    position=at,
                    end=end,
                    index=-1 if self._before is None else self._before.index + 1,
                    byte=at,
                    count=end - at,
                    certain=False,
                )
            )

    def _derive(self, whole: Whole) -> None:
        header, frame = whole.header, whole.frame
        if not header.record_count:
            return
        try:
            derived = derive(frame, header)
        except (CorruptEntryError, CorruptRecordError) as error:
            self._report.findings.append(
                Finding(
                    replica="",
                    kind="record",
                    index=header.index,
                    position=header.position,
                    detail=f"the same on all replicas: {error}",
                )
            )
            return
        for topic, queue_id, where in derived.groups:
            self._queues.add(topic, queue_id, derived.queue_offset[where], derived.units[where])
            if topic == STATE_TOPIC and queue_id == TOPICS_QUEUE:
                self._note_deleted(frame, header, derived.phy_offset[where].tolist())
        if len(derived.key_hashes):
            self._keys.add(derived.key_hashes, derived.key_phy_offsets)

    def _note_deleted(self, frame: memoryview, header: EntryHeader, places: list[int]) -> None:
        for place in places:
            record = decode_record(frame, place - header.position, check_crc=False)
            change = decode_change(TOPICS_QUEUE, record.body)
            if isinstance(change, TopicsChange):
                self._report.deleted += [(topic, place) for topic in change.delete]


def _alike(sides: Sequence[Side], start: int, stop: int) -> bool:
    """Whether all replicas hold this stretch with the same bytes: then one is looked at for all."""
    first = sides[0]
    if any(side.first > start or len(side.view) < stop - side.base for side in sides):
        return False
    for at in range(start, stop, COMPARE_BYTES):
        size = min(COMPARE_BYTES, stop - at)
        left = np.frombuffer(first.bytes_at(at, size), np.uint8)
        for side in sides[1:]:
            if not np.array_equal(left, np.frombuffer(side.bytes_at(at, size), np.uint8)):
                return False
    return True


def _first_difference(got: memoryview, expected: memoryview) -> tuple[int, int]:
    """Return the place of the first difference, and how many bytes differ."""
    size = min(len(got), len(expected))
    differs = np.flatnonzero(
        np.frombuffer(got[:size], np.uint8) != np.frombuffer(expected[:size], np.uint8)
    )
    missing = len(expected) - size
    return (int(differs[0]) if len(differs) else size), len(differs) + missing


# ---------------------------------------------------------------------------------- pieces of work


class Work(msgspec.Struct, frozen=True, order=True):
    """One piece of work: a segment of all replicas, or an index file of one."""

    base: int = -1
    replica: int = -1
    file: str = ""


class Done(msgspec.Struct):
    """The result of a piece of work."""

    segment: SegmentReport | None = None
    findings: list[Finding] = []
    problem: str = ""


def commit_position(folders: Sequence[ReplicaFolder]) -> int:
    """Return the end of the newest entry that any replica knows to be committed."""
    return max(folder.due for folder in folders)


def why_not(folders: Sequence[ReplicaFolder]) -> str:
    """Return why these folders cannot be compared; empty when they can."""
    if len({folder.log_format.segment_bytes for folder in folders}) > 1:
        return "the folders have segments of different sizes"
    if not commit_position(folders):
        return "no folder has a commit mark: nothing is known to be committed"
    return ""


def plan(folders: Sequence[ReplicaFolder]) -> list[Work]:
    """Return the pieces of work, in the order of the log."""
    size = folders[0].log_format.segment_bytes
    begin = min(segment_base(folder.anchor.position, size) for folder in folders)
    works = [Work(base=base) for base in range(begin, commit_position(folders), size)]
    for number, folder in enumerate(folders):
        works += [Work(replica=number, file=folder.relative(path)) for path in key_files(folder)]
    return works


def do(folders: Sequence[ReplicaFolder], work: Work) -> Done:
    """Do one piece of work; nothing else has to be done before."""
    try:
        if work.base >= 0:
            return Done(SegmentAudit(folders, work.base, commit_position(folders)).run())
        folder = folders[work.replica]
        path = folder.root / work.file
        return Done(findings=list(check_file(folder, path)))
    except NewerEntryError as error:
        return Done(problem=f"{error}: audit with the newer version")
    finally:
        for folder in folders:
            folder.forget()
