"""Entry log: reading, appending and rolling."""

import struct
from pathlib import Path

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    FlushFailedError,
    ForeignStoreError,
    InvariantBroken,
    OffsetOutOfRangeError,
)
from dledger.commitlog.mark import Anchor, store_anchor
from dledger.commitlog.segment import BLANK_BYTES
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import ENTRY_BYTES, RECORD_BYTES, next_frame, next_no_op
from tests.harness.entry_logs import PATHS, ROOT, SEGMENT, fill, open_log, segment_content


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def log(disk: CrashDisk) -> EntryLog:
    return open_log(disk)


def test_an_empty_log_begins_at_entry_one(log: EntryLog) -> None:
    state = (log.first_index, log.last_index, log.last_term, log.last_chain, log.end_position)
    assert state == (1, 0, 0, 0, 0)
    assert (log.durable_index, log.last_store_time_ms, log.mark_valid) == (0, 0, True)
    assert (log.term_at(0), log.chain_at(0)) == (0, 0)
    assert log.begin_flush() is None


def test_reading_what_the_log_does_not_hold_is_out_of_range(log: EntryLog) -> None:
    for index in (-1, 1):
        with pytest.raises(OffsetOutOfRangeError):
            log.term_at(index)
    for index in (0, 1):
        with pytest.raises(OffsetOutOfRangeError):
            log.frame(index)
        with pytest.raises(OffsetOutOfRangeError):
            log.frames(index, 100)
    with pytest.raises(OffsetOutOfRangeError):
        log.read(0, 1)
    assert len(log.read(0, 0)) == 0
    fill(log, 2)
    for index in (0, 3):
        with pytest.raises(OffsetOutOfRangeError):
            log.frame(index)
    with pytest.raises(OffsetOutOfRangeError):
        log.read(log.end_position, 1)
    with pytest.raises(OffsetOutOfRangeError):
        log.read(-1, 1)


def test_old_entries_are_read_from_the_index_files(disk: CrashDisk) -> None:
    log = EntryLog.open(disk, ROOT, segment_bytes=1 << 20, index_units_per_file=512)
    chains = []
    for _ in range(1500):
        log.append(next_no_op(log, term=3), sealed_here=True)
        chains.append(log.last_chain)
    assert [log.chain_at(i) for i in range(1, 1501)] == chains
    assert {log.term_at(i) for i in range(1, 1501)} == {3}


def test_frames_joins_entries_of_one_segment_and_never_spans_two(log: EntryLog) -> None:
    frames = fill(log, 30, 40)
    views = log.frames(1, 1 << 20)
    assert b"".join(views) == b"".join(frames)
    assert len(views) == log.end_position // SEGMENT + 1
    for view in views:
        position = parse_header(view).position
        assert position // SEGMENT == (position + len(view) - 1) // SEGMENT


