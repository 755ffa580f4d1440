"""Files that are made from the log, on sectors that the disk does not give back."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from dledger.commitlog.damage import check_entries
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import KeyIndex
from dledger.testing.crash_disk import CrashDisk, disk_full, no_fault
from tests.harness.entry_frames import next_frame

ROOT = "/store"
UNITS = 1024
ENTRIES = 1500
INDEX = f"{ROOT}/raft/entryindex/{0:020d}"
MARK = f"{ROOT}/raft/keyindex"
ALWAYS = (0, 2**62)
TIME_MS = 1_795_147_871_927


def opened(disk: CrashDisk) -> EntryLog:
    return EntryLog.open(disk, ROOT, segment_bytes=1 << 20, index_units_per_file=UNITS)


def filled() -> tuple[CrashDisk, EntryLog]:
    """Return a log whose first units are not in memory."""
    disk = CrashDisk()
    entry_log = opened(disk)
    for _ in range(ENTRIES):
        entry_log.append(next_frame(entry_log, 20))
    entry_log.flush()
    return disk, entry_log


def test_units_on_a_bad_sector_are_made_again_from_their_frames() -> None:
    disk, entry_log = filled()
    before = bytes(disk.files[INDEX].content)
    disk.files[INDEX].unreadable.append((32 * 200, 32 * 216))
    assert entry_log.position_at(205) == entry_log.position_at(204) + entry_log.size_at(204)
    assert (entry_log.index_pages_lost, disk.files[INDEX].unreadable) == (1, [])
    assert bytes(disk.files[INDEX].content) == before
    assert check_entries(entry_log, 1, ENTRIES, 1 << 30).suspects == []


def test_unreadable_units_are_found_and_restored() -> None:
    disk, entry_log = filled()
    disk.files[INDEX].unreadable.append((32 * 300, 32 * 316))
    suspects = check_entries(entry_log, 1, ENTRIES, 1 << 30).suspects
    assert suspects == list(range(300, 316))
    assert all(entry_log.repair.restore_unit(index) for index in suspects)
    assert check_entries(entry_log, 1, ENTRIES, 1 << 30).suspects == []


def test_a_start_makes_an_index_again_that_it_cannot_read() -> None:
    disk, entry_log = filled()
    mark = entry_log.mark_at(ENTRIES)
    entry_log.close()
    for page in range(0, 32 * UNITS, 4096):
        disk.files[INDEX].unreadable.append((page, page + 4096))
    again = EntryLog.open(
        disk, ROOT, segment_bytes=1 << 20, index_units_per_file=UNITS, trusted=mark
    )
    assert (again.report.index_rebuilt, again.last_index, again.mark_valid) == (True, ENTRIES, True)
    assert check_entries(again, 1, ENTRIES, 1 << 30).suspects == []


def key_index(disk: CrashDisk) -> KeyIndex:
    return KeyIndex(disk, f"{ROOT}/index", 7, 20, mark=MARK)


def put(index: KeyIndex, first: int, count: int) -> None:
    """Put keys ``k<n>`` at positions n + 1."""
    index.put_bulk(
        np.array([index_key_hash("T", f"k{n}") for n in range(first, first + count)], np.int32),
        np.arange(first + 1, first + count + 1, dtype=np.int64),
        np.full(count, TIME_MS, np.int64),
    )


def complete(index: KeyIndex) -> None:
    job = index.begin_completion()
    job.run()
    index.end_completion(job)


def three_files() -> tuple[CrashDisk, list[str]]:
    """Return a disk with two full files and one of ten keys."""
    disk = CrashDisk()
    index = key_index(disk)
    assert index.is_behind
    put(index, 0, 48)
    complete(index)
    assert not index.is_behind
    index.close()
    return disk, sorted(path for path in disk.files if "/index/" in path)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_file_without_a_header_is_given_up(is_flipped: bool) -> None:
    disk, paths = three_files()
    if is_flipped:
        disk.files[paths[1]].content[36] ^= 0x40
    else:
        disk.files[paths[1]].unreadable.append((0, 512))
    index = key_index(disk)
    assert (index.is_behind, index.files_lost, index.end_phy_offset) == (True, 1, 19)
    assert not disk.exists(MARK)
    assert [path for path in paths if disk.exists(path)] == paths[:1]
    put(index, 0, 48)
    complete(index)
    assert not key_index(disk).is_behind
    assert [index.query("T", f"k{n}", 1, *ALWAYS) for n in (0, 30, 47)] == [[1], [31], [48]]


def test_newest_file_is_given_up_without_a_slot_table() -> None:
    disk, paths = three_files()
    disk.files[paths[2]].unreadable.append((80, 512))
    index = key_index(disk)
    index.prepare()
    assert (index.is_behind, index.files_lost, index.end_phy_offset) == (True, 1, 38)


def test_a_query_goes_past_a_file_that_cannot_be_read() -> None:
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    noted: list[str] = []
    index.on_unreadable = lambda path, _why: noted.append(path)
    disk.files[paths[1]].unreadable.append((40, 468))
    assert index.query("T", "k30", 9, *ALWAYS) == []
    assert index.query("T", "k3", 9, *ALWAYS) == [4]
    assert (noted, index.is_behind, index.has_unreadable) == ([paths[1]], True, True)
    assert disk.exists(MARK)  # what is put from now on is not taken before the mark is removed
    put(index, 48, 1)
    assert (index.end_phy_offset, disk.exists(MARK)) == (19, False)


def test_unwritable_page_gives_its_file_up() -> None:
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    put(index, 48, 2)
    disk.files[paths[2]].unreadable.append((0, 512))
    index.flush()
    assert not disk.exists(MARK)
    put(index, 50, 2)
    assert (index.is_behind, index.end_phy_offset) == (True, 38)


def test_keys_are_taken_where_retention_removed_the_bad_file() -> None:
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    disk.files[paths[0]].unreadable.append((40, 468))
    assert index.query("T", "k3", 9, *ALWAYS) == []
    index.delete_before(30)
    put(index, 48, 1)
    assert (index.end_phy_offset, index.files_lost) == (49, 0)


def test_files_behind_a_bad_one_do_not_outlive_a_power_cut() -> None:
    """The newest file shows how far the index is: one behind a gap would hide the gap."""
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    put(index, 48, 30)

    def bad_sector(kind: str, path: str) -> None:
        if kind == "write" and path == paths[2]:
            raise OSError(errno.EIO, "bad sector", path)

    disk.fault = bad_sector
    index.flush()
    index.flush()
    left = key_index(disk.power_cut(lambda: False))
    assert (left.is_behind, left.end_phy_offset) == (True, 48)


def test_a_name_of_a_file_is_not_used_again() -> None:
    """A flush that was begun before would write old slots into the new file."""
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    put(index, 48, 1)
    job = index.begin_flush()
    disk.files[paths[2]].unreadable.append((80, 512))
    assert index.query("T", "k45", 9, *ALWAYS) == []
    put(index, 38, 1)
    put(index, 38, 3)
    assert (index.end_phy_offset, index.files_lost) == (41, 1)
    job.run()
    assert not disk.exists(paths[2])
    index.flush()
    left = key_index(disk.power_cut(lambda: False))
    assert left.end_phy_offset == 41


def test_a_completion_beside_a_bad_file_sets_no_mark() -> None:
    disk, paths = three_files()
    index = key_index(disk)
    index.prepare()
    put(index, 48, 2)
    disk.files[paths[2]].unreadable.append((0, 512))
    index.flush()
    index.begin_completion().run()
    assert not disk.exists(MARK)


def test_files_that_are_removed_are_missed_at_the_next_start() -> None:
    disk, paths = three_files()
    for path in paths:
        disk.unlink(path)
    assert key_index(disk).is_behind


def test_units_are_written_beside_a_bad_sector() -> None:
    """A start that makes the whole index again has not read what stands at its end."""
    disk, entry_log = filled()
    entry_log.close()
    end = f"{ROOT}/raft/entryindex/{UNITS:020d}"
    at = 32 * (ENTRIES - UNITS)
    disk.files[end].unreadable.append((at - at % 512, at - at % 512 + 512))
    again = opened(disk)
    assert (again.report.index_rebuilt, again.last_index) == (True, ENTRIES)
    assert check_entries(again, 1, ENTRIES, 1 << 30).suspects == []
    disk.files[end].unreadable.append((at - at % 512, at - at % 512 + 512))
    again.append(next_frame(again, 20))
    again.flush()
    assert check_entries(again, 1, ENTRIES + 1, 1 << 30).suspects == []


def test_a_restart_goes_on_with_an_index_that_is_lost() -> None:
    disk, paths = three_files()
    for path in paths:
        disk.unlink(path)
    index = key_index(disk)
    assert index.is_behind
    put(index, 0, 5)
    index.flush()
    disk = disk.power_cut(lambda: True)
    index = key_index(disk)
    assert index.is_behind, "only the first keys are there again"
    put(index, 5, 43)
    complete(index)
    assert not key_index(disk.copy()).is_behind


def test_a_completion_that_found_no_space_is_done_again() -> None:
    disk = CrashDisk()
    disk.make_dir(f"{ROOT}/raft")
    index = key_index(disk)
    disk.fault = disk_full(kind="replace")
    with pytest.raises(DiskFullError):
        complete(index)
    disk.fault = no_fault
    assert not disk.exists(f"{ROOT}/index")
    complete(index)
    assert disk.exists(MARK)


def test_a_flush_without_a_lost_file_claims_no_keys() -> None:
    disk, paths = three_files()
    index = key_index(disk)
    disk.files[paths[1]].unreadable.append((200, 500))
    assert index.query("T", "k30", 64, *ALWAYS) == []
    index.flush()
    # Retention takes the lost file before it is given up.
    index.delete_before(39)
    assert key_index(disk.power_cut(lambda: False)).is_behind
