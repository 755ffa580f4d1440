from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dledger.commitlog.disk import OsDisk, OsFile
from dledger.commitlog.errors import CorruptStoreError, DiskFullError, ForeignStoreError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import (
    ENTRIES_PER_FILE,
    PLAIN_ENTRIES,
    SLOTS_PER_FILE,
    KeyIndex,
    file_name,
)
from dledger.testing.crash_disk import CrashDisk, disk_full, no_fault

TIME_MS = 1_795_147_871_927
ALWAYS = (0, 2**62)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "index"


def open_index(root: Path, slots: int = 7, max_entries: int = 20) -> KeyIndex:
    return KeyIndex(OsDisk(), str(root), slots, max_entries)


def put(index: KeyIndex, *keys: tuple[str, int, int]) -> None:
    """Put (key of T1, physical offset, store time)."""
    index.put_bulk(
        np.array([index_key_hash("T1", key) for key, _, _ in keys], np.int32),
        np.array([phy_offset for _, phy_offset, _ in keys], np.int64),
        np.array([time_ms for _, _, time_ms in keys], np.int64),
    )


def put_hashes(index: KeyIndex, hashes: list[int], first_phy_offset: int = 100) -> None:
    count = len(hashes)
    index.put_bulk(
        np.array(hashes, np.int32),
        np.arange(first_phy_offset, first_phy_offset + count, dtype=np.int64),
        np.full(count, TIME_MS, np.int64),
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_file_is_named_by_its_first_store_time_in_local_time() -> None:
    assert file_name(TIME_MS) == "20261120041111927"
    assert file_name(0) == "19700101000000000"
    assert file_name(TIME_MS, lambda _: 8 * 3_600_000) == "20261120121111927"
    assert file_name(0, lambda _: -3_600_000) == "19700101000000000"


def test_names_go_on_rising_when_local_time_goes_back(root: Path) -> None:
    offsets_ms = [2 * 3_600_000, 3_600_000]
    index = KeyIndex(OsDisk(), str(root), 4, 2, utc_offset=lambda _: offsets_ms.pop(0))
    put(index, ("a", 100, TIME_MS))
    put(index, ("b", 200, TIME_MS + 5))
    assert names(root) == ["20261120061111927", "20261120061111928"]
    index.flush()
    index.close()
    # What was named in another zone before is still in order.
    again = open_index(root, 4, 2)
    put(again, ("c", 300, TIME_MS + 10))
    assert names(root)[-1] == "20261120061111929"
    again.close()


def test_a_file_has_rocketmqs_size(root: Path) -> None:
    index = open_index(root, SLOTS_PER_FILE, ENTRIES_PER_FILE)
    put(index, ("a", 100, TIME_MS))
    assert (root / "20261120041111927").stat().st_size == 420_000_040
    index.close()


def test_header_slots_and_entries_have_the_golden_bytes(root: Path) -> None:
    index = open_index(root, slots=4, max_entries=5)
    index.put_bulk(
        np.array([6, 1, 2], np.int32),
        np.array([1024, 1024, 2048], np.int64),
        np.array([TIME_MS, TIME_MS, TIME_MS + 2999], np.int64),
    )
    index.flush()
    index.close()
    raw = (root / file_name(TIME_MS)).read_bytes()
    header = struct.pack(">qqqqii", TIME_MS, TIME_MS + 2999, 1024, 2048, 2, 4)
    slots = struct.pack(">iiii", 0, 2, 3, 0)
    entries = (
        bytes(20)
        + struct.pack(">iqii", 6, 1024, 0, 0)
        + struct.pack(">iqii", 1, 1024, 0, 0)
        + struct.pack(">iqii", 2, 2048, 2, 1)
        + bytes(20)
    )
    assert raw == header + slots + entries


def test_a_query_keeps_to_its_time_window(root: Path) -> None:
    index = open_index(root)
    put(index, *[("a", 100 * i, TIME_MS + 1000 * i) for i in range(1, 6)])
    first = TIME_MS + 1000
    assert index.query("T1", "a", 32, first + 1000, first + 3000) == [400, 300, 200]
    assert index.query("T1", "a", 32, first + 1, first + 999) == []
    assert index.query("T1", "a", 32, first + 5000, first + 6000) == []
    assert index.query("T1", "a", 32, 0, first - 1) == []
    index.close()


def test_a_query_never_returns_more_than_64(root: Path) -> None:
    index = open_index(root, max_entries=200)
    put(index, *[("a", i, TIME_MS) for i in range(1, 101)])
    assert index.query("T1", "a", 1000, *ALWAYS) == list(range(100, 36, -1))
    index.close()


def test_a_query_stops_at_a_file_that_began_before_its_window(root: Path) -> None:
    index = open_index(root, max_entries=4)
    put(index, *[("a", i, TIME_MS + 1000 * i) for i in range(1, 9)])
    second_file_ms = TIME_MS + 4000
    assert index.query("T1", "a", 32, second_file_ms, 2**62) == [8, 7, 6, 5, 4]
    assert index.query("T1", "a", 32, second_file_ms + 1, 2**62) == [8, 7, 6, 5]
    index.close()


def test_what_is_put_again_is_skipped(root: Path) -> None:
    index = open_index(root)
    keys = [("a", 100, TIME_MS), ("b", 100, TIME_MS), ("a", 200, TIME_MS)]
    put(index, *keys)
    put(index, *keys, ("a", 300, TIME_MS))
    assert index.query("T1", "a", 32, *ALWAYS) == [300, 200, 100]
    assert index.query("T1", "b", 32, *ALWAYS) == [100]
    assert index.end_phy_offset == 300
    index.close()


def test_a_message_that_has_a_key_twice_is_found_once(root: Path) -> None:
    index = open_index(root)
    put(index, *[(key, at, TIME_MS) for at in (100, 200) for key in ("a", "b", "a", "a")])
    assert index.query("T1", "a", 32, *ALWAYS) == [200, 100]
    index.close()


def test_nothing_put_makes_no_file(root: Path) -> None:
    index = open_index(root)
    put_hashes(index, [])
    index.flush()
    assert index.end_phy_offset == -1
    assert not root.exists()


def test_a_file_in_which_nothing_was_flushed_is_removed(root: Path) -> None:
    index = open_index(root)
    put(index, ("a", 1, TIME_MS))
    again = open_index(root)
    assert names(root) == []
    assert again.end_phy_offset == -1
    index.close()


def test_truncating_forgets_entries_at_and_after_the_offset(root: Path) -> None:
    index = open_index(root, max_entries=6)
    put(index, *[("ab"[i % 2], 10 * i, TIME_MS + 1000 * i) for i in range(1, 15)])
    index.flush()
    index.truncate_beyond(80)
    assert index.query("T1", "a", 32, *ALWAYS) == [60, 40, 20]
    assert index.query("T1", "b", 32, *ALWAYS) == [70, 50, 30, 10]
    assert index.end_phy_offset == 70
    put(index, ("a", 75, TIME_MS + 8000))
    index.flush()
    index.close()
    again = open_index(root, max_entries=6)
    assert again.query("T1", "a", 32, *ALWAYS) == [75, 60, 40, 20]
    assert len(names(root)) == 2
    again.close()


def test_truncating_everything_leaves_no_file(root: Path) -> None:
    index = open_index(root, max_entries=4)
    put(index, *[("a", i, TIME_MS) for i in range(1, 9)])
    index.truncate_beyond(1)
    assert (names(root), index.query("T1", "a", 32, *ALWAYS)) == ([], [])
    index.flush()
    index.close()


def test_files_before_the_kept_log_are_removed(root: Path) -> None:
    index = open_index(root, max_entries=4)
    put(index, *[("a", i, TIME_MS) for i in range(1, 9)])
    index.delete_before(3)
    assert len(names(root)) == 3
    index.delete_before(4)
    assert len(names(root)) == 2
    assert index.query("T1", "a", 32, *ALWAYS) == [8, 7, 6, 5, 4]
    index.close()


@pytest.mark.parametrize("count", [1, 2 * PLAIN_ENTRIES])
def test_a_full_disk_loses_no_older_key_of_its_slot(
    root: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    index = open_index(root, slots=1, max_entries=40)
    put(index, ("a", 1, TIME_MS))
    more = [("b", 2 + number, TIME_MS) for number in range(count)]

    def no_space(*_: object) -> None:
        raise DiskFullError("no space left")

    with monkeypatch.context() as full:
        full.setattr(OsFile, "write_at", no_space)
        with pytest.raises(DiskFullError):
            put(index, *more)
    put(index, *more)
    assert index.query("T1", "a", 32, *ALWAYS) == [1]
    assert len(index.query("T1", "b", 32, *ALWAYS)) == count
    index.close()


def test_empty_file_of_a_crash_is_created_again(root: Path) -> None:
    root.mkdir()
    (root / file_name(TIME_MS)).touch()
    index = open_index(root)
    put(index, ("a", 1, TIME_MS))
    assert index.query("T1", "a", 32, *ALWAYS) == [1]
    index.close()


def test_files_made_with_other_settings_are_refused(root: Path) -> None:
    index = open_index(root)
    put(index, ("a", 1, TIME_MS))
    index.flush()
    index.close()
    with pytest.raises(ForeignStoreError, match="other"):
        open_index(root, slots=8)


def test_a_header_that_cannot_be_right_is_refused(root: Path) -> None:
    index = open_index(root)
    put(index, ("a", 1, TIME_MS))
    index.flush()
    index.close()
    path = root / file_name(TIME_MS)
    raw = bytearray(path.read_bytes())
    struct.pack_into(">i", raw, 36, 21)
    path.write_bytes(raw)
    with pytest.raises(CorruptStoreError, match="claims 21 entries"):
        open_index(root)


@pytest.mark.parametrize("previous", [1, 2, 3, -1, 99])
def test_a_damaged_link_ends_the_walk(root: Path, previous: int) -> None:
    index = open_index(root)
    put(index, ("a", 1, TIME_MS), ("a", 2, TIME_MS))
    index.flush()
    path = root / file_name(TIME_MS)
    raw = bytearray(path.read_bytes())
    struct.pack_into(">i", raw, 40 + 7 * 4 + 2 * 20 + 16, previous)
    path.write_bytes(raw)
    found = index.query("T1", "a", 32, *ALWAYS)
    assert found == ([2, 1] if previous == 1 else [2])
    index.close()


def test_a_file_ends_behind_all_keys_of_a_record() -> None:
    """What is put again begins behind the newest record that has a key in the index."""
    disk = CrashDisk()
    index = KeyIndex(disk, "/index", 7, 4)
    keys = [("a", 100, TIME_MS), ("b", 200, TIME_MS), ("c", 300, TIME_MS), ("d", 300, TIME_MS)]
    put(index, keys[0])
    disk.fault = disk_full()
    with pytest.raises(DiskFullError):
        put(index, *keys)
    disk.fault = no_fault
    put(index, *keys)
    found = {key: index.query("T1", key, 9, *ALWAYS) for key, _, _ in keys}
    assert found == {"a": [100], "b": [200], "c": [300], "d": [300]}


def test_a_record_with_more_keys_than_a_file_takes_several() -> None:
    index = KeyIndex(CrashDisk(), "/index", 7, 4)
    put(index, ("a", 50, TIME_MS), *((f"k{n}", 100, TIME_MS) for n in range(8)))
    assert [index.query("T1", f"k{n}", 9, *ALWAYS) for n in range(8)] == [[100]] * 8
    assert index.query("T1", "a", 9, *ALWAYS) == [50]
