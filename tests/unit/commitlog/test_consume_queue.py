import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger.commitlog import consume_queue, consume_queue_store
from dledger.commitlog.consume_queue_store import ConsumeQueueStore
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ForeignStoreError, InvariantBroken, OffsetOutOfRangeError
from dledger.commitlog.queue_unit import UNIT_BYTES, UNIT_DTYPE, Units
from dledger.commitlog.seams import DiskFile
from dledger.testing.crash_disk import CrashDisk, no_fault


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "consumequeue"


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let units go into files at once, as they do when there are too many shared ones."""
    monkeypatch.setattr(consume_queue, "SHARED_BYTES_MAX", 0)


def open_store(root: Path, units_per_file: int = 10) -> ConsumeQueueStore:
    return ConsumeQueueStore(OsDisk(), str(root), units_per_file)


def units(first: int, count: int) -> Units:
    made = np.zeros(count, UNIT_DTYPE)
    made["phy_offset"] = np.arange(first, first + count) * 100
    made["size"] = 100
    made["tags_code"] = -1
    return made


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_units_have_the_golden_bytes_in_rocketmqs_file(root: Path) -> None:
    store = ConsumeQueueStore(OsDisk(), str(root))
    unit = np.array([(1024, 213, 2598919)], UNIT_DTYPE)
    store.queue("T1", 3).put(0, unit)
    store.flush()
    (path,) = (root / "T1" / "3").iterdir()
    assert path.name == "0" * 20
    assert path.stat().st_size == 6_000_000
    assert path.read_bytes()[:40].hex() == "0000000000000400000000d5000000000027a807" + "0" * 40
    store.close()


def test_what_is_read_cannot_be_written_to(root: Path) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 12))
    for first, count in [(0, 5), (5, 7)]:
        assert not queue.read(first, count).flags.writeable
    store.close()


def test_putting_again_changes_nothing(root: Path) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 12))
    queue.put(3, units(3, 9))
    assert queue.read(0, 12).tolist() == units(0, 12).tolist()
    store.close()


@pytest.mark.usefixtures("unshared")
def test_queue_that_starts_inside_a_file_is_padded(root: Path) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(13, units(13, 2))
    (path,) = (root / "T1" / "0").iterdir()
    assert path.name == f"{200:020d}"
    assert path.read_bytes()[:60] == bytes.fromhex("00" * 8 + "7fffffff" + "00" * 8) * 3
    assert queue.read(13, 2).tolist() == units(13, 2).tolist()
    store.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (20, 1), (5, 20), (0, -1)])
def test_read_without_a_file_is_refused(root: Path, first: int, count: int) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 12))
    with pytest.raises(OffsetOutOfRangeError):
        queue.read(first, count)
    store.close()


@pytest.mark.usefixtures("unshared")
def test_truncate_removes_later_files(root: Path) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 35))
    queue.truncate_to(10)
    assert names(root / "T1" / "0") == ["0" * 20]
    with pytest.raises(OffsetOutOfRangeError):
        queue.read(10, 1)
    queue.put(10, units(500, 3))
    assert queue.read(9, 4).tolist() == [*units(9, 1).tolist(), *units(500, 3).tolist()]
    store.flush()
    store.close()


@pytest.mark.usefixtures("unshared")
def test_deleting_before_keeps_the_file_with_the_min_offset(root: Path) -> None:
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 35))
    queue.delete_before(19)
    assert names(root / "T1" / "0")[0] == f"{200:020d}"
    queue.delete_before(20)
    assert names(root / "T1" / "0")[0] == f"{400:020d}"
    assert queue.read(20, 15).tolist() == units(20, 15).tolist()
    store.close()


@pytest.mark.usefixtures("unshared")
def test_delete_removes_one_topic_only(root: Path) -> None:
    store = open_store(root)
    for topic in ("T1", "T10"):
        store.queue(topic, 0).put(0, units(0, 3))
    kept = store.queue("T1", 0).read(0, 3)
    store.delete_topic("T1")
    assert names(root) == ["T10"]
    assert [queue.topic for queue in store.queues()] == ["T10"]
    assert kept.tolist() == units(0, 3).tolist()
    store.queue("T1", 0).put(0, units(7, 1))
    assert store.queue("T1", 0).read(0, 1).tolist() == units(7, 1).tolist()
    store.flush()
    store.close()


@pytest.mark.usefixtures("unshared")
def test_open_files_are_bounded_and_all_are_readable(root: Path) -> None:
    store = ConsumeQueueStore(OsDisk(), str(root), 10, max_open_files=3)
    for queue_id in range(8):
        store.queue("T1", queue_id).put(0, units(queue_id, 2))
    assert len(store._files) == 3
    for queue_id in range(8):
        assert store.queue("T1", queue_id).read(0, 2).tolist() == units(queue_id, 2).tolist()
    assert len(store._files) == 3
    store.flush()
    store.close()


class RecordingDisk(OsDisk):
    """Keeps which files were flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.folders: list[str] = []

    def open(self, path: str) -> DiskFile:
        self.opened.append(path.rpartition("consumequeue/")[2])
        return super().open(path)

    def flush_dir(self, path: str) -> None:
        self.folders.append(path.rpartition("consumequeue/")[2])
        super().flush_dir(path)


