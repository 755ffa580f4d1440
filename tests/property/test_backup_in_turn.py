"""One backup, made from the folders of several members in turn, is always what the group keeps.

Members have given up more or fewer segments, know of commits and wrote their tables at other times.
Disks fill up, power fails and bytes rot in between. The model knows two numbers: first and newest
entry.
"""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dledger.backup.create import create
from dledger.backup.folder import MANIFEST, BackupFolder, NoBackupError
from dledger.backup.manifest import BackupDamagedError
from dledger.backup.restore import restore
from dledger.backup.source import Source
from dledger.backup.verify import verify
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import CorruptStoreError, DiskFullError, FlushFailedError, StoreError
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore
from dledger.testing.crash_disk import CrashDisk
from tests.harness.disk_files import folder_on
from tests.harness.extent import examples
from tests.harness.replica_folders import settings
from tests.unit.dledger.backup.test_backup import FRAMES, OWNER, source_folder

COMMITS = (20, 35, 50, len(FRAMES))
FLOORS = (0, 1, 2, 3)
STEPS = 12
SEEDS = 20
ROOT = "/bk"


@dataclass(frozen=True)
class Folder:
    """Folder of a member that keeps the entries from *first* to *newest*."""

    path: Path
    first: int
    newest: int


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Folder]:
    """Return folders of one member at many moments, some with tables that are older."""
    root = tmp_path_factory.mktemp("members")
    made: list[Folder] = []
    for commit in COMMITS:
        for floor in FLOORS:
            path = root / f"{commit}-{floor}"
            try:
                source_folder(path, commit, floor=floor)
            except StopIteration:
                continue  # so little is committed that no segment can be given up
            first = Source(OsDisk(), str(path)).look().anchor.first_index
            made.append(Folder(path, first, commit))
    newest = (root / f"{COMMITS[-1]}-0" / "raft" / "commit_mark").read_bytes()
    for folder in list(made):
        late = root / f"{folder.path.name}-late"
        shutil.copytree(folder.path, late)
        (late / "raft" / "commit_mark").write_bytes(newest)
        made.append(Folder(late, folder.first, COMMITS[-1]))
    return made


class Backup:
    """A backup on a disk that forgets, and what it has to hold.

    Attributes:
        held: First and newest entry; None: there is no backup yet.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk()
        self.held: tuple[int, int] | None = None

    @property
    def folder(self) -> BackupFolder:
        """The backup's folder on the disk of now."""
        return folder_on(self.disk, ROOT)

    def after(self, folder: Folder) -> tuple[int, int]:
        """Return what a `create` from *folder* has to hold."""
        if self.held is None or self.held[1] < folder.first:
            return folder.first, folder.newest
        return max(self.held[0], folder.first), folder.newest

    def create(self, folder: Folder) -> None:
        """Make it from *folder*; it is refused if the backup is further."""
        wanted = self.after(folder)
        is_behind = self.held is not None and folder.newest < self.held[1]
        try:
            create(self.folder, Source(OsDisk(), str(folder.path)), made_at_ms=1)
        except CorruptStoreError:
            assert is_behind
            return
        assert not is_behind
        self.held = wanted

    def create_on_failing_disk(self, folder: Folder) -> None:
        """Let one step of a `create` fail, perhaps with a power cut; it is the old or the new."""
        wanted, left = self.after(folder), self.rng.randrange(30)
        failure = self.rng.choice([DiskFullError, FlushFailedError])

        def fault(_kind: str, _path: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise failure("as planned")

        self.disk.fault = fault
        failed = False
        try:
            create(self.folder, Source(OsDisk(), str(folder.path)), made_at_ms=1)
        except StoreError:
            failed = True
        self.disk.fault = lambda _kind, _path: None
        if self.rng.random() < 0.5:
            self.disk = self.disk.power_cut(lambda: self.rng.random() < 0.5)
        if self.disk.exists(f"{ROOT}/{MANIFEST}"):
            begin = self.folder.need_manifest()
            found = begin.begin.first_index, begin.end.index
            assert found in ((self.held, wanted) if failed else (wanted,))
            self.held = found

    def check(self) -> None:
        """It holds all entries between the two, each of them once."""
        if self.held is None:
            with pytest.raises(NoBackupError):
                verify(self.folder)
            return
        contents = verify(self.folder)
        first, newest = self.held
        manifest = contents.manifest
        assert (manifest.begin.first_index, manifest.end.index) == (first, newest)
        assert contents.entries == newest - first + 1

    def rot(self) -> None:
        """Change or cut off bytes of one file: `verify` finds it, and a restore leaves nothing."""
        if self.held is None:
            return
        name = self.rng.choice(sorted(self.folder.need_manifest().files))
        path = f"{ROOT}/{name}"
        disk = self.disk.copy()
        data = bytearray(disk.read(path))
        if self.rng.random() < 0.5:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        else:
            del data[self.rng.randrange(len(data)) :]
        disk.replace(path, data)
        with pytest.raises(BackupDamagedError):
            verify(folder_on(disk, ROOT))
        with pytest.raises(BackupDamagedError):
            restore(folder_on(disk, ROOT), disk, "/new", owner=OWNER, rng=self.rng)
        assert list(disk.list_dir("/new")) == []

    def restore(self) -> None:
        """Restore, interrupted once and then again: the broker's own store opens it."""
        if self.held is None:
            return
        disk, left = self.disk.copy(), self.rng.randrange(1, 40)

        def fault(_kind: str, path: str) -> None:
            nonlocal left
            left -= path.startswith("/new")
            if left == 0:
                raise DiskFullError("as planned")

        disk.fault = fault
        first, newest = self.held
        try:
            restore(folder_on(disk, ROOT), disk, "/new", owner=OWNER, rng=self.rng)
        except (DiskFullError, FlushFailedError):
            assert list(disk.list_dir("/new")) == []
            restore(folder_on(disk, ROOT), disk, "/new", owner=OWNER, rng=self.rng)
        disk.fault = lambda _kind, _path: None
        store = ReplicaStore(disk.power_cut(lambda: False), settings(Path("/new")), StateTables)
        assert not store.damaged
        assert (store.log.first_index, store.log.last_index) == (first, newest + 1)
        for index in range(store.tables.applied_index + 1, newest + 2):
            store.apply(index)
        frames = [bytes(store.log.frame(index)) for index in range(first, newest + 1)]
        assert frames == [bytes(frame) for frame in FRAMES[first - 1 : newest]]
        store.close(clean=False)


@pytest.mark.parametrize("seed", range(examples(SEEDS)))
def test_backup_of_members_in_turn_is_what_they_keep(seed: int, folders: list[Folder]) -> None:
    backup = Backup(seed)
    for _ in range(STEPS):
        folder = backup.rng.choice(folders)
        act = backup.rng.random()
        if act < 0.45:
            backup.create(folder)
        elif act < 0.8:
            backup.create_on_failing_disk(folder)
        elif act < 0.9:
            backup.rot()
        else:
            backup.restore()
        backup.check()
    backup.restore()
