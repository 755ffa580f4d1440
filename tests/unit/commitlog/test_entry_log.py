"""Entry log: reading, appending and rolling."""

from __future__ import annotations

import struct

import pytest

from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    InvariantBroken,
    OffsetOutOfRangeError,
)
from dledger.commitlog.segment import BLANK_BYTES
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import ENTRY_BYTES, RECORD_BYTES, next_frame, next_no_op
from tests.harness.entry_logs import ROOT, SEGMENT, fill, open_log, segment_content


def test_an_empty_log_begins_at_entry_one() -> None:
    log = open_log(CrashDisk())
    state = (log.first_index, log.last_index, log.last_term, log.last_chain, log.end_position)
    assert state == (1, 0, 0, 0, 0)
    assert (log.durable_index, log.last_store_time_ms, log.mark_valid) == (0, 0, True)
    assert (log.term_at(0), log.chain_at(0)) == (0, 0)
    assert log.begin_flush() is None


def test_reading_what_the_log_does_not_hold_is_out_of_range() -> None:
    log = open_log(CrashDisk())
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


def test_old_entries_are_read_from_the_index_files() -> None:
    disk = CrashDisk()
    log = EntryLog.open(disk, ROOT, segment_bytes=1 << 20, index_units_per_file=512)
    chains = []
    for _ in range(1500):
        log.append(next_no_op(log, term=3), sealed_here=True)
        chains.append(log.last_chain)
    assert [log.chain_at(i) for i in range(1, 1501)] == chains
    assert {log.term_at(i) for i in range(1, 1501)} == {3}


def test_frames_joins_entries_of_one_segment_and_never_spans_two() -> None:
    log = open_log(CrashDisk())
    frames = fill(log, 30, 40)
    views = log.frames(1, 1 << 20)
    assert b"".join(views) == b"".join(frames)
    assert len(views) == log.end_position // SEGMENT + 1
    for view in views:
        position = parse_header(view).position
        assert position // SEGMENT == (position + len(view) - 1) // SEGMENT


def test_frames_stay_within_bytes_and_last() -> None:
    log = open_log(CrashDisk())
    frames = fill(log, 30, 40)
    size = len(frames[0])
    for first in (1, 7, 30):
        for max_bytes in (0, 1, size - 1, size, size + 1, 3 * size, 12 * size + 5):
            for last in (None, first, first + 2):
                count = max(1, max_bytes // size)
                stop = min(30, first + count - 1, last or 30)
                got = b"".join(log.frames(first, max_bytes, last))
                assert got == b"".join(frames[first - 1 : stop]), (first, max_bytes, last)


def test_frames_are_read_only() -> None:
    log = open_log(CrashDisk())
    fill(log, 1)
    assert log.frame(1).readonly
    assert log.frames(1, 1)[0].readonly


def test_record_at_gives_one_record() -> None:
    log = open_log(CrashDisk())
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


def test_read_does_not_span_segments() -> None:
    log = open_log(CrashDisk())
    fill(log, 30)
    with pytest.raises(OffsetOutOfRangeError, match="span"):
        log.read(SEGMENT - 1, 2)


def test_append_refuses_a_frame_that_does_not_fit() -> None:
    disk = CrashDisk()
    log = open_log(disk)
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


def test_a_frame_verified_after_this_entry_is_not_read_again() -> None:
    log = open_log(CrashDisk())
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


def test_full_segment_leaves_space_for_the_blank() -> None:
    disk = CrashDisk()
    log = open_log(disk)
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


def test_entry_one_byte_too_long_begins_a_segment() -> None:
    log = open_log(CrashDisk())
    fill(log, 1)
    free_bytes = SEGMENT - log.end_position - BLANK_BYTES
    assert log.place(free_bytes) == log.end_position
    assert log.place(free_bytes + 1) == SEGMENT


def test_blank_of_a_roll_is_deterministic() -> None:
    disk = CrashDisk()
    log = open_log(disk)
    fill(log, 9, 40)
    end = log.end_position
    assert log.place(SEGMENT - end) == SEGMENT
    log.append(next_frame(log, 700))
    assert log.position_at(log.last_index) == SEGMENT
    blank = segment_content(disk, 0)[end:]
    assert blank == struct.pack(">iI", SEGMENT - end, 0xCBD43194) + bytes(SEGMENT - end - 8)


def test_an_entry_larger_than_a_segment_is_a_bug_of_the_caller() -> None:
    log = open_log(CrashDisk())
    assert log.place(log.max_entry_bytes) == 0
    with pytest.raises(InvariantBroken):
        log.place(log.max_entry_bytes + 1)


def test_no_ops_do_not_take_the_store_time_back() -> None:
    disk = CrashDisk()
    log = open_log(disk)
    log.append(next_no_op(log, term=0))
    assert log.last_store_time_ms == 0
    log.append(next_frame(log, store_time_ms=500, term=1))
    log.append(next_no_op(log, term=2))
    assert log.last_store_time_ms == 500
    log.close()
    assert open_log(disk).last_store_time_ms == 500