def test_a_flush_covers_every_file_written_since_the_last_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consume_queue, "SHARED_BYTES_MAX", 0)
    disk = RecordingDisk()
    store = ConsumeQueueStore(disk, str(root), 10, max_open_files=1)
    disk.folders.clear()
    for queue_id in range(3):
        store.queue("T1", queue_id).put(0, units(0, 2))
    assert disk.folders == [], "a put waits for no folder"
    disk.opened.clear()
    store.flush()
    assert disk.opened == [f"T1/{queue_id}/{0:020d}" for queue_id in range(3)]
    assert disk.folders == [str(root), "T1", "T1/0", "T1/1", "T1/2"]
    store.queue("T1", 2).put(2, units(2, 1))
    disk.opened.clear()
    disk.folders.clear()
    store.flush()
    assert (disk.opened, disk.folders) == ([f"T1/2/{0:020d}"], [])
    store.close()


@pytest.mark.parametrize("flushed", [0, 1, 2])
def test_units_are_shared_while_as_many_files_are_open_as_may_be(root: Path, flushed: int) -> None:
    disk = RecordingDisk()
    store = ConsumeQueueStore(disk, str(root), 10, max_open_files=1)
    store.queue("T1", 0).put(0, units(0, 1))
    late = store.queue("T2", 5)
    disk.folders.clear()
    late.put(7, units(7, 2))
    if flushed > 0:
        job = store.begin_flush()
        if flushed > 1:
            job.run()
    late.put(9, units(9, 4))
    late.put(13, units(13, 1))
    assert flushed > 1 or (disk.opened, disk.folders) == ([], []), "no file is touched"

    assert late.read(7, 7).tolist() == units(7, 7).tolist()
    assert late.read(8, 3).tolist() == units(8, 3).tolist()
    assert late.read(13, 1).tolist() == units(13, 1).tolist()

    store.flush()
    assert late.read(7, 7).tolist() == units(7, 7).tolist()
    store.close()
    again = ConsumeQueueStore(OsDisk(), str(root), 10).queue("T2", 5)
    assert again.read(7, 7).tolist() == units(7, 7).tolist()
    assert not any(name.startswith("T2") for name in files(root))


def test_a_put_makes_no_file_and_the_flush_does(root: Path) -> None:
    disk = RecordingDisk()
    store = ConsumeQueueStore(disk, str(root), 10, max_open_files=9)
    queue, made = store.queue("T1", 0), f"T1/0/{0:020d}"
    disk.folders.clear()
    queue.put(0, units(0, 8))
    assert (files(root), disk.folders) == ([], [])
    job = store.begin_flush()
    queue.put(8, units(8, 1))
    job.run()
    assert files(root) == [made]
    store.flush()
    store.flush()
    assert store.shared_bytes == 0, "few queues have files of their own"

    queue.put(9, units(9, 1))
    assert (store.shared_bytes, files(root)) == (0, [made]), "what has a file goes there"
    queue.put(10, units(10, 2))
    assert (store.shared_bytes, files(root)) == (2 * UNIT_BYTES, [made]), "the next one has none"
    assert queue.read(0, 12).tolist() == units(0, 12).tolist()
    store.flush()
    assert files(root) == [made, f"T1/0/{10 * UNIT_BYTES:020d}"]
    store.close()
    again = ConsumeQueueStore(OsDisk(), str(root), 10).queue("T1", 0)
    assert again.read(0, 12).tolist() == units(0, 12).tolist()


def test_of_many_queues_only_as_many_get_files_as_may_be_open(root: Path) -> None:
    store = ConsumeQueueStore(OsDisk(), str(root), 10, max_open_files=2)
    for number in range(9):
        store.queue(f"T{number}", 0).put(0, units(number, 1))
    for _ in range(4):
        store.flush()
    assert files(root) == [f"T{number}/0/{0:020d}" for number in range(2)]
    assert store.shared_bytes == 7 * UNIT_BYTES
    store.close()