def test_frames_stay_within_bytes_and_last(log: EntryLog) -> None:
    frames = fill(log, 30, 40)
    size = len(frames[0])
    for first in (1, 7, 30):
        for max_bytes in (0, 1, size - 1, size, size + 1, 3 * size, 12 * size + 5):
            for last in (None, first, first + 2):
                count = max(1, max_bytes // size)
                stop = min(30, first + count - 1, last or 30)
                got = b"".join(log.frames(first, max_bytes, last))
                assert got == b"".join(frames[first - 1 : stop]), (first, max_bytes, last)


def test_frames_are_read_only(log: EntryLog) -> None:
    fill(log, 1)
    assert log.frame(1).readonly
    assert log.frames(1, 1)[0].readonly


def test_record_at_gives_one_record(log: EntryLog) -> None:
    frame = next_frame(log, 10, records=3, term=1)
    log.append(frame)
    start = parse_header(frame).body_start
    size = RECORD_BYTES + 10
    for n in range(3):
        at = start + n * size
        assert log.record_at(at) == frame[at : at + size]
    with pytest.raises(CorruptRecordError):
        log.record_at(start + 1)
    with pytest.raises(CorruptRecordError):
        log.record_at(0)
    for outside in (-1, log.end_position, log.end_position - 7):
        with pytest.raises(OffsetOutOfRangeError):
            log.record_at(outside)


def test_read_does_not_span_segments(log: EntryLog) -> None:
    fill(log, 30)
    with pytest.raises(OffsetOutOfRangeError, match="span"):
        log.read(SEGMENT - 1, 2)


def test_append_refuses_a_frame_that_does_not_fit(disk: CrashDisk, log: EntryLog) -> None:
    other = open_log(CrashDisk())
    fill(log, 2, term=5)
    fill(other, 1, 9, term=5)
    good = next_frame(log, term=5)
    wrong = [
        next_frame(log, term=4),
        next_frame(other, term=5),
        bytes(log.frame(2)),
        good[:-1],
        good + b"\0",
        good[:-1] + bytes([good[-1] ^ 1]),
        good[:50] + bytes([good[50] ^ 1]) + good[51:],
        b"",
    ]
    before = segment_content(disk, 0)
    for frame in wrong:
        with pytest.raises(CorruptEntryError):
            log.append(frame)
    assert segment_content(disk, 0) == before
    log.append(good)
    assert log.last_index == 3


def test_a_frame_verified_after_this_entry_is_not_read_again(log: EntryLog) -> None:
    log.append(next_frame(log, 5, term=1))
    frame = bytearray(next_frame(log, 5, term=1))
    header = parse_header(frame)
    frame[-1] ^= 1  # would be found by reading its body
    assert log.append(frame, header=header, verified_after=log.last_chain) is header


def test_a_frame_verified_after_another_entry_is_read_again() -> None:
    log, other = open_log(CrashDisk()), open_log(CrashDisk())
    log.append(next_frame(log, 5, term=1, fill=1))
    other.append(next_frame(other, 5, term=1, fill=2))
    frame = next_frame(other, term=1)
    header = parse_header(frame)
    with pytest.raises(CorruptEntryError, match="does not follow"):
        log.append(frame, header=header, verified_after=other.last_chain)
    assert log.last_index == 1


def test_a_frame_of_another_history_is_refused_by_its_chain() -> None:
    log, other = open_log(CrashDisk()), open_log(CrashDisk())
    log.append(next_frame(log, 5, term=1, fill=1))
    other.append(next_frame(other, 5, term=1, fill=2))
    with pytest.raises(CorruptEntryError, match="does not follow"):
        log.append(next_frame(other, term=1))


def test_full_segment_leaves_space_for_the_blank(disk: CrashDisk, log: EntryLog) -> None:
    log.append(next_frame(log, SEGMENT - BLANK_BYTES - ENTRY_BYTES, term=1))
    assert log.end_position == SEGMENT - BLANK_BYTES
    frame = next_frame(log, term=1)
    assert parse_header(frame).position == SEGMENT
    log.append(frame)
    assert segment_content(disk, 0)[-BLANK_BYTES:] == struct.pack(">iI", 8, 0xCBD43194)
    log.flush()
    again = open_log(disk)
    assert again.last_index == 2
    assert again.frame(2) == frame


def test_entry_one_byte_too_long_begins_a_segment(log: EntryLog) -> None:
    fill(log, 1)
    free_bytes = SEGMENT - log.end_position - BLANK_BYTES
    assert log.place(free_bytes) == log.end_position
    assert log.place(free_bytes + 1) == SEGMENT


def test_blank_of_a_roll_is_deterministic(disk: CrashDisk, log: EntryLog) -> None:
    fill(log, 9, 40)
    end = log.end_position
    assert log.place(SEGMENT - end) == SEGMENT
    log.append(next_frame(log, 700))
    assert log.position_at(log.last_index) == SEGMENT
    blank = segment_content(disk, 0)[end:]
    assert blank == struct.pack(">iI", SEGMENT - end, 0xCBD43194) + bytes(SEGMENT - end - 8)


def test_an_entry_larger_than_a_segment_is_a_bug_of_the_caller(log: EntryLog) -> None:
    assert log.place(log.max_entry_bytes) == 0
    with pytest.raises(InvariantBroken):
        log.place(log.max_entry_bytes + 1)


def test_no_ops_do_not_take_the_store_time_back(disk: CrashDisk, log: EntryLog) -> None:
    log.append(next_no_op(log, term=0))
    assert log.last_store_time_ms == 0
    log.append(next_frame(log, store_time_ms=500, term=1))
    log.append(next_no_op(log, term=2))
    assert log.last_store_time_ms == 500
    log.close()
    assert open_log(disk).last_store_time_ms == 500


# -- entry log that is truncated, opened again and closed


def test_truncation_behind_the_end_does_nothing(log: EntryLog) -> None:
    fill(log, 2)
    log.truncate_from(3)
    assert (log.last_index, log.generation) == (2, 0)
    with pytest.raises(InvariantBroken):
        log.truncate_from(0)


def test_store_time_goes_back_with_a_truncation_only(log: EntryLog) -> None:
    log.append(next_frame(log, store_time_ms=100, term=1))
    log.append(next_no_op(log, term=2))
    log.append(next_frame(log, store_time_ms=200))
    log.truncate_from(3)
    assert log.last_store_time_ms == 100
    log.truncate_from(1)
    assert log.last_store_time_ms == 0


def test_recent_entries_after_a_truncation_are_the_right_ones() -> None:
    log = EntryLog.open(CrashDisk(), ROOT, segment_bytes=1 << 20, index_units_per_file=4096)
    for _ in range(2000):
        log.append(next_no_op(log, term=1), sealed_here=True)
    log.truncate_from(1500)
    for _ in range(10):
        log.append(next_no_op(log, term=2), sealed_here=True)
    for index in range(1, 1510):
        header = parse_header(log.frame(index))
        assert (header.index, header.chain) == (index, log.chain_at(index))
        assert log.term_at(index) == (1 if index < 1500 else 2)


def test_views_of_dropped_segments_stay_as_they_were(tmp_path: Path) -> None:
    log = EntryLog.open(OsDisk(), str(tmp_path / "store"), segment_bytes=SEGMENT)
    frames = fill(log, 30, 40, term=1)
    view = log.frame(30)
    assert log.position_at(30) >= SEGMENT
    log.truncate_from(2)
    fill(log, 29, 40, term=2)
    assert view == frames[29]
    log.close()
    assert view == frames[29]


def test_open_finishes_an_interrupted_truncation() -> None:
    steps = 0
    for kept_sectors in (True, False):
        step = 0
        while True:
            disk = CrashDisk()
            log = open_log(disk)
            frames = fill(log, 30, 40, term=1)
            log.flush()
            before = len(disk.steps)

            def crash(
                kind: str, path: str, stop: int = before + step, on: CrashDisk = disk
            ) -> None:
                if len(on.steps) > stop:
                    raise FlushFailedError("the power went")

            disk.fault = crash
            try:
                log.truncate_from(5)
            except FlushFailedError:
                done = False
            else:
                done = True
            left = open_log(disk.power_cut(lambda keep=kept_sectors: keep))  # type: ignore[misc]  # mypy infers no type for a default
            assert left.last_index in ((4,) if done else (4, 30))
            assert [bytes(left.frame(i)) for i in range(1, 5)] == frames[:4]
            if done:
                break
            step += 1
        steps += step
    assert steps > 8


def test_another_segment_size_is_refused_in_one_line(disk: CrashDisk) -> None:
    open_log(disk).close()
    with pytest.raises(ForeignStoreError, match="2048 bytes, not 4096") as caught:
        EntryLog.open(disk, ROOT, segment_bytes=4096)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(disk: CrashDisk) -> None:
    open_log(disk).close()
    text = disk.read(PATHS.format).replace(b'"format": 1', b'"format": 2')
    disk.replace(PATHS.format, text)
    with pytest.raises(ForeignStoreError, match="format 2"):
        open_log(disk)


def test_segments_of_another_program_are_refused(disk: CrashDisk) -> None:
    disk.create(PATHS.segment(0), SEGMENT, reserve=True)
    with pytest.raises(ForeignStoreError, match="another program"):
        open_log(disk)


def test_the_size_of_index_files_is_taken_from_the_folder(disk: CrashDisk, log: EntryLog) -> None:
    frames = fill(log, 30)
    log.close()
    again = EntryLog.open(disk, ROOT, segment_bytes=SEGMENT, index_units_per_file=100)
    assert again.frame(17) == frames[16]


def test_a_log_may_begin_above_entry_one(disk: CrashDisk) -> None:
    open_log(disk).close()
    anchor = Anchor(101, 5 * SEGMENT + 300, 7, 0xABCDEF, 9_000)
    store_anchor(disk, PATHS.anchor, anchor)
    log = open_log(disk)
    state = (log.first_index, log.last_index, log.last_term, log.last_chain, log.end_position)
    assert state == (101, 100, 7, 0xABCDEF, 5 * SEGMENT + 300)
    assert (log.term_at(100), log.chain_at(100), log.last_store_time_ms) == (7, 0xABCDEF, 9_000)
    frames = fill(log, 30, 40, term=7)
    assert parse_header(frames[0]).index == 101
    with pytest.raises(OffsetOutOfRangeError):
        log.frame(100)
    log.flush()
    for trusted in (None, log.mark_at(100), log.mark_at(110)):
        again = open_log(disk.copy(), trusted=trusted)
        assert again.mark_valid
        assert [bytes(again.frame(i)) for i in range(101, 131)] == frames
    log.truncate_from(101)
    assert (log.last_index, log.last_chain, log.last_store_time_ms) == (100, 0xABCDEF, 9_000)


def test_a_first_entry_above_one_may_begin_with_a_roll(disk: CrashDisk) -> None:
    open_log(disk).close()
    store_anchor(disk, PATHS.anchor, Anchor(101, SEGMENT - 50, 7, 1))
    log = open_log(disk)
    frame = next_frame(log, term=7)
    log.append(frame)
    assert log.position_at(101) == SEGMENT
    log.flush()
    assert open_log(disk.power_cut(lambda: False)).frame(101) == frame


def test_segments_below_the_anchor_are_removed_at_open(disk: CrashDisk, log: EntryLog) -> None:
    frames = fill(log, 30, 40)
    first = next(i for i in range(1, 31) if log.position_at(i) >= SEGMENT)
    before = log.mark_at(first - 1)
    log.close()
    anchor = Anchor(first, log.position_at(first), before.term, before.chain, 1_000)
    store_anchor(disk, PATHS.anchor, anchor)
    again = open_log(disk)
    assert again.first_index == first
    assert bytes(again.frame(30)) == frames[29]
    assert disk.list_dir(PATHS.commitlog)[0] == f"{SEGMENT:020d}"


def test_a_closed_log_refuses_writes_and_closing_twice_is_fine(log: EntryLog) -> None:
    fill(log, 1)
    log.close()
    log.close()
    with pytest.raises(InvariantBroken):
        log.append(next_frame(log))
