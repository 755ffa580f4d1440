"""Recovery finds the exact end, cuts torn tails and refuses damage."""

import pytest

from dledger.commitlog.entry import parse_header
from dledger.commitlog.entry_index import UNIT_BYTES
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError
from dledger.commitlog.mark import Mark
from dledger.commitlog.recovery import DamagedLogError
from dledger.commitlog.store_paths import StorePaths
from dledger.testing.crash_disk import CrashDisk, Inode
from tests.harness.entry_frames import ENTRY_BYTES, next_frame

ROOT = "/store"
PATHS = StorePaths(ROOT)
SEGMENT = 2048
UNITS = 8


def open_log(disk: CrashDisk, trusted: Mark | None = None, *, repair: bool = False) -> EntryLog:
    return EntryLog.open(
        disk,
        ROOT,
        segment_bytes=SEGMENT,
        index_units_per_file=UNITS,
        trusted=trusted,
        repair=repair,
    )


def killed_log(count: int, body_bytes: int = 40) -> tuple[CrashDisk, EntryLog, list[bytes]]:
    """A log as SIGKILL leaves it."""
    disk = CrashDisk()
    log = open_log(disk)
    frames = []
    for _ in range(count):
        frames.append(next_frame(log, body_bytes, term=1))
        log.append(frames[-1])
    return disk, log, frames


def content_of(log: EntryLog) -> list[bytes]:
    return [bytes(log.frame(i)) for i in range(log.first_index, log.last_index + 1)]


def flip(disk: CrashDisk, position: int, bit: int = 1) -> None:
    base = position - position % SEGMENT
    disk.files[PATHS.segment(base)].content[position - base] ^= bit


# -- where it begins -----------------------------------------------------------------------


def test_after_a_clean_close_nothing_is_scanned() -> None:
    disk, log, frames = killed_log(30)
    mark = log.mark_at(30)
    log.close()
    again = open_log(disk, mark)
    assert again.report.entries_scanned == 0
    assert not again.report.index_rebuilt
    assert content_of(again) == frames


def test_a_clean_close_keeps_the_reserve() -> None:
    disk, log, _ = killed_log(30)
    log.allocator.reserve_next()
    mark = log.mark_at(30)
    log.close()
    assert open_log(disk, mark).allocator.has_reserve


def test_entries_up_to_the_mark_are_not_scanned_again() -> None:
    disk, log, _ = killed_log(10)
    log.flush()
    log.allocator.reserve_next()
    for _ in range(20):
        log.append(next_frame(log, 40))
    again = open_log(disk, log.mark_at(10))
    assert again.report.first_scanned_index == 11
    assert again.report.entries_scanned == 20


def test_scan_begins_at_the_end_of_the_units() -> None:
    disk, log, frames = killed_log(10)
    log.flush()
    log.allocator.reserve_next()
    for _ in range(20):
        frames.append(next_frame(log, 40))
        log.append(frames[-1])
    log.flush()
    left = disk.power_cut(lambda: False)
    again = open_log(left, log.mark_at(25))
    assert again.report.first_scanned_index == 11
    assert content_of(again) == frames


def test_a_mark_of_another_history_is_invalid() -> None:
    disk, log, frames = killed_log(10)
    good = log.mark_at(7)
    other = Mark(good.index, good.term, good.position, good.chain ^ 1, good.end_position)
    again = open_log(disk, other)
    assert not again.mark_valid
    assert again.report.first_scanned_index == 1
    assert content_of(again) == frames


def test_a_mark_behind_the_end_is_invalid() -> None:
    disk, log, frames = killed_log(10)
    end = log.end_position
    again = open_log(disk, Mark(11, 1, end, 99, end + ENTRY_BYTES))
    assert not again.mark_valid
    assert content_of(again) == frames


def test_a_mark_without_any_segments_is_invalid() -> None:
    disk, log, _ = killed_log(10)
    mark = log.mark_at(10)
    for name in disk.list_dir(PATHS.commitlog):
        disk.unlink(f"{PATHS.commitlog}/{name}")
    again = open_log(disk, mark)
    assert not again.mark_valid
    assert again.last_index == 0


# -- the entry index -----------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 8, 16, 24])
def test_missing_index_files_are_rebuilt(lost: int) -> None:
    disk, log, frames = killed_log(30)
    mark = log.mark_at(30)
    log.close()
    disk.unlink(PATHS.entry_index_file(lost))
    again = open_log(disk, mark)
    assert again.report.index_rebuilt
    assert content_of(again) == frames
    again.close()
    assert not open_log(disk, mark).report.index_rebuilt


def test_index_files_of_another_size_or_content_are_rebuilt() -> None:
    disk, log, frames = killed_log(30)
    mark = log.mark_at(30)
    log.close()
    path = PATHS.entry_index_file(8)
    whole = disk.files[path].content
    for damaged in (whole[:-1], bytes(len(whole))):
        disk.files[path] = Inode.holding(damaged)
        again = open_log(disk, mark)
        assert again.report.index_rebuilt
        assert content_of(again) == frames
        again.close()


