"""Files that are made from the log, on sectors that the disk does not give back."""

from dledger.commitlog.damage import check_entries
from dledger.commitlog.entry_log import EntryLog
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_frame

ROOT = "/store"
UNITS = 1024
ENTRIES = 1500
INDEX = f"{ROOT}/raft/entryindex/{0:020d}"


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
