"""A platform that lacks a call: the disk takes the nearest one and guarantees the same."""

import errno
import fcntl
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dledger.commitlog import disk as real_disk
from dledger.commitlog.disk import OsDisk, OsFile
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import DiskFullError, FlushFailedError, InvariantBroken
from dledger.commitlog.seams import DiskFile
from tests.harness.entry_frames import next_frame


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def disk() -> OsDisk:
    return OsDisk()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "folder" / "file")


@pytest.mark.parametrize("reserve", [True, False])
def test_a_new_file_is_zero_filled_and_takes_space_when_reserved(
    disk: OsDisk, path: str, reserve: bool
) -> None:
    file = disk.create(path, 1 << 20, reserve=reserve)
    assert (file.path, file.size) == (path, 1 << 20)
    assert bytes(file.view(0, 1 << 20)) == bytes(1 << 20)
    assert (os.stat(path).st_blocks * 512 >= 1 << 20) == reserve
    file.close()


def test_nothing_of_a_closed_file_is_viewed(disk: OsDisk, path: str) -> None:
    file = disk.create(path, 100, reserve=False)
    file.close()
    with pytest.raises(InvariantBroken, match="closed"):
        file.view(0, 1)


def test_short_writes_are_continued(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.create(path, 100, reserve=False)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:3]), at))
    file.write_at(1, b"0123456789")
    assert bytes(file.view(0, 12)) == b"\x000123456789\0"
    file.close()


