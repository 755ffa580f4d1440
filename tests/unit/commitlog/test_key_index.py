import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from dledger.commitlog import key_index
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.java_hash import index_key_hash
from dledger.commitlog.key_index import FOREVER, MERGED_TOGETHER, KeyIndex, plan_merge
from dledger.commitlog.key_run import PAIRS_PER_BLOCK, Keys, Run
from dledger.testing.crash_disk import CrashDisk, disk_full, no_fault

ROOT = "/store/index"
ALWAYS = (0, FOREVER)


def opened(disk: CrashDisk, last: int = 0, first: int = 1) -> KeyIndex:
    index = KeyIndex(disk, ROOT)
    index.begin(first, last)
    return index


def put(index: KeyIndex, last: int, *keys: tuple[str, int]) -> None:
    """Put one entry: keys of T, each with the position of its record."""
    index.put(
        last,
        np.array([index_key_hash("T", key) for key, _ in keys], np.int32),
        np.array([position for _, position in keys], np.int64),
    )


def filled(disk: CrashDisk, runs: int, first: int = 1) -> KeyIndex:
    """Return an index with a run for each entry, which has key ``k<n>`` at position 10 n."""
    index = opened(disk, first - 1, first)
    for number in range(first, first + runs):
        put(index, number, (f"k{number}", 10 * number))
        index.flush()
    return index


def names(disk: CrashDisk) -> list[str]:
    return [
        f"{int(first)}-{int(last)}" for first, last in (n.split("-") for n in disk.list_dir(ROOT))
    ]


def path(first: int, last: int) -> str:
    return f"{ROOT}/{first:020d}-{last:020d}"


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def index(disk: CrashDisk) -> KeyIndex:
    return opened(disk)


def test_run_has_the_golden_bytes(disk: CrashDisk, index: KeyIndex) -> None:
    index.put(1, np.array([6, 1], np.int32), np.array([1024, 1024], np.int64))
    index.put(2, np.array([2, 6], np.int32), np.array([2048, 2048], np.int64))
    index.flush()
    fields = struct.pack(">qqqqqi", 1, 2, 4, 1024, 2048, 1)
    block = struct.pack(">iqiqiqiq", 1, 1024, 2, 2048, 6, 1024, 6, 2048)
    wanted = struct.pack(">II", 0xD1ED1D01, zlib.crc32(fields)) + fields
    assert disk.read(path(1, 2)) == wanted + block + struct.pack(">I", zlib.crc32(block))


def test_query_returns_the_newest_first_and_64_at_most(index: KeyIndex) -> None:
    for number in range(1, 101):
        put(index, number, ("a", number))
        if number % 40 == 0:
            index.flush()
    assert index.query("T", "a", 1000, *ALWAYS) == list(range(100, 36, -1))
    assert index.query("T", "a", 3, 30, 50) == [49, 48, 47]
    assert index.query("T", "a", -1, *ALWAYS) == index.query("T", "b", 9, *ALWAYS) == []


def test_key_that_a_record_has_twice_is_found_once(index: KeyIndex) -> None:
    put(index, 1, ("a", 100), ("a", 100), ("a", 200))
    assert index.query("T", "a", 9, *ALWAYS) == [200, 100]
    index.flush()
    assert list(index.candidates("T", "a", *ALWAYS)) == [200, 100, None, None]


def test_one_hash_is_found_in_all_its_blocks(disk: CrashDisk, index: KeyIndex) -> None:
    count = 3 * PAIRS_PER_BLOCK
    hashes = np.repeat(np.array([5, 7, 9], np.int32), count)
    index.put(1, hashes, np.arange(3 * count, dtype=np.int64))
    index.flush()
    index = opened(disk, 1)
    key_index_hash = dict.fromkeys((5, 7, 9))
    for at, key_hash in enumerate(key_index_hash):
        (run,) = index._runs
        found = [p for positions in run.walk(disk, key_hash) for p in positions]
        assert found == list(range(at * count, (at + 1) * count))[::-1]
    assert [p for key_hash in (0, 6, 10) for part in run.walk(disk, key_hash) for p in part] == []


