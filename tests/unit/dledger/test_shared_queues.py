"""A replica whose queues share a file: restarts, damage, retention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commitlog.disk import OsDisk
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from tests.harness.replica_folders import Writer, flip, settings, usual, write_folder


def opened(root: Path) -> ReplicaStore:
    return ReplicaStore(OsDisk(), replace(settings(root), queue_files_max=1), StateTables)


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
