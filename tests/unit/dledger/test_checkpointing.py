"""Checkpoints: copies of the tables that follow what changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from commitlog.disk import OsDisk
from dledger.state.snapshot import snapshot
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
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
    monkeypatch.setattr("dledger.checkpointing.CUT_ROWS", 1)
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