def test_shared_units_are_bounded_and_written_over_at_will(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consume_queue, "SHARED_BYTES_MAX", 4 * UNIT_BYTES)
    store = ConsumeQueueStore(OsDisk(), str(root), 10, max_open_files=1)
    store.queue("T1", 0).put(0, units(0, 1))
    late = store.queue("T2", 0)
    late.put(0, units(0, 3))
    assert files(root) == []
    late.put(3, units(3, 1))
    assert files(root) == [f"T2/0/{0:020d}"]
    late.put(1, units(50, 2))
    expected = [*units(0, 1).tolist(), *units(50, 2).tolist(), *units(3, 1).tolist()]
    assert late.read(0, 4).tolist() == expected
    store.flush()
    assert late.read(0, 4).tolist() == expected
    store.close()


def test_a_topic_deleted_while_its_units_are_written_leaves_none(root: Path) -> None:
    store = ConsumeQueueStore(OsDisk(), str(root), 10, max_open_files=1)
    store.queue("T1", 0).put(0, units(0, 1))
    store.queue("T2", 0).put(0, units(0, 2))
    job = store.begin_flush()
    store.delete_topic("T2")
    job.run()
    assert files(root) == [f"T1/0/{0:020d}"]
    store.queue("T2", 0).put(0, units(9, 1))
    store.flush()
    assert store.queue("T2", 0).read(0, 1).tolist() == units(9, 1).tolist()
    store.close()


def test_a_topic_deleted_after_a_failed_move_leaves_no_file() -> None:
    """A topic of the same name would be read out of files that are not there any more."""
    disk = CrashDisk()
    store = ConsumeQueueStore(disk, "/queues", 10)
    queue = store.queue("T", 0)
    queue.put(0, units(0, 10))
    store.flush()
    store.begin_flush()
    assert store.queue("T", 0).read(0, 10).tolist() == units(0, 10).tolist()
    queue.put(10, units(10, 1))

    def bad_sector(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(f"{10 * UNIT_BYTES:020d}"):
            raise OSError(errno.EIO, "bad sector", path)

    disk.fault = bad_sector
    store.flush()
    disk.fault = no_fault
    store.begin_flush().run()
    assert store.lost
    store.delete_topic("T")
    store.renew_lost()
    assert not store.lost, "a deleted topic has nothing to be put again"
    store.queue("T", 0).put(0, units(50, 10))
    store.flush()
    store.begin_flush().run()
    assert store.queue("T", 0).read(0, 10).tolist() == units(50, 10).tolist()


@pytest.mark.usefixtures("unshared")
def test_start_opens_only_the_queues_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_queue_store, "EAGER_QUEUES", 3)
    store = open_store(root)
    for queue_id in range(9):
        store.queue("T1", queue_id).put(0, units(queue_id, 2))
    store.flush()
    store.close()
    disk = RecordingDisk()
    again = ConsumeQueueStore(disk, str(root), 10)
    assert len(again.queues()) == len(disk.opened) == 3
    assert again.queue("T1", 8).read(0, 2).tolist() == units(8, 2).tolist()
    again.queue("T1", 8).put(2, units(2, 1))
    again.flush()
    assert "T1/8" in disk.folders
    again.close()


@pytest.mark.usefixtures("unshared")
def test_flush_goes_on_when_a_file_is_removed(root: Path) -> None:
    store = open_store(root)
    store.queue("T1", 0).put(0, units(0, 2))
    job = store.begin_flush()
    store.delete_topic("T1")
    job.run()
    assert names(root) == []
    store.close()


@pytest.mark.usefixtures("unshared")
def test_files_of_another_size_belong_to_another_store(root: Path) -> None:
    store = open_store(root)
    store.queue("T1", 0).put(0, units(0, 2))
    store.close()
    with pytest.raises(ForeignStoreError, match="200 bytes in place of 400"):
        open_store(root, units_per_file=20)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "a\0b"])
def test_a_topic_never_leaves_its_folder(root: Path, topic: str) -> None:
    with pytest.raises(InvariantBroken):
        open_store(root).queue(topic, 0)


def test_empty_file_of_a_crash_is_created_again(root: Path) -> None:
    folder = root / "T1" / "0"
    folder.mkdir(parents=True)
    (folder / ("0" * 20)).touch()
    store = open_store(root)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 3))
    assert queue.read(0, 3).tolist() == units(0, 3).tolist()
    store.flush()
    store.close()


def test_file_of_a_killed_process_survives_after_a_flush() -> None:
    disk = CrashDisk()
    ConsumeQueueStore(disk, "/queues", 10).queue("T1", 0).put(0, units(0, 3))
    # The process is killed here: its file is in the page cache, its name on no disk.
    store = ConsumeQueueStore(disk, "/queues", 10)
    store.queue("T1", 0).put(0, units(0, 5))
    store.flush()
    left = ConsumeQueueStore(disk.power_cut(lambda: False), "/queues", 10)
    assert left.queue("T1", 0).read(0, 5).tolist() == units(0, 5).tolist()


