"""Damage found while the log is open, and the copy of another replica written over it."""

import pytest

from dledger.commitlog.damage import check_entries
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptEntryError, CorruptStoreError
from dledger.commitlog.log_reader import DamagedEntries
from dledger.testing.crash_disk import CrashDisk
from tests.harness.entry_frames import next_frame

ROOT = "/store"
SEGMENT_BYTES = 1024
ENTRIES = 12
INDEX = f"{ROOT}/raft/entryindex/{0:020d}"


def opened(disk: CrashDisk) -> EntryLog:
    return EntryLog.open(disk, ROOT, segment_bytes=SEGMENT_BYTES, index_units_per_file=4096)


def filled() -> tuple[CrashDisk, EntryLog, dict[int, bytes]]:
    """Return a log of several segments, opened without any unit in memory."""
    disk = CrashDisk()
    entry_log = opened(disk)
    for _ in range(ENTRIES):
        entry_log.append(next_frame(entry_log, 60))
    frames = {index: bytes(entry_log.frame(index)) for index in range(1, ENTRIES + 1)}
    entry_log.flush()
    entry_log._index.cut_to(0)
    return disk, entry_log, frames


def spoil(disk: CrashDisk, entry_log: EntryLog, index: int, byte: int) -> None:
    position = entry_log.position_at(index) + byte
    base = position - position % SEGMENT_BYTES
    disk.files[f"{ROOT}/commitlog/{base:020d}"].content[position - base] ^= 0x10


def rewrite(entry_log: EntryLog, frame: bytes) -> None:
    """Write *frame*, another replica's copy of a damaged entry, over it."""
    entry_log.repair.write_copies([(entry_log.repair.accept(frame), frame)])


def spoil_unit(disk: CrashDisk, index: int) -> None:
    disk.files[INDEX].content[32 * index + 3] ^= 1


def suspects(entry_log: EntryLog) -> list[int]:
    return check_entries(entry_log, 1, entry_log.last_index, 1 << 30).suspects


def content(disk: CrashDisk) -> dict[str, bytes]:
    return {path: bytes(file.content) for path, file in disk.files.items() if "commitlog/" in path}


def test_a_sound_log_has_no_suspects() -> None:
    _, entry_log, _ = filled()
    assert suspects(entry_log) == []


@pytest.mark.parametrize("byte", [0, 5, 9, 17, 30, 45, 50, 57, 61, 65, 70, 74, 90, 150])
def test_any_damaged_byte_is_found_and_put_right(byte: int) -> None:
    disk, entry_log, frames = filled()
    before = content(disk)
    spoil(disk, entry_log, 5, byte)
    assert suspects(entry_log) == [5]
    entry_log.repair.mark_damaged(5)
    with pytest.raises(CorruptEntryError):
        entry_log.frame(5)
    with pytest.raises(CorruptEntryError):
        entry_log.frames(4, 1 << 20)
    with pytest.raises(CorruptEntryError):
        entry_log.record_at(entry_log.position_at(5) + 76)
    assert bytes(entry_log.frame(4)) == frames[4]
    rewrite(entry_log, frames[5])
    entry_log.flush()
    entry_log.repair.mark_whole(5)
    assert suspects(entry_log) == []
    assert bytes(entry_log.frame(5)) == frames[5]
    assert content(disk) == before


def test_what_was_put_right_is_durable_after_the_flush() -> None:
    disk, entry_log, frames = filled()
    spoil(disk, entry_log, 5, 80)
    entry_log.repair.mark_damaged(5)
    rewrite(entry_log, frames[5])
    assert entry_log.begin_flush() is not None
    entry_log.flush()
    again = opened(disk.power_cut(lambda: False))
    assert bytes(again.frame(5)) == frames[5]


