"""Two alternating slots: whatever a torn write leaves, one whole value stays."""

import pytest

from dledger.commitlog.errors import (
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    InvariantBroken,
)
from dledger.commitlog.mark import (
    SLOT_HEADER_BYTES,
    SLOT_STRIDE_BYTES,
    SlotFile,
    decode_slot,
    encode_slot,
)
from dledger.testing.crash_disk import CrashDisk, disk_full, failing_flush, no_fault

PATH = "/d/slots"


def test_a_missing_file_has_no_value() -> None:
    assert SlotFile(CrashDisk(), PATH).load() is None


def test_the_newest_value_is_loaded_again() -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    for n in range(5):
        slots.store(b"value %d" % n)
        assert slots.load() == b"value %d" % n
        assert SlotFile(disk, PATH).load() == b"value %d" % n


def test_an_empty_value_is_not_no_value() -> None:
    disk = CrashDisk()
    SlotFile(disk, PATH).store(b"")
    assert SlotFile(disk, PATH).load() == b""


def test_a_stored_value_survives_a_power_cut() -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    slots.store(b"one")
    slots.store(b"two")
    assert SlotFile(disk.power_cut(lambda: False), PATH).load() == b"two"


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_a_write_torn_at_any_byte_keeps_the_older_value(stored: int) -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    for n in range(stored):
        slots.store(b"value %d" % n)
    before = disk.copy()
    slots.store(b"newest value")
    old, new = before.files[PATH].content, disk.files[PATH].content
    changed = [i for i in range(len(old)) if old[i] != new[i]]
    older = b"value %d" % (stored - 1)
    for cut in range(changed[0], changed[-1] + 1):
        for torn in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            if torn == new:
                continue
            damaged = before.copy()
            damaged.files[PATH].content[:] = torn
            assert SlotFile(damaged, PATH).load() in (older, b"newest value")
            assert torn != old or SlotFile(damaged, PATH).load() == older


def test_damage_to_one_slot_after_the_first_store_is_survived() -> None:
    disk = CrashDisk()
    SlotFile(disk, PATH).store(b"only")
    for start in (0, SLOT_STRIDE_BYTES):
        damaged = disk.copy()
        damaged.files[PATH].content[start + SLOT_HEADER_BYTES] ^= 1
        assert SlotFile(damaged, PATH).load() == b"only"


def test_damage_to_both_slots_is_reported_not_forgotten() -> None:
    disk = CrashDisk()
    SlotFile(disk, PATH).store(b"only")
    for start in (0, SLOT_STRIDE_BYTES):
        disk.files[PATH].content[start + SLOT_HEADER_BYTES] ^= 1
    with pytest.raises(CorruptStoreError, match="neither slot"):
        SlotFile(disk, PATH).load()


def test_a_first_store_cut_off_by_a_crash_leaves_no_value() -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    disk.fault = failing_flush("slots")
    with pytest.raises(FlushFailedError):
        slots.store(b"one")
    assert SlotFile(disk.power_cut(lambda: False), PATH).load() is None


def test_after_a_failed_flush_nothing_is_stored_any_more() -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    slots.store(b"one")
    disk.fault = failing_flush("slots")
    with pytest.raises(FlushFailedError):
        slots.store(b"two")
    disk.fault = lambda kind, path: None
    with pytest.raises(FlushFailedError, match="earlier flush"):
        slots.store(b"three")


@pytest.mark.parametrize("before", [None, b"one"])
def test_a_full_disk_leaves_the_value_as_it_was(before: bytes | None) -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    if before is not None:
        slots.store(before)
    disk.fault = disk_full(kind="write")
    with pytest.raises(DiskFullError):
        slots.store_twice(b"two")
    assert SlotFile(disk.power_cut(lambda: True), PATH).load() == before
    disk.fault = no_fault
    slots.store(b"three")
    again = SlotFile(disk.power_cut(lambda: False), PATH)
    assert (again.load(), again.is_doubled) == (b"three", before is None)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_full_disk_between_two_copies_ends_the_use(is_first: bool) -> None:
    disk = CrashDisk()
    slots = SlotFile(disk, PATH)
    if not is_first:
        slots.store(b"one")
    writes = iter(range(9))

    def full(kind: str, path: str) -> None:
        if kind == "write" and next(writes):
            raise DiskFullError(path)

    disk.fault = full
    with pytest.raises(FlushFailedError, match="one copy"):
        slots.store_twice(b"two")
    assert SlotFile(disk.power_cut(lambda: False), PATH).load() == b"two"


def test_a_value_that_does_not_fit_is_a_bug() -> None:
    slots = SlotFile(CrashDisk(), PATH, slot_bytes=64)
    slots.store(b"x" * (64 - SLOT_HEADER_BYTES))
    with pytest.raises(InvariantBroken):
        slots.store(b"x" * (65 - SLOT_HEADER_BYTES))


def test_slot_bytes_are_as_documented() -> None:
    assert encode_slot(7, b"abc").hex() == ("d1ed5107000000030000000000000007f7ff717e616263")
    assert decode_slot(encode_slot(7, b"abc") + bytes(9)) == (7, b"abc")
    assert decode_slot(b"") is None
