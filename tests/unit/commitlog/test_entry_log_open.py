"""Entry log that is truncated, opened again and closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import (
    FlushFailedError,
    ForeignStoreError,
    InvariantBroken,
    OffsetOutOfRangeError,
)
from dledger.commitlog.mark import Anchor, store_anchor
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_frame, next_no_op
from tests.harness.entry_logs import PATHS, ROOT, SEGMENT, fill, open_log


def test_truncation_behind_the_end_does_nothing() -> None:
    log = open_log(CrashDisk())
    fill(log, 2)
    log.truncate_from(3)
    assert (log.last_index, log.generation) == (2, 0)
    with pytest.raises(InvariantBroken):
        log.truncate_from(0)


def test_store_time_goes_back_with_a_truncation_only() -> None:
    log = open_log(CrashDisk())
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


def test_another_segment_size_is_refused_in_one_line() -> None:
    disk = CrashDisk()
    open_log(disk).close()
    with pytest.raises(ForeignStoreError, match="2048 bytes, not 4096") as caught:
        EntryLog.open(disk, ROOT, segment_bytes=4096)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused() -> None:
    disk = CrashDisk()
    open_log(disk).close()
    text = disk.read(PATHS.format).replace(b'"format": 1', b'"format": 2')
    disk.replace(PATHS.format, text)
    with pytest.raises(ForeignStoreError, match="format 2"):
        open_log(disk)


def test_segments_of_another_program_are_refused() -> None:
    disk = CrashDisk()
    disk.create(PATHS.segment(0), SEGMENT, reserve=True)
    with pytest.raises(ForeignStoreError, match="another program"):
        open_log(disk)


def test_the_size_of_index_files_is_taken_from_the_folder() -> None:
    disk = CrashDisk()
    log = open_log(disk)
    frames = fill(log, 30)
    log.close()
    again = EntryLog.open(disk, ROOT, segment_bytes=SEGMENT, index_units_per_file=100)
    assert again.frame(17) == frames[16]


def test_a_log_may_begin_above_entry_one() -> None:
    disk = CrashDisk()
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


def test_a_first_entry_above_one_may_begin_with_a_roll() -> None:
    disk = CrashDisk()
    open_log(disk).close()
    store_anchor(disk, PATHS.anchor, Anchor(101, SEGMENT - 50, 7, 1))
    log = open_log(disk)
    frame = next_frame(log, term=7)
    log.append(frame)
    assert log.position_at(101) == SEGMENT
    log.flush()
    assert open_log(disk.power_cut(lambda: False)).frame(101) == frame


def test_segments_below_the_anchor_are_removed_at_open() -> None:
    disk = CrashDisk()
    log = open_log(disk)
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


def test_a_closed_log_refuses_writes_and_closing_twice_is_fine() -> None:
    log = open_log(CrashDisk())
    fill(log, 1)
    log.close()
    log.close()
    with pytest.raises(InvariantBroken):
        log.append(next_frame(log))