def test_only_the_very_entry_is_written() -> None:
    disk, entry_log, frames = filled()
    other = EntryLog.open(CrashDisk(), "/other", segment_bytes=SEGMENT_BYTES)
    for _ in range(5):
        other.append(next_frame(other, 60, fill=0x79))
    before = content(disk)
    broken = bytearray(frames[5])
    broken[100] ^= 1
    for copy in (bytes(other.frame(5)), bytes(broken), b"", frames[5][:-1], frames[5] + b"x"):
        with pytest.raises(CorruptEntryError):
            rewrite(entry_log, copy)
    assert content(disk) == before


def test_damaged_unit_is_derived_again() -> None:
    disk, entry_log, frames = filled()
    sound = bytes(disk.files[INDEX].content)
    for index in (3, 7, 8):
        spoil_unit(disk, index)
    assert suspects(entry_log) == [3, 7, 8]
    assert bytes(entry_log.frame(8)) == frames[8]
    assert entry_log.repair.restore_unit(3)
    assert bytes(disk.files[INDEX].content) == sound
    assert suspects(entry_log) == []


def test_entry_and_unit_damaged_together_come_back_too() -> None:
    disk, entry_log, frames = filled()
    sound, before = bytes(disk.files[INDEX].content), content(disk)
    for index in (5, 6):
        spoil(disk, entry_log, index, 20)
    for index in (5, 6):
        spoil_unit(disk, index)
        with pytest.raises(CorruptStoreError):
            entry_log.frame(index)
        entry_log.repair.mark_damaged(index)
    with pytest.raises(CorruptEntryError):
        rewrite(entry_log, frames[6])  # what comes before it is not known yet
    for index in (5, 6):
        rewrite(entry_log, frames[index])
        entry_log.repair.mark_whole(index)
    assert (bytes(disk.files[INDEX].content), content(disk)) == (sound, before)
    assert suspects(entry_log) == []


def test_a_check_stops_when_its_bytes_are_used_up() -> None:
    _, entry_log, frames = filled()
    checked = check_entries(entry_log, 1, ENTRIES, len(frames[1]) + 1)
    assert (checked.next_index, checked.size_bytes) == (3, len(frames[1]) + len(frames[2]))
    assert check_entries(entry_log, 4, ENTRIES, 0).next_index == 5


def test_a_byte_belongs_to_the_entry_around_it() -> None:
    _, entry_log, _ = filled()
    for index in range(1, ENTRIES + 1):
        position = entry_log.position_at(index)
        size = entry_log.size_at(index)
        for byte in (position, position + 100, position + size - 1):
            assert entry_log.index_of(byte) == index


def test_damaged_entries_are_kept_by_index_and_place() -> None:
    damaged = DamagedEntries()
    for index in (7, 3, 4):
        damaged.add(index, index * 10, index * 10 + 10)
    damaged.add(4, 40, 50)
    assert (damaged.indexes, damaged.first, len(damaged)) == ([3, 4, 7], 3, 3)
    assert damaged.ranges() == [(3, 4), (7, 7)]
    assert [damaged.overlaps(at, at + 1) for at in (29, 30, 49, 50, 69, 70, 80)] == [
        None, 3, 4, None, None, 7, None,
    ]  # fmt: skip
    assert damaged.overlaps(50, 71) == 7
    damaged.remove(4)
    assert (4 in damaged, damaged.overlaps(40, 50)) == (False, None)
    damaged.drop_outside(5, 9)
    assert damaged.indexes == [7]


def test_what_is_cut_is_damaged_no_more() -> None:
    _, entry_log, frames = filled()
    for index in (3, 9, ENTRIES):
        entry_log.repair.mark_damaged(index)
    entry_log.truncate_from(8)
    assert entry_log.damaged.ranges() == [(3, 3)]
    while entry_log.last_index < ENTRIES:
        entry_log.append(next_frame(entry_log, 60, term=7))
    assert bytes(entry_log.frame(9)) != frames[9]
    assert suspects(entry_log) == []


def test_what_is_given_up_is_damaged_no_more() -> None:
    _, entry_log, _ = filled()
    anchor = entry_log.anchor_at(9)
    for index in (2, 8, 9):
        entry_log.repair.mark_damaged(index)
    entry_log.drop_before(anchor)
    assert entry_log.damaged.ranges() == [(9, 9)]
