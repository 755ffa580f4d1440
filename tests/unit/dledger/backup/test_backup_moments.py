"""Backups at bad moments: power fails, the source moves on meanwhile."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dledger.backup.create import create
from dledger.backup.manifest import BackupDamagedError
from dledger.backup.restore import restore
from dledger.backup.source import Source
from dledger.backup.verify import verify
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.entry import parse_header
from dledger.commitlog.mark import SlotFile
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.journal import parse_term_vote
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.disk_files import folder_on
from tests.harness.replica_folders import SEGMENT_BYTES, settings
from tests.unit.dledger.backup.test_backup import (
    FRAMES,
    OWNER,
    at,
    back_up,
    content,
    opened,
    restored,
    source_folder,
)

pytestmark = pytest.mark.slow

OLD = 20
"""Entries of the backup that was there before."""

CONFIG_BYTES_MAX = 400
"""No list of one member is as long."""


def nothing() -> bool:
    return False


def on(disk: CrashDisk, source: Path) -> None:
    create(folder_on(disk, "/bk"), Source(OsDisk(), str(source)), made_at_ms=1)


def test_finished_backup_survives_a_power_cut(tmp_path: Path) -> None:
    disk = CrashDisk()
    for commit in (OLD, len(FRAMES)):
        on(disk, source_folder(tmp_path / "n0", commit))
        assert verify(folder_on(disk.power_cut(nothing), "/bk")).entries == commit


def test_power_cut_leaves_the_earlier_backup_or_the_new(tmp_path: Path) -> None:
    before, rng, cuts = CrashDisk(), random.Random(1), list[CrashDisk]()
    on(before, source_folder(tmp_path / "n0", OLD))
    disk = before.copy()

    def cut(_kind: str, _path: str) -> None:
        cuts.append(disk.power_cut(nothing))
        cuts.append(disk.power_cut(lambda: rng.random() < 0.5))

    disk.fault = cut
    on(disk, source_folder(tmp_path / "n0"))
    found = [verify(folder_on(each, "/bk")).entries for each in cuts]
    assert set(found) == {OLD, len(FRAMES)}
    assert found == sorted(found), "no cut brings the earlier one back"


def test_restored_folder_survives_a_power_cut(tmp_path: Path) -> None:
    disk = CrashDisk()
    on(disk, source_folder(tmp_path / "n0"))
    restore(folder_on(disk, "/bk"), disk, "/new", owner=OWNER, rng=random.Random(1))
    store = ReplicaStore(disk.power_cut(nothing), settings(Path("/new")), StateTables)
    assert not store.damaged
    assert (store.log.first_index, store.log.last_index) == (1, len(FRAMES) + 1)
    assert store.restored_commit_index == len(FRAMES)
    for index in range(1, len(FRAMES) + 1):
        assert bytes(store.log.frame(index)) == bytes(FRAMES[index - 1])


def test_restored_log_goes_on_behind_a_full_segment(tmp_path: Path) -> None:
    """The entry of the new list of members does not fit behind the last one."""
    ends = {parse_header(frame).index: parse_header(frame).end_position for frame in FRAMES}
    full = [
        index
        for index, end in ends.items()
        if SEGMENT_BYTES - end % SEGMENT_BYTES < CONFIG_BYTES_MAX and index > 2
    ]
    segments = set()
    for commit in full:
        back_up(source_folder(tmp_path / "n0", commit), tmp_path / f"bk{commit}")
        restored(tmp_path / f"bk{commit}", tmp_path / f"new{commit}")
        with opened(tmp_path / f"new{commit}") as store:
            assert store.log.last_index == commit + 1
            begin = store.log.position_at(commit + 1)
            for index in range(store.tables.applied_index + 1, commit + 2):
                store.apply(index)
            taken = store.begin_checkpoint(commit + 1)
            assert taken is not None
            taken.write()
        back_up(tmp_path / f"new{commit}", tmp_path / f"again{commit}")
        assert verify(at(tmp_path / f"again{commit}")).entries == commit + 1
        segments.add(begin // SEGMENT_BYTES - (ends[commit] - 1) // SEGMENT_BYTES)
    assert segments == {0, 1}, "one that fits, and one that does not"


def test_restored_member_votes_in_no_term_of_its_log(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    restored(tmp_path / "bk", tmp_path / "new")
    slots = SlotFile(OsDisk(), StorePaths(str(tmp_path / "new")).vote)
    payload = slots.load()
    slots.close()
    assert payload is not None
    with opened(tmp_path / "new") as store:
        newest = store.log.term_at(store.log.last_index)
    assert parse_term_vote(payload) == (newest, None)
    assert newest == parse_header(FRAMES[-1]).term + 1


class MovingDisk(OsDisk):
    """Does something once, in front of one of the reads of files of a member's state."""

    def __init__(self, look: int, act: Callable[[], object]) -> None:
        super().__init__()
        self._look = look
        self._act = act

    def _before(self, path: str) -> None:
        if "/raft/" in path:
            self._look -= 1
            if self._look == 0:
                self._act()

    def read(self, path: str) -> bytes:
        self._before(path)
        return super().read(path)

    def exists(self, path: str) -> bool:
        self._before(path)
        return super().exists(path)

    def is_past(self) -> bool:
        """Return whether there were not as many reads."""
        return self._look > 0


STATE = ("raft/snapshot", "raft/commit_mark", "raft/anchor")
"""In the order in which a checkpoint with retention writes them; entries are there before."""


def checkpoint(folder: Path, to: Path, steps: int) -> None:
    """Let a checkpoint of the member in *folder* come so far."""
    entries = [str(path.relative_to(to)) for path in sorted((to / "commitlog").iterdir())]
    for name in (*entries, *STATE[:steps]):
        (folder / name).write_bytes((to / name).read_bytes())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_backup_of_a_source_that_moves_on_is_whole(tmp_path: Path, steps: int) -> None:
    """A checkpoint with retention comes between any two reads of a backup in the folder."""
    later = source_folder(tmp_path / "later", floor=4)
    with opened(later) as store:
        assert store.log.first_index > OLD + 1, "the tables of before end before the log begins"
    done = 0
    for look in range(1, 40):
        folder, target = source_folder(tmp_path / "n0", OLD), tmp_path / f"bk{look}"
        disk = MovingDisk(look, partial(checkpoint, folder, later, steps))
        created = create(at(target), Source(disk, str(folder)), made_at_ms=1)
        if disk.is_past():
            break
        contents = verify(at(target))
        assert contents.manifest == created.manifest
        assert contents.manifest.end.index >= OLD
        done += 1
    assert 5 < done < 39


def test_create_does_not_go_on_without_a_file(tmp_path: Path) -> None:
    """Refused before anything is copied: it cannot be made again there."""
    target = tmp_path / "bk"
    back_up(source_folder(tmp_path / "n0", OLD), target)
    next(iter((target / "log").iterdir())).unlink()
    before = content(target)
    with pytest.raises(BackupDamagedError, match=r"is missing.*in another folder"):
        back_up(source_folder(tmp_path / "n0"), target)
    assert content(target) == before


def test_local_files_are_durable_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def note(fd: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "bk"))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr("dledger.commitlog.disk._data_sync", note)
    done = back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    named = next(at for at, name in enumerate(flushed) if name.startswith("manifest.json"))
    assert {*done.manifest.files, "log", "tables", "."} <= set(flushed[:named])