def test_entries_that_were_put_are_not_put_again(index: KeyIndex) -> None:
    put(index, 1, ("a", 100))
    put(index, 1, ("a", 100))
    assert list(index.candidates("T", "a", *ALWAYS)) == [100]


def test_restart_puts_again_what_no_checkpoint_has(disk: CrashDisk) -> None:
    filled(disk, 3)
    index = opened(disk, 2)
    assert (names(disk), index.is_behind) == (["1-1", "2-2"], False)
    put(index, 3, ("k3", 30))
    assert index.query("T", "k3", 9, *ALWAYS) == [30]


def test_short_runs_become_one(disk: CrashDisk) -> None:
    index = filled(disk, MERGED_TOGETHER + 1)
    index.flush()  # removes what was merged
    assert names(disk) == ["1-4", "5-5"]
    assert [index.query("T", f"k{n}", 9, *ALWAYS) for n in range(1, 6)] == [
        [10 * n] for n in range(1, 6)
    ]


def test_paused_query_goes_on_after_a_merge(index: KeyIndex) -> None:
    for number in range(1, MERGED_TOGETHER + 1):
        put(index, number, ("a", number))
        index.flush()
    put(index, number + 1, ("a", number + 1))
    found = index.candidates("T", "a", *ALWAYS)
    assert next(found) == number + 1
    index.flush()
    put(index, number + 2, ("a", number + 2))
    index.flush()
    assert [at for at in found if at is not None] == list(range(number, 0, -1))


def test_crash_after_a_merge_leaves_each_key_once(disk: CrashDisk) -> None:
    index = filled(disk, MERGED_TOGETHER)
    index.begin_flush().run()
    assert len(names(disk)) == MERGED_TOGETHER + 1
    index = opened(disk, MERGED_TOGETHER)
    assert (names(disk), index.is_behind) == (["1-4"], False)
    assert index.query("T", "k2", 9, *ALWAYS) == [20]


def run(first: int, count: int) -> Run:
    return Run("", first, first, count, 0, 0, np.empty(0, np.int32))


@pytest.mark.parametrize(
    ("counts", "merged"),
    [
        ((9000, 9000, 9000), slice(0)),
        ((9000, 9000, 9000, 9000), slice(0, 4)),
        ((90_000, 9000, 9000, 9000, 9000), slice(1, 5)),
        ((1 << 20, 1 << 20, 1 << 20, 1 << 20), slice(0)),
        ((0, 1, 0, 4000, 1 << 19, 1, 1), slice(0, 5)),
    ],
)
def test_runs_are_merged_with_those_not_much_longer(counts: tuple[int, ...], merged: slice) -> None:
    runs = [run(number, count) for number, count in enumerate(counts)]
    assert plan_merge(runs) == runs[merged]


def test_runs_beside_a_gap_are_not_merged() -> None:
    assert plan_merge([run(1, 1), run(2, 1), run(4, 1), run(5, 1), run(6, 1)]) == []


@pytest.mark.parametrize(
    "damage", ["head", "fence", "block", "unreadable", "missing", "empty", "cut"]
)
def test_damaged_run_is_a_gap_until_it_is_filled(damage: str, disk: CrashDisk) -> None:
    filled(disk, 3)
    file = disk.files[path(2, 2)]
    if damage == "unreadable":
        file.unreadable.append((0, 512))
    elif damage == "missing":
        disk.unlink(path(2, 2))
    elif damage in ("empty", "cut"):
        disk.replace(path(2, 2), bytes(file.content[: 30 if damage == "cut" else 0]))
    else:
        file.content[{"head": 0, "fence": 50, "block": 55}[damage]] ^= 4
    index = opened(disk, 3)
    noted: list[str] = []
    index.on_unreadable = lambda path, _why: noted.append(path)
    assert index.query("T", "k2", 9, *ALWAYS) == []
    assert (index.gap, index.files_lost) == ((2, 2), damage != "missing")
    assert noted == ([path(2, 2)] if damage == "block" else [])
    assert opened(disk, 3).is_behind
    keys = Keys(2)
    keys.add(2, np.array([index_key_hash("T", "k2")], np.int32), np.array([20], np.int64))
    index.begin_fill(keys).run()
    index.end_flush()
    assert (index.is_behind, opened(disk.power_cut(lambda: False), 3).is_behind) == (False, False)
    assert index.query("T", "k2", 9, *ALWAYS) == [20]


