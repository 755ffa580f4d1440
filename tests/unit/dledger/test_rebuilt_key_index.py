"""A key index that is lost is made again from the log, the same to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path

from trio.testing import MockClock

from dledger.store import ReplicaStore
from tests.harness.groups import running_groups
from tests.harness.keyed_messages import ALWAYS, keyed


def index_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "index").iterdir())}


def replayed(store: ReplicaStore, last: int) -> ReplicaStore:
    while store.tables.applied_index < last:
        store.apply(store.tables.applied_index + 1)
    return store


async def test_a_rebuilt_key_index_is_the_one_that_was_written(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_groups(tmp_path, 1) as groups:
        leader = await groups.leader()
        # Entries of one record and of many take different ways into the index.
        for first, count in ((0, 1), (1, 300), (301, 2), (303, 60)):
            await leader.group.submit(keyed(first, count))
        last = leader.group.state.applied_index
        positions = {
            key: leader.group.key_index.query("T", key, 64, *ALWAYS)
            for key in ("id0", "id362", "k3", "all", "nothing")
        }
        assert [len(found) for found in positions.values()] == [1, 1, 52, 64, 0]
        leader.group.store.key_index.flush()
        leader.kill()
    root = tmp_path / "n0"
    written = index_files(root)
    assert len(written) == 1
    for lost in ("index", "raft/snapshot"):
        path = root / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    store = replayed(groups.open_store("n0"), last)
    for key, found in positions.items():
        assert store.key_index.query("T", key, 64, *ALWAYS) == found
    store.key_index.flush()
    assert list(index_files(root).values()) == list(written.values())
    store.close(clean=False)
