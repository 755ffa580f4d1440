"""Checkpoints: copies of the tables that follow what changes.

The checkpoint and abort files have RocketMQ's bytes and names.
"""

import struct
from pathlib import Path

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.store_paths import StorePaths, file_name, parse_file_name
from dledger.replica_records import AbortFile, Checkpoint, CheckpointFile
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.replica_folders import settings, usual, write_folder


def test_replay_of_many_changed_rows_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy is of everything, once the replay is over."""
    log = usual(60)
    root = write_folder(tmp_path / "n0", log.frames)
    store = ReplicaStore(OsDisk(), settings(root), StateTables)
    wanted = snapshot(store.tables)
    store.close(clean=True)
    Path(store.paths.snapshot).unlink()
    monkeypatch.setattr("dledger.replica_records.CUT_ROWS", 1)
    again = ReplicaStore(OsDisk(), settings(root), StateTables)
    assert again.replayed == len(log.frames)
    assert snapshot(again.tables) == wanted
    checkpoint = again.begin_checkpoint(len(log.frames))
    assert checkpoint is not None
    checkpoint.write()
    assert again.image.saved is not None
    index, data = again.image.saved
    assert index == len(log.frames)
    assert snapshot(again.decode(data)) == wanted
    again.close(clean=True)


PATHS = StorePaths("/store")


def test_checkpoint_bytes_are_five_big_endian_longs_in_4_kib() -> None:
    disk = CrashDisk()
    CheckpointFile(disk, PATHS.checkpoint).store(Checkpoint(10_000, 9_000, 0, 77, 88))
    content = disk.read("/store/checkpoint")
    assert len(content) == 4096
    assert content[:40] == struct.pack(">qqqqq", 10_000, 9_000, 0, 77, 88)
    assert not any(content[40:])


def test_checkpoint_survives_a_power_cut() -> None:
    disk = CrashDisk()
    file = CheckpointFile(disk, PATHS.checkpoint)
    file.store(Checkpoint(1, 2, 3, 4, 5))
    file.store(Checkpoint(6, 7, 8, 9, 10))
    left = disk.power_cut(lambda: False)
    assert CheckpointFile(left, PATHS.checkpoint).load() == Checkpoint(6, 7, 8, 9, 10)


def test_a_missing_or_short_checkpoint_is_all_zero() -> None:
    disk = CrashDisk()
    assert CheckpointFile(disk, PATHS.checkpoint).load() == Checkpoint()
    disk.create(PATHS.checkpoint, 39, reserve=False)
    assert CheckpointFile(disk, PATHS.checkpoint).load() == Checkpoint()
    CheckpointFile(disk, PATHS.checkpoint).store(Checkpoint(5))
    assert CheckpointFile(disk, PATHS.checkpoint).load() == Checkpoint(5)


def test_abort_file_holds_the_process_id() -> None:
    disk = CrashDisk()
    abort = AbortFile(disk, PATHS.abort)
    assert not abort.exists()
    abort.create(4711)
    assert disk.read("/store/abort") == b"4711"
    assert AbortFile(disk.power_cut(lambda: False), PATHS.abort).exists()
    abort.remove()
    assert not AbortFile(disk.power_cut(lambda: False), PATHS.abort).exists()


def test_layout_names_are_rocketmqs() -> None:
    assert PATHS.segment(1 << 30) == "/store/commitlog/00000000001073741824"
    assert PATHS.consume_queue("%RETRY%g", 3) == "/store/consumequeue/%RETRY%g/3"
    names = (PATHS.index, PATHS.checkpoint, PATHS.abort, PATHS.lock)
    assert names == ("/store/index", "/store/checkpoint", "/store/abort", "/store/lock")


def test_file_names_are_twenty_digits() -> None:
    assert parse_file_name(file_name(12345)) == 12345
    for name in ("12345", "0000000000000000000x", "00000000000000000000.tmp", "\u0660" * 20):
        assert parse_file_name(name) is None