def test_run_that_a_merge_cannot_read_is_given_up(disk: CrashDisk) -> None:
    index = filled(disk, MERGED_TOGETHER)
    disk.files[path(3, 3)].content[-1] ^= 1
    put(index, 5, ("k5", 50))
    index.flush()
    assert (index.gap, index.files_lost) == ((3, 3), 1)
    assert names(disk) == ["1-1", "2-2", "4-4", "5-5"]


def test_lost_index_is_a_gap_up_to_what_was_applied() -> None:
    assert opened(CrashDisk(), 7, 3).gap == (3, 7)


def test_foreign_files_are_removed(disk: CrashDisk) -> None:
    disk.replace(f"{ROOT}/20261120041111927", bytes(40))
    index = opened(disk)
    assert (disk.list_dir(ROOT), index.files_lost, index.is_behind) == ([], 0, False)


def test_retention_removes_runs_of_removed_entries(disk: CrashDisk, index: KeyIndex) -> None:
    for number in range(1, 7):
        put(index, number, (f"k{number}", 10 * number))
        if number % 2 == 0:
            index.flush()
    index.delete_before(4)
    assert (names(disk), index.is_behind) == (["3-4", "5-6"], False)
    assert index.query("T", "k2", 9, *ALWAYS) == []
    index.delete_before(2)
    assert index.gap == (2, 2)


def test_full_disk_loses_no_key(disk: CrashDisk, index: KeyIndex) -> None:
    put(index, 1, ("a", 100))
    disk.fault = disk_full(kind="replace")
    with pytest.raises(DiskFullError):
        index.flush()
    disk.fault = no_fault
    assert index.query("T", "a", 9, *ALWAYS) == [100]
    index.flush()
    assert opened(disk, 1).query("T", "a", 9, *ALWAYS) == [100]


def test_merge_without_space_keeps_no_key_back(disk: CrashDisk) -> None:
    index = filled(disk, MERGED_TOGETHER)
    put(index, 5, ("k5", 50))

    def fault(kind: str, file: str) -> None:
        if file == path(1, 4):
            raise DiskFullError(file)

    disk.fault = fault
    index.flush()
    assert names(disk) == ["1-1", "2-2", "3-3", "4-4", "5-5"]


def test_keys_put_during_a_flush_stay_in_memory(disk: CrashDisk, index: KeyIndex) -> None:
    put(index, 1, ("a", 100))
    job = index.begin_flush()
    put(index, 2, ("a", 200))
    job.run()
    index.end_flush()
    assert index.query("T", "a", 9, *ALWAYS) == [200, 100]
    assert names(disk) == ["1-1"]
    index.flush()
    assert names(disk) == ["1-1", "2-2"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "FLUSH_KEYS", 3)
    monkeypatch.setattr(key_index, "KEYS_MAX", 4)
    disk = CrashDisk()
    index = opened(disk)
    asked: list[int] = []
    index.on_long = lambda: asked.append(1)
    for number in range(1, 6):
        put(index, number, (f"k{number}", number))
    assert (asked, names(disk)) == ([1], ["1-4"])
    job = index.begin_flush()
    for number in range(6, 12):
        put(index, number, (f"k{number}", number))
    assert names(disk) == ["1-4"], "one flush at a time"
    job.run()
    put(index, 12, ("k12", 12))
    assert names(disk) == ["1-4", "5-5", "6-11"]


def test_no_descriptor_is_kept(tmp_path: Path) -> None:
    disk = OsDisk(4)
    index = KeyIndex(disk, str(tmp_path))
    index.begin(1, 0)
    for number in range(1, 31):
        put(index, number, ("a", number))
        index.flush()
    found = index.candidates("T", "a", *ALWAYS)
    assert (next(found), disk.descriptors) == (30, 1)
    assert [at for at in found if at is not None] == list(range(29, 0, -1))
    assert disk.descriptors == 0
