"""A platform that lacks a call: the disk takes the nearest one and promises the same."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from commitlog import disk as real_disk
from commitlog.entry_log import EntryLog
from commitlog.errors import DiskFullError, FlushFailedError
from tests.harness.entry_frames import next_frame

SEGMENT_BYTES = 1 << 16


def load_again() -> ModuleType:
    """Load the module anew, so that it looks at the platform again."""
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