def test_a_new_file_survives_the_power_after_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_queue, "SHARED_BYTES_MAX", 0)
    disk = CrashDisk()
    store = ConsumeQueueStore(disk, "/data/queues", 10)
    store.queue("T1", 0).put(0, units(0, 3))
    store.flush()
    store.queue("T1", 0).put(3, units(3, 9))
    store.queue("T2", 1).put(0, units(0, 1))
    store.flush()
    left = ConsumeQueueStore(disk.power_cut(lambda: False), "/data/queues", 10)
    assert left.queue("T1", 0).read(0, 12).tolist() == units(0, 12).tolist()
    assert left.queue("T2", 1).read(0, 1).tolist() == units(0, 1).tolist()


class FewDescriptors(OsDisk):
    """A disk of a process that may have only a limited number of files open."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.open_now: set[int] = set()

    def _counted(self, get: Callable[[], DiskFile]) -> DiskFile:
        if len(self.open_now) >= self.most:
            raise OSError(errno.EMFILE, "Too many open files")
        file = get()
        self.open_now.add(id(file))
        close = file.close

        def closed() -> None:
            self.open_now.discard(id(file))
            close()

        return _Closing(file, closed)

    def open(self, path: str) -> DiskFile:
        return self._counted(lambda: super(FewDescriptors, self).open(path))

    def create(self, path: str, size: int, *, reserve: bool) -> DiskFile:
        return self._counted(
            lambda: super(FewDescriptors, self).create(path, size, reserve=reserve)
        )


class _Closing:
    def __init__(self, file: DiskFile, close: Callable[[], None]) -> None:
        self._file = file
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_more_queues_than_descriptors_are_written_and_read(tmp_path: Path) -> None:
    disk = FewDescriptors(5)
    store = ConsumeQueueStore(disk, str(tmp_path), units_per_file=100)
    for queue_id in range(60):
        store.queue("t", queue_id).put(0, units(queue_id, 3))
    for queue_id in range(60):
        assert store.queue("t", queue_id).read(0, 3).tolist() == units(queue_id, 3).tolist()
    store.close()
    assert not disk.open_now


@pytest.mark.usefixtures("unshared")
def test_no_descriptor_at_all_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    store = ConsumeQueueStore(FewDescriptors(0), str(tmp_path), units_per_file=100)
    with pytest.raises(OSError, match="Too many open files"):
        store.queue("t", 0).put(0, units(0, 1))


@pytest.mark.usefixtures("unshared")
def test_deletion_flushes_nothing_before_the_next_flush() -> None:
    disk = CrashDisk()
    store = ConsumeQueueStore(disk, "/consumequeue", 10)
    store.queue("T1", 0).put(0, units(0, 25))
    store.flush()
    disk.steps.clear()
    store.delete_topic("T1")
    assert {kind for kind, _ in disk.steps} == {"unlink"}
    store.flush()
    assert ("flush_dir", "/consumequeue") in disk.steps


def test_a_topic_may_be_deleted_twice_during_a_flush() -> None:
    disk = CrashDisk()
    store = ConsumeQueueStore(disk, "/consumequeue", 10)
    store.queue("T1", 0).put(0, units(0, 4))
    job = store.begin_flush()

    def delete_twice(kind: str, path: str) -> None:
        if kind == "flush" and "/T1/" in path:
            disk.fault = no_fault
            store.delete_topic("T1")
            store.queue("T1", 0).put(0, units(50, 2))
            store.delete_topic("T1")
            store.queue("T1", 0).put(0, units(70, 3))

    disk.fault = delete_twice
    job.run()
    store.flush()
    store = ConsumeQueueStore(disk.power_cut(lambda: False), "/consumequeue", 10)
    assert store.queue("T1", 0).read(0, 3).tolist() == units(70, 3).tolist()
    assert [path for path in disk.files if "/T1/" in path] == [f"/consumequeue/T1/0/{0:020d}"]


def test_shared_units_leave_a_file_with_a_bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_queue_store, "MOVED_TOGETHER", 0)
    disk = CrashDisk()
    store = ConsumeQueueStore(disk, "/consumequeue", 10)
    queue = store.queue("T1", 0)
    queue.put(0, units(0, 4))
    store.flush()
    (path,) = (path for path in disk.files if path.endswith("1"))
    disk.files[path].unreadable.append((512, 1024))
    queue.put(4, units(4, 30))
    store.flush()
    assert path not in disk.files
    again = ConsumeQueueStore(disk.power_cut(lambda: False), "/consumequeue", 10)
    assert again.queue("T1", 0).read(0, 34).tolist() == units(0, 34).tolist()
