"""``dledger log``: check the files of a stopped broker. Changes nothing."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dledger.commitlog.derive import derive
from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    EntryHeader,
    parse_header,
    record_sizes,
    verify_frame,
)
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    CorruptStoreError,
    StoreError,
)
from dledger.commitlog.mark import Mark, newest_payload
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.queue_unit import FILLER_SIZE, UNIT_BYTES, UNIT_DTYPE, Units
from dledger.commitlog.record import BLANK_MAGIC, decode_record
from dledger.commitlog.shared_units import Tails, read_tails
from dledger.commitlog.store_paths import StorePaths, parse_file_name
from dledger.output import CliError, ExitCode
from dledger.raft.journal import parse_term_vote
from dledger.raft.wire import TERM_MAX

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

    Raises LogDamageError: a segment between two others is missing.
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

    Raises LogDamageError: something else stands there, or an entry does not follow the one before.
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


PROBLEMS_SHOWN = 20
"""One torn place can break thousands of units; the first ones say where to look."""

UNITS_AT_ONCE = 50_000
"""Units of one queue gathered before they are compared: bounds memory on long logs."""


class StoreReport(msgspec.Struct, kw_only=True):
    """What stands in a data folder, and what is wrong with it."""

    folder: str
    segments: int = 0
    entries: int = 0
    records: int = 0
    first_index: int = 0
    last_index: int = 0
    last_term: int = 0
    chain: str = ""
    end_position: int = 0
    commit_index: int = 0
    clean_stop: bool = True
    queues: int = 0
    units: int = 0
    problem_count: int = 0
    problems: list[str] = []
    notes: list[str] = []

    @property
    def good(self) -> bool:
        """Nothing is wrong."""
        return self.problem_count == 0

    def problem(self, text: str) -> None:
        """Note something that must not be."""
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_SHOWN:
            self.problems.append(text)


def verify_store(root: Path, read_to: Callable[[int], None] = lambda position: None) -> StoreReport:
    """Return what stands in the data folder *root* of a stopped broker.

    Raises CliError: it is not a data folder.
    """
    paths = StorePaths(str(root))
    if not Path(paths.commitlog).is_dir():
        raise CliError(
            f"{root} is not a data folder: there is no commitlog in it",
            next_step="give the folder that store.path_root_dir names",
            exit_code=ExitCode.USAGE,
        )
    report = StoreReport(folder=str(root))
    report.clean_stop = not Path(paths.abort).exists()
    report.commit_index = _commit_index(Path(paths.commit_mark), report)
    _check_vote(Path(paths.vote), report)
    queues = _Queues(Path(paths.consumequeue), _shared_tails(paths.shared_units, report), report)
    try:
        segments = open_segments(Path(paths.commitlog))
        report.segments = len(segments)
        for entry in walk(segments):
            _count(entry, report)
            _check_records(entry, report)
            queues.add(entry)
            read_to(entry.header.end_position)
        _check_rest(segments, report)
    except LogDamageError as error:
        report.problem(f"log: {error}")
    queues.finish()
    if report.commit_index > report.last_index:
        report.problem(
            f"log: ends at entry {report.last_index}, entry {report.commit_index} was committed"
        )
    if not report.clean_stop:
        report.notes.append("not stopped cleanly: queue units may be missing until the next start")
    return report


def commit_mark(path: Path) -> Mark | None:
    """Return the newest whole commit mark of a data folder; None when there is none.

    Raises CorruptStoreError: the file is there and neither slot is whole.
    """
    newest = newest_slot(path)
    return None if newest is None else Mark.decode(newest)


def newest_slot(path: Path) -> bytes | None:
    """Return what stands in the newest whole slot of a file; None when nothing does.

    Raises CorruptStoreError: the file is there and neither slot is whole.
    """
    if not path.exists():
        return None
    try:
        return newest_payload(path.read_bytes())
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{path}: {error}") from error


def _commit_index(path: Path, report: StoreReport) -> int:
    try:
        mark = commit_mark(path)
    except CorruptStoreError as error:
        report.problem(str(error))
        return 0
    return mark.index if mark else 0


def _check_vote(path: Path, report: StoreReport) -> None:
    try:
        payload = newest_slot(path)
        if payload is not None:
            parse_term_vote(payload)
    except CorruptStoreError as error:
        report.problem(f"vote: {error}")


def _shared_tails(folder: str, report: StoreReport) -> Tails:
    try:
        return read_tails(folder, lambda path: Path(path).read_bytes())
    except CorruptStoreError as error:
        report.problem(f"shared units: {error}")
        return {}


def _count(entry: LogEntry, report: StoreReport) -> None:
    header = entry.header
    report.first_index = report.first_index or header.index
    report.entries += 1
    report.records += header.record_count
    report.last_index = header.index
    report.last_term = header.term
    if not 0 <= header.term <= TERM_MAX:
        report.problem(f"log: entry {header.index} is of a term that no group comes to")
    report.chain = f"{header.chain:016x}"
    report.end_position = header.end_position


def _check_records(entry: LogEntry, report: StoreReport) -> None:
    header = entry.header
    start = header.body_start
    for size in record_sizes(entry.frame, header).tolist():
        position = header.position + start
        try:
            record = decode_record(entry.frame, start)
        except CorruptRecordError as error:
            report.problem(f"record at byte {position}: {error}")
            start += size
            continue
        if record.phy_offset != position:
            report.problem(f"record at byte {position} names {record.phy_offset} as its position")
        if record.size != size:
            report.problem(f"record at byte {position}: {record.size} bytes; the table has {size}")
        if record.store_timestamp_ms != header.store_time_ms:
            report.problem(f"record at byte {position} has another store time than its entry")
        start += size


def _check_rest(segments: list[Segment], report: StoreReport) -> None:
    """Behind the last entry there must be zeros only: anything else is an uncut tail."""
    for segment in segments:
        begin = max(report.end_position - segment.start, 0)
        if begin >= len(segment.data):
            continue
        rest = np.frombuffer(segment.data, np.uint8)[begin:]
        if segment.end <= report.end_position or segment is not segments[-1]:
            continue
        if rest.any():
            at = segment.start + begin + int(rest.argmax() if rest[0] else rest.nonzero()[0][0])
            report.problem(f"log: byte {at} behind the last entry is not zero")


class _Queues:
    """Compares the units that follow from the log with those in the files of queues."""

    def __init__(self, folder: Path, shared: Tails, report: StoreReport) -> None:
        self._folder = folder
        self._shared = shared
        self._report = report
        self._waiting: dict[tuple[str, int], list[Units]] = {}
        self._first: dict[tuple[str, int], int] = {}
        self._next: dict[tuple[str, int], int] = {}
        self._absent: set[tuple[str, int]] = set()

    def add(self, entry: LogEntry) -> None:
        """Take in the units of the next entry."""
        if not entry.header.record_count:
            return
        try:
            derived = derive(entry.frame, entry.header)
        except (CorruptEntryError, CorruptRecordError) as error:
            self._report.problem(f"entry {entry.header.index}: {error}")
            return
        for topic, queue_id, where in derived.groups:
            key = (topic, queue_id)
            offsets = derived.queue_offset[where]
            expected = self._next.get(key, int(offsets[0]))
            if (offsets != np.arange(expected, expected + len(offsets))).any():
                self._report.problem(
                    f"entry {entry.header.index}: {topic} queue {queue_id} goes on with offset"
                    f" {int(offsets[0])}, not {expected}"
                )
            self._next[key] = int(offsets[-1]) + 1
            self._first.setdefault(key, int(offsets[0]))
            waiting = self._waiting.setdefault(key, [])
            waiting.append(derived.units[where])
            if entry.header.index > self._report.commit_index:
                # Not known to be committed: no unit is required, and none may be wrong.
                self._compare(key, promised=False)
            elif sum(map(len, waiting)) >= UNITS_AT_ONCE:
                self._compare(key, promised=True)

    def finish(self) -> None:
        """Compare what is left."""
        for key in list(self._waiting):
            self._compare(key, promised=True)
        self._report.queues = len(self._next)
        self._report.units = sum(self._next[key] - self._first[key] for key in self._next)
        for topic, queue_id in sorted(self._absent):
            self._report.notes.append(f"{topic} queue {queue_id} has no files: deleted topic?")

    def _compare(self, key: tuple[str, int], *, promised: bool) -> None:
        waiting = self._waiting.pop(key, [])
        if not waiting:
            return
        expected = np.concatenate(waiting)
        topic, queue_id = key
        first = self._next[key] - len(expected)
        tail = self._shared.get(topic, {}).get(queue_id)
        if tail is None and not (self._folder / topic).is_dir():
            self._absent.add(key)
            return
        found = read_units(self._folder / topic / str(queue_id), first, len(expected))
        if tail is not None:
            shared = np.frombuffer(tail.within(first, first + len(found)), UNIT_DTYPE)
            place = max(tail.first - first, 0)
            found[place : place + len(shared)] = shared
        written = (found["size"] != 0) & (found["size"] != FILLER_SIZE)
        differs = written & (
            (found["phy_offset"] != expected["phy_offset"]) | (found["size"] != expected["size"])
        )
        if topic != SCHEDULE_TOPIC:
            # There it holds a delivery time, which follows from the broker's delay levels.
            differs |= written & (found["tags_code"] != expected["tags_code"])
        for place in np.flatnonzero(differs)[:PROBLEMS_SHOWN].tolist():
            self._report.problem(
                f"{topic} queue {queue_id} offset {first + place}: unit"
                f" {tuple(found[place].tolist())}, the log has {tuple(expected[place].tolist())}"
            )
        missing = int(len(expected) - written.sum())
        if missing and promised and self._report.clean_stop:
            at = first + int(np.flatnonzero(~written)[0])
            self._report.problem(
                f"{topic} queue {queue_id}: {missing} units missing from offset {at} on"
            )


def read_units(folder: Path, first: int, count: int) -> Units:
    """Return *count* units of a queue from its files; zeros where there are none."""
    units = np.zeros(count, UNIT_DTYPE)
    begin, end = first * UNIT_BYTES, (first + count) * UNIT_BYTES
    for start, path in _queue_files(folder):
        stop = start + path.stat().st_size
        low, high = max(begin, start), min(end, stop)
        if low >= high:
            continue
        with path.open("rb") as file:
            file.seek(low - start)
            data = file.read(high - low)
        place = (low - begin) // UNIT_BYTES
        part = np.frombuffer(data, UNIT_DTYPE)
        units[place : place + len(part)] = part
    return units


def _queue_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        start = parse_file_name(path.name)
        if start is not None:
            yield start, path


def refuse_running(folder: Path) -> None:
    """Raise when a broker holds the folder: its log changes while it is read."""
    lock = folder / "lock"
    if not lock.exists():
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(
                f"{folder} is in use by a running broker", next_step="stop it first"
            ) from None