@pytest.mark.parametrize("index", [1, 3, 20, 29, 30])
def test_a_damaged_unit_among_the_newest_is_rebuilt(index: int) -> None:
    disk, log, frames = killed_log(30)
    mark = log.mark_at(30)
    log.close()
    at = (index % UNITS) * UNIT_BYTES + 3
    disk.files[PATHS.entry_index_file(index - index % UNITS)].content[at] ^= 4
    again = open_log(disk, mark)
    assert again.report.index_rebuilt
    assert content_of(again) == frames


# -- torn tails ----------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut() -> None:
    disk, log, frames = killed_log(9)
    start = log.position_at(9)
    mark = log.mark_at(8)
    for torn in range(start, log.end_position):
        left = disk.copy()
        content = left.files[PATHS.segment(0)].content
        content[torn:] = bytes(len(content) - torn)
        again = open_log(left, mark)
        # The last bytes of a record may be zero anyway: then nothing was torn.
        whole = content[start : log.end_position] == frames[8]
        assert content_of(again) == (frames if whole else frames[:8])
        assert again.report.torn_tail == (not whole and torn > start)
        assert not any(left.read(PATHS.segment(0))[again.end_position :])


def test_a_torn_first_entry_of_a_segment_takes_the_blank_along() -> None:
    disk, log, frames = killed_log(30)
    first = next(i for i in range(1, 31) if log.position_at(i) >= SEGMENT)
    log.truncate_from(first + 1)
    end = log.mark_at(first - 1).end_position
    flip(disk, log.position_at(first) + 90)
    again = open_log(disk)
    assert content_of(again) == frames[: first - 1]
    assert again.report.torn_tail
    assert disk.list_dir(PATHS.commitlog) == [f"{0:020d}"]
    assert not any(disk.read(PATHS.segment(0))[end:])


def test_a_lost_blank_is_written_again() -> None:
    disk, log, frames = killed_log(30)
    first = next(i for i in range(1, 31) if log.position_at(i) >= SEGMENT)
    end = log.mark_at(first - 1).end_position
    before = disk.read(PATHS.segment(0))
    disk.files[PATHS.segment(0)].content[end : end + 8] = bytes(8)
    again = open_log(disk)
    assert content_of(again) == frames
    assert disk.read(PATHS.segment(0)) == before


def test_a_segment_cut_short_while_it_was_made_is_removed() -> None:
    disk, _log, frames = killed_log(5)
    disk.create(PATHS.segment(SEGMENT), 100, reserve=False)
    again = open_log(disk)
    assert content_of(again) == frames
    again.allocator.reserve_next()
    assert again.allocator.has_reserve


def test_a_segment_behind_a_gap_is_removed_when_nothing_is_in_it() -> None:
    disk, _log, frames = killed_log(5)
    disk.create(PATHS.segment(3 * SEGMENT), SEGMENT, reserve=False)
    assert content_of(open_log(disk)) == frames
    assert disk.list_dir(PATHS.commitlog) == [f"{0:020d}"]


# -- damage --------------------------------------------------------------------------------


def test_flipped_bit_before_the_last_entry_is_damage() -> None:
    disk, log, frames = killed_log(12)
    log.flush()
    for index in (1, 6, 8, 11):
        start = log.position_at(index)
        for at in range(start, start + len(frames[index - 1]), 7):
            left = disk.copy()
            flip(left, at)
            with pytest.raises(DamagedLogError) as caught:
                open_log(left, log.mark_at(12) if at % 2 else None)
            damage = caught.value.damage
            base = start - start % SEGMENT
            assert (damage.path, damage.offset) == (PATHS.segment(base), start - base) or (
                damage.index == index
            )
            assert damage.index == index
            assert left.read(PATHS.segment(0)) != bytes(SEGMENT)


def test_the_error_names_file_offset_and_entry() -> None:
    disk, log, _ = killed_log(12)
    start = log.position_at(6)
    flip(disk, start + 80)
    with pytest.raises(CorruptStoreError, match=rf"00000 is damaged at byte {start}: no entry 6"):
        open_log(disk)


def test_a_flipped_bit_in_the_marked_last_entry_is_damage() -> None:
    disk, log, frames = killed_log(12)
    start = log.position_at(12)
    for units_durable in (False, True):
        if units_durable:
            log.flush()
            log.allocator.reserve_next()
        for at in range(start, start + len(frames[11]), 5):
            left = disk.copy()
            flip(left, at)
            with pytest.raises(DamagedLogError):
                open_log(left, log.mark_at(12))


def test_flipped_bit_after_a_clean_close_is_damage() -> None:
    disk, log, frames = killed_log(12)
    start = log.position_at(12)
    log.close()
    for at in range(start, start + len(frames[11]), 5):
        left = disk.copy()
        flip(left, at)
        with pytest.raises(DamagedLogError):
            open_log(left)