def test_disk_reports_no_space_at_write(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.create(path, 100, reserve=False)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(DiskFullError) as raised:
        file.write_at(0, b"abc")
    assert raised.value.retriable
    assert raised.value.outcome == "not_stored"
    file.close()


def test_disk_reports_no_space_at_allocation(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.commitlog.disk._reserve", failing(errno.ENOSPC))
    with pytest.raises(DiskFullError):
        disk.create(path, 100, reserve=True)
    assert not disk.exists(path)


@pytest.mark.parametrize("missing", [None, failing(errno.EOPNOTSUPP)])
def test_where_space_cannot_be_reserved_the_file_is_sparse(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch, missing: Callable[..., int] | None
) -> None:
    monkeypatch.setattr("dledger.commitlog.disk._reserve", missing)
    file = disk.create(path, 4096, reserve=True)
    assert os.path.getsize(path) == 4096
    file.close()


def test_disk_reports_a_failed_flush(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.create(path, 100, reserve=False)
    monkeypatch.setattr("dledger.commitlog.disk._data_sync", failing(errno.EIO))
    with pytest.raises(FlushFailedError) as raised:
        file.flush()
    assert raised.value.outcome == "unknown"
    file.close()
    with pytest.raises(FlushFailedError):
        file.flush()
    with pytest.raises(FlushFailedError):
        disk.replace(path, b"new")
    assert disk.read(path) == bytes(100)


def test_close_waits_for_a_flush_under_way(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.create(path, 100, reserve=False)
    assert isinstance(file, OsFile)
    alive = []

    def sync(fd: int) -> None:
        file.close()
        alive.append(os.fstat(fd).st_size)

    monkeypatch.setattr("dledger.commitlog.disk._data_sync", sync)
    fd = file._fd
    file.flush()
    assert alive == [100]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_flush_covers_closed_files(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(
        "dledger.commitlog.disk._data_sync", lambda fd: flushed.append(os.fstat(fd).st_ino)
    )
    file = disk.create(path, 100, reserve=False)
    file.close()
    file.flush()
    assert flushed == [os.stat(path).st_ino]
    disk.unlink(path)
    file.flush()
    assert len(flushed) == 1


def test_a_replacement_without_space_keeps_the_old_content(
    disk: OsDisk, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.replace(path, b"old")
    with monkeypatch.context() as full:
        full.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(DiskFullError):
            disk.replace(path, b"new")
    assert disk.read(path) == b"old"
    assert disk.list_dir(os.path.dirname(path)) == ["file"]


def test_disk_names_the_file_that_cannot_be_read(disk: OsDisk) -> None:
    unmapped = "/proc/self/mem"  # its first byte is not mapped: a real EIO
    with pytest.raises(OSError, match=unmapped) as caught:
        disk.read(unmapped)
    assert caught.value.errno == errno.EIO


def test_space_left_is_known_before_a_folder_exists(disk: OsDisk, path: str) -> None:
    assert disk.free_bytes(path) > 0


def test_disk_ratio_equals_that_of_df(
    disk: OsDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 100 blocks, 70 of them free, 50 for everybody: 30 are used, 20 are the superuser's.
    blocks = SimpleNamespace(f_frsize=4096, f_bsize=4096, f_blocks=100, f_bfree=70, f_bavail=50)
    monkeypatch.setattr(os, "statvfs", lambda _path: blocks)
    free, total = disk.free_bytes(str(tmp_path)), disk.total_bytes(str(tmp_path))
    assert 1 - free / total == 30 / 80


def test_an_empty_file_has_an_empty_view(disk: OsDisk, path: str) -> None:
    file = disk.create(path, 0, reserve=True)
    assert bytes(file.view(0, 0)) == b""
    file.close()


def test_others_of_the_machine_may_read_nothing(disk: OsDisk, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk.create(f"{tmp_path}/store/commitlog/0", 10, reserve=False).close()
        disk.replace(f"{tmp_path}/store/config", b"x")
        disk.lock(f"{tmp_path}/store/lock").release()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "store").rglob("*")}
    assert modes == {"commitlog": 0o750, "0": 0o640, "config": 0o640, "lock": 0o640}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o750


def test_flush_of_many_files_skips_removed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = OsDisk()
    paths = [f"{tmp_path}/a{number}/file" for number in range(3)]
    for path in paths[:2]:
        disk.make_dir(os.path.dirname(path), durably=False)
        disk.create(path, 10, reserve=False).close()
    folders = [os.path.dirname(path) for path in paths]
    disk.flush_all(paths, folders)
    disk.flush_all([], [])
    monkeypatch.setattr("dledger.commitlog.disk._sync_file_system", None)
    disk.flush_all(paths, folders)
    monkeypatch.setattr("dledger.commitlog.disk._sync_file_system", lambda _fd: -1)
    with pytest.raises(FlushFailedError, match="failed"):
        disk.flush_all(paths, folders)


def filled(disk: OsDisk, folder: Path, count: int) -> list[DiskFile]:
    """Return *count* files, each with its number in all its bytes."""
    files = []
    for number in range(count):
        file = disk.create(str(folder / f"{number:02}"), 4096, reserve=False)
        file.write_at(0, bytes([number]) * 4096)
        files.append(file)
    return files


def test_files_beyond_the_limit_share_descriptors(tmp_path: Path) -> None:
    disk = OsDisk(8)
    files = filled(disk, tmp_path, 40)
    assert disk.descriptors == 8
    kept = files[3].view(10, 20)
    for number, file in enumerate(files):
        assert file.view(0, 2) == bytes([number]) * 2
        assert file.read(4094, 2) == bytes([number]) * 2
        file.write_at(7, b"x")
        file.flush()
        assert disk.descriptors <= 8
    assert kept == bytes([3]) * 20, "a view outlives the descriptors of its file"
    for file in files:
        file.close()
    assert disk.descriptors == 0
    assert {disk.read(file.path)[7:8] for file in files} == {b"x"}


def test_the_file_in_use_keeps_its_descriptors(tmp_path: Path) -> None:
    disk = OsDisk(8)
    first, *others = filled(disk, tmp_path, 10)
    assert isinstance(first, OsFile)
    for file in others:
        first.write_at(0, b"busy")
        before = first._fd
        file.read(0, 1)
        file.view(0, 1)
        assert first._fd == before


def test_no_descriptor_left_makes_files_give_theirs_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = OsDisk()
    files = filled(disk, tmp_path, 6)
    really_open, refused = os.open, []

    def open_one(path: str, flags: int, mode: int = 0o777) -> int:
        if disk.descriptors > 3:
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return really_open(path, flags, mode)

    monkeypatch.setattr("os.open", open_one)
    disk.flush_dir(str(tmp_path))
    assert disk.descriptors == 3
    assert len(refused) == 3
    assert [file.read(0, 1) for file in files] == [bytes([number]) for number in range(6)]
    disk.replace(str(tmp_path / "replaced"), b"new")
    assert disk.read(str(tmp_path / "replaced")) == b"new"


def test_open_without_descriptors_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.open", failing(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        OsDisk().open(str(tmp_path / "f"))


def test_a_file_that_was_removed_meanwhile_reads_as_closed(tmp_path: Path) -> None:
    disk = OsDisk(2)
    files = filled(disk, tmp_path, 5)
    disk.unlink(files[0].path)
    files[0].flush()
    with pytest.raises(OSError, match="read of a closed file"):
        files[0].read(0, 1)


def test_threads_share_few_descriptors(tmp_path: Path) -> None:
    disk = OsDisk(4)
    files = filled(disk, tmp_path, 12)

    def read(start: int) -> list[bytes]:
        return [files[(start + step) % 12].read(100, 1) for step in range(600)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(4)))
    for start, parts in enumerate(found):
        assert parts == [bytes([(start + step) % 12]) for step in range(600)]
    assert disk.descriptors <= 4


SEGMENT_BYTES = 1 << 16


def load_again() -> ModuleType:
    """Load the module again, so that it reads the platform again."""
    assert real_disk.__file__ is not None
    spec = importlib.util.spec_from_file_location("disk_of_another_platform", real_disk.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The disk of a platform without `posix_fallocate` and `fdatasync`."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(os, "fdatasync")
    return load_again()


def fill(module: ModuleType, root: Path) -> list[bytes]:
    log = EntryLog.open(module.OsDisk(), str(root), segment_bytes=SEGMENT_BYTES, trusted=None)
    frames = []
    for _ in range(60):
        if log.allocator.needs_reserve:
            log.allocator.reserve_next()
        frames.append(next_frame(log, 3_000, term=1))
        log.append(frames[-1])
    ticket = log.begin_flush()
    assert ticket is not None
    ticket.run()
    assert log.complete_flush(ticket)
    assert log.durable_index == 60
    log.close()
    return frames


def test_a_log_is_the_same_without_both_calls(poor: ModuleType, tmp_path: Path) -> None:
    frames = fill(poor, tmp_path / "poor")
    assert fill(real_disk, tmp_path / "rich") == frames
    for folder in ("poor", "rich"):
        segments = sorted((tmp_path / folder / "commitlog").iterdir())
        assert len(segments) > 2
        assert {path.stat().st_size for path in segments} == {SEGMENT_BYTES}
        log = EntryLog.open(
            real_disk.OsDisk(), str(tmp_path / folder), segment_bytes=SEGMENT_BYTES, trusted=None
        )
        assert [bytes(log.frame(index)) for index in range(1, 61)] == frames
        log.close()


def test_without_fdatasync_every_flush_is_a_whole_fsync(
    poor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    file = poor.OsDisk().create(str(tmp_path / "file"), 100, reserve=False)
    flushed.clear()
    file.write_at(0, b"x")
    file.flush()
    assert len(flushed) == 1
    file.close()


def test_flush_uses_full_fsync_where_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    module = load_again()
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: asked.append(command))
    file = module.OsDisk().create(str(tmp_path / "file"), 100, reserve=False)
    file.flush()
    assert asked == [51]
    file.close()


def test_failed_fsync_is_reported_as_fdatasync(
    poor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = poor.OsDisk().create(str(tmp_path / "file"), 100, reserve=False)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FlushFailedError):
        file.flush()
    file.close()


def test_no_fallocate_reports_no_space_at_write(
    poor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = poor.OsDisk().create(str(tmp_path / "file"), 1 << 20, reserve=True)
    assert (tmp_path / "file").stat().st_blocks == 0

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError):
        file.write_at(0, b"x")
    file.close()
