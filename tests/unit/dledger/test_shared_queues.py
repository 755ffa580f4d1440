"""A replica whose queues share a file: restarts, damage, retention."""

from pathlib import Path

import pytest

from dledger.commitlog.disk import OsDisk
from dledger.commitlog.mark import SLOT_STRIDE_BYTES
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.replica_folders import Writer, flip, settings, usual, write_folder


def opened(root: Path) -> ReplicaStore:
    return ReplicaStore(OsDisk(), settings(root), StateTables, queue_files_max=1)


def units(store: ReplicaStore) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    return {
        key: store.queues.queue(*key)
        .read(bounds.min_offset, bounds.max_offset - bounds.min_offset)
        .tolist()
        for key, bounds in store.tables.queues.items()
    }


@pytest.fixture
def log() -> Writer:
    return usual(60)


def test_shared_units_are_read_after_a_restart(tmp_path: Path, log: Writer) -> None:
    alone = opened(write_folder(tmp_path / "files", log.frames))
    shared = opened(write_folder(tmp_path / "shared", log.frames, queue_files=1))
    assert shared.replayed == alone.replayed == 0
    assert shared.queues.shared_bytes > 0
    assert units(shared) == units(alone) != {}
    for store in (alone, shared):
        store.close(clean=True)


@pytest.mark.parametrize("hurt", ["flipped", "missing", "no end"])
def test_lost_shared_units_are_derived_from_the_log(tmp_path: Path, log: Writer, hurt: str) -> None:
    root = write_folder(tmp_path / "n0", log.frames, queue_files=1)
    store = opened(root)
    wanted = units(store)
    store.close(clean=True)
    shared = next(p for p in (root / "consumequeue.shared").iterdir() if p.name.isdecimal())
    if hurt == "flipped":
        flip(shared, 300)
    elif hurt == "missing":
        shared.unlink()
    else:
        (root / "consumequeue.shared" / "end").write_bytes(b"?" * 4608)
    store = opened(root)
    assert store.replayed == len(log.frames)
    assert units(store) == wanted
    assert not store.damaged
    store.close(clean=True)


@pytest.mark.parametrize("slot", [0, 1])
def test_shared_units_survive_damage_to_the_record_of_their_end(log: Writer, slot: int) -> None:
    disk = CrashDisk()
    store = ReplicaStore(disk, settings(Path("/n0")), StateTables, queue_files_max=1)
    for frame in log.frames:
        store.log.append(frame)
    store.log.flush()
    for index in range(1, len(log.frames) + 1):
        store.apply(index)
        if index % 10 == 0 or index == len(log.frames):
            checkpoint(store)
    wanted = units(store)
    end = next(path for path in disk.files if path.endswith("consumequeue.shared/end"))
    disk.files[end].content[slot * SLOT_STRIDE_BYTES] ^= 1
    store = ReplicaStore(
        disk.power_cut(lambda: False), settings(Path("/n0")), StateTables, queue_files_max=1
    )
    assert store.replayed == 0
    assert units(store) == wanted
    store.close(clean=True)


def test_a_power_cut_while_queues_are_derived_again_loses_none(tmp_path: Path, log: Writer) -> None:
    disk = CrashDisk()

    def started(power_cut: bool = False) -> ReplicaStore:
        nonlocal disk
        if power_cut:
            disk = disk.power_cut(lambda: False)
        return ReplicaStore(disk, settings(Path("/n0")), StateTables, queue_files_max=1)

    store = started()
    for frame in log.frames:
        store.log.append(frame)
    store.log.flush()
    for index in range(1, len(log.frames) + 1):
        store.apply(index)
    checkpoint(store)
    wanted = units(store)
    shared = next(path for path in disk.files if ".shared/0" in path)
    disk.files[shared].content[300] ^= 1

    assert started(power_cut=True).replayed == len(log.frames)
    store = started(power_cut=True)
    assert store.replayed == len(log.frames), "what was derived was on no disk"
    assert units(store) == wanted
    log.no_op()
    store.log.append(log.frames[-1])
    store.log.flush()
    store.apply(len(log.frames))
    checkpoint(store)
    store = started(power_cut=True)
    assert store.replayed == 0
    assert units(store) == wanted


def checkpoint(store: ReplicaStore) -> None:
    taken = store.begin_checkpoint(store.log.last_index)
    assert taken is not None
    taken.write()


def test_unreadable_queue_file_is_derived_at_start(
    log: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.commitlog.consume_queue.SHARED_BYTES_MAX", 0)
    disk = CrashDisk()
    store = ReplicaStore(disk, settings(Path("/n0")), StateTables, queue_files_max=200)
    for frame in log.frames:
        store.log.append(frame)
    store.log.flush()
    for index in range(1, len(log.frames) + 1):
        store.apply(index)
    checkpoint(store)
    wanted, key = units(store), max(store.tables.queues)
    path = next(path for path in disk.files if f"/consumequeue/{key[0]}/{key[1]}/" in path)
    disk.files[path].unreadable.append((0, 512))
    with pytest.raises(OSError, match="nput/output"):
        units(store)
    store.close(clean=True)
    store = ReplicaStore(disk, settings(Path("/n0")), StateTables, queue_files_max=200)
    assert store.replayed == len(log.frames)
    assert units(store) == wanted
    store.close(clean=True)


def test_shared_units_before_the_floor_are_given_up(tmp_path: Path, log: Writer) -> None:
    root = write_folder(tmp_path / "n0", log.frames, queue_files=1)
    store = opened(root)
    before, key = store.queues.shared_bytes, max(store.tables.queues)
    tail = store.queues.queue(*key)
    bounds = store.tables.queues[key]
    tail.delete_before(bounds.max_offset - 1)
    assert store.queues.shared_bytes < before
    assert len(tail.read(bounds.max_offset - 1, 1)) == 1
    store.close(clean=True)