def test_a_segment_lost_after_a_clean_close_is_damage() -> None:
    disk, log, _ = killed_log(30)
    log.close()
    for name in disk.list_dir(PATHS.commitlog):
        left = disk.copy()
        left.unlink(f"{PATHS.commitlog}/{name}")
        with pytest.raises(DamagedLogError):
            open_log(left)


def test_a_truncation_after_an_open_is_not_taken_for_damage() -> None:
    disk, log, frames = killed_log(12)
    log.close()
    again = open_log(disk)
    again.truncate_from(10)
    again.truncate_from(6)
    third = open_log(disk.power_cut(lambda: False))
    assert content_of(third) == frames[:5]
    third.close()
    assert content_of(open_log(disk)) == frames[:5]


@pytest.mark.parametrize("appended", [1, 3, 5])
def test_loss_after_a_truncation_and_a_clean_close_is_damage(appended: int) -> None:
    """A truncation excuses an end before what was there then, not before what came since."""
    disk, log, frames = killed_log(5)
    log.truncate_from(5)
    for _ in range(appended):
        log.append(next_frame(log, 60, term=2))
    cut = log.position_at(log.last_index)
    size = log.end_position - cut
    log.close()
    assert open_log(disk.copy()).last_index == 4 + appended
    base = cut - cut % SEGMENT
    disk.files[PATHS.segment(base)].content[cut - base : cut - base + size] = bytes(size)
    with pytest.raises(DamagedLogError):
        open_log(disk)
    assert content_of(open_log(disk, repair=True))[:4] == frames[:4]


def test_repair_cuts_at_the_damage_and_reports_it() -> None:
    disk, log, frames = killed_log(30)
    mark = log.mark_at(30)
    flip(disk, log.position_at(4) + 80)
    again = open_log(disk, mark, repair=True)
    assert content_of(again) == frames[:3]
    damage = again.report.damage
    assert damage is not None
    assert damage.index == 4
    for frame in frames[3:]:
        again.append(frame)
    again.flush()
    third = open_log(disk.power_cut(lambda: False), mark)
    assert content_of(third) == frames
    assert third.mark_valid


@pytest.mark.parametrize("byte", [80, 60, 20])
def test_repair_cuts_at_a_damaged_marked_entry(byte: int) -> None:
    disk, log, frames = killed_log(30)
    mark, position = log.mark_at(30), log.position_at(30)
    log.close()
    flip(disk, position + byte)
    with pytest.raises(DamagedLogError):
        open_log(disk.copy(), mark)
    again = open_log(disk, mark, repair=True)
    assert content_of(again) == frames[:29]
    again.append(frames[29])
    again.flush()
    assert content_of(open_log(disk.power_cut(lambda: False), mark)) == frames


def test_stale_entries_behind_a_new_end_are_not_resurrected() -> None:
    disk, log, frames = killed_log(9)
    old = disk.read(PATHS.segment(0))
    log.truncate_from(6)
    newer = [next_frame(log, 10, term=2)]
    log.append(newer[0])
    log.flush()
    # The bytes of the old entries come back behind the new end, as if they had never been zeroed.
    stale = log.end_position
    disk.files[PATHS.segment(0)].content[stale:] = old[stale:]
    with pytest.raises(DamagedLogError):
        open_log(disk)
    again = open_log(disk, repair=True)
    assert content_of(again) == frames[:5] + newer
    assert parse_header(again.frame(6)).term == 2


def test_damaged_side_files_are_reported() -> None:
    disk, log, _ = killed_log(9)
    log.close()
    for path, what in ((PATHS.format, "format"), (PATHS.extent, "slot")):
        left = disk.copy()
        content = left.files[path].content
        content[:] = bytes([0x55]) * len(content)
        with pytest.raises(CorruptStoreError, match=what):
            open_log(left)
    disk.replace(PATHS.anchor, b"x" * 52)
    with pytest.raises(CorruptStoreError, match="anchor"):
        open_log(disk)


def test_a_lost_extent_costs_a_search_and_nothing_else() -> None:
    disk, log, frames = killed_log(30)
    disk.unlink(PATHS.extent)
    assert content_of(open_log(disk, log.mark_at(20))) == frames


@pytest.mark.parametrize("within", range(1, 5))
def test_a_later_entry_is_found_where_a_piece_ends(
    within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes by which an entry is known may lie in two pieces of what is searched."""
    disk, log, _ = killed_log(4)
    size = log.position_at(4) + within
    monkeypatch.setattr("dledger.commitlog.segment.ZERO_CHUNK_BYTES", size)
    monkeypatch.setattr("dledger.commitlog.segment._ZEROS", bytes(size))
    flip(disk, log.position_at(3) + 60)
    with pytest.raises(DamagedLogError) as caught:
        open_log(disk)
    assert caught.value.damage.later_index == 4
