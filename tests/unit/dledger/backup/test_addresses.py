"""Backups at an address: the same bytes as in a folder, and what a failing service leaves."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dledger.backup.create import Created, create
from dledger.backup.folder import (
    MANIFEST,
    BackupFailedError,
    BackupFolder,
    NoBackupError,
    UnknownAddressError,
)
from dledger.backup.manifest import BackupDamagedError
from dledger.backup.restore import restore
from dledger.backup.source import Source
from dledger.backup.verify import verify
from dledger.commitlog.disk import OsDisk
from tests.unit.dledger.backup.test_backup import (
    FRAMES,
    OWNER,
    at,
    back_up,
    content,
    restored,
    source_folder,
)

ROOT = "/backups/orders"


@pytest.fixture
def service() -> Iterator[MemoryFileSystem]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem(skip_instance_cache=True)
    MemoryFileSystem.store.clear()


def back_up_to(service: Any, source: Path) -> Created:
    return create(BackupFolder(service, ROOT), Source(OsDisk(), str(source)), made_at_ms=1)


def files_at(service: MemoryFileSystem) -> dict[str, bytes]:
    return {name.removeprefix(ROOT + "/"): service.cat_file(name) for name in service.find(ROOT)}


@pytest.mark.parametrize("floor", [0, 2])
def test_backup_at_address_has_bytes_of_folder(
    tmp_path: Path, service: MemoryFileSystem, floor: int
) -> None:
    for commit in (50, len(FRAMES)):
        source = source_folder(tmp_path / "n0", commit, floor=floor)
        done = back_up_to(service, source)
        assert done.manifest == back_up(source, tmp_path / "bk").manifest
        assert files_at(service) == content(tmp_path / "bk")
        contents = verify(BackupFolder(service, ROOT))
        assert contents.rows() == verify(at(tmp_path / "bk")).rows()
    assert done.copied_entries == len(FRAMES) - 50
    target = BackupFolder(service, ROOT)
    rng = random.Random(1)
    index = restore(target, OsDisk(), str(tmp_path / "here"), owner=OWNER, rng=rng)
    assert index == restored(tmp_path / "bk", tmp_path / "there")
    assert content(tmp_path / "here") == content(tmp_path / "there")


class FailingService(MemoryFileSystem):
    """Refuses the act number *fails_at*, counted from 1; 0: none."""

    cachable = False

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__(skip_instance_cache=True)
        self.fails_at = fails_at
        self.acts = 0

    def _act(self) -> None:
        self.acts += 1
        if self.acts == self.fails_at:
            raise ConnectionResetError("the service is away")

    def open(self, *args: Any, **more: Any) -> Any:
        self._act()
        return super().open(*args, **more)

    def pipe_file(self, *args: Any, **more: Any) -> Any:
        self._act()
        return super().pipe_file(*args, **more)

    def ls(self, *args: Any, **more: Any) -> Any:
        self._act()
        return super().ls(*args, **more)


def test_service_that_fails_leaves_backup_of_before(
    tmp_path: Path, service: MemoryFileSystem
) -> None:
    back_up_to(service, source_folder(tmp_path / "n0", 50))
    before = verify(BackupFolder(service, ROOT)).rows()
    source = source_folder(tmp_path / "n0")
    errors: list[BackupFailedError] = []
    done = None
    while done is None:
        try:
            done = back_up_to(FailingService(len(errors) + 1), source)
        except BackupFailedError as error:
            errors.append(error)
            rows = verify(BackupFolder(service, ROOT)).rows()
            # The last acts only remove what the new manifest no longer names.
            assert rows["last_index"] in (before["last_index"], len(FRAMES))
    assert len(errors) > 5
    assert all(error.retriable and "the service is away" in str(error) for error in errors)
    assert verify(BackupFolder(service, ROOT)).rows()["last_index"] == len(FRAMES)
    assert files_at(service).keys() == done.manifest.files | {MANIFEST}


def test_service_that_fails_is_no_empty_folder(tmp_path: Path, service: MemoryFileSystem) -> None:
    back_up_to(service, source_folder(tmp_path / "n0", 50))
    before = files_at(service)
    with pytest.raises(BackupFailedError, match="the service is away"):
        back_up_to(FailingService(1), source_folder(tmp_path / "n0"))
    assert files_at(service) == before, "nothing of the backup is removed"


def test_service_that_fails_is_no_damage(tmp_path: Path, service: MemoryFileSystem) -> None:
    back_up_to(service, source_folder(tmp_path / "n0"))

    class Silent(MemoryFileSystem):
        def cat_file(self, *_: Any, **__: Any) -> bytes:
            raise TimeoutError("no answer")

    with pytest.raises(BackupFailedError, match="no answer"):
        verify(BackupFolder(Silent(skip_instance_cache=True), ROOT))


def test_file_missing_at_address_is_damage(tmp_path: Path, service: MemoryFileSystem) -> None:
    done = back_up_to(service, source_folder(tmp_path / "n0"))
    service.rm_file(f"{ROOT}/{done.manifest.parts[1].file}")
    with pytest.raises(BackupDamagedError, match="cannot be read"):
        verify(BackupFolder(service, ROOT))


def test_file_that_rival_create_removed_is_noticed(
    tmp_path: Path, service: MemoryFileSystem
) -> None:
    back_up_to(service, source_folder(tmp_path / "n0", 50))
    removed: list[Any] = []

    class Rival(MemoryFileSystem):
        def open(self, path: str, *args: Any, **more: Any) -> Any:
            if not removed and "/tables/" in path:
                removed.append(BackupFolder(service, ROOT).manifest())
                service.rm_file(sorted(service.find(f"{ROOT}/log"))[-1])
            return super().open(path, *args, **more)

    with pytest.raises(BackupDamagedError, match="a second create perhaps"):
        back_up_to(Rival(skip_instance_cache=True), source_folder(tmp_path / "n0"))
    assert removed[0] == BackupFolder(service, ROOT).manifest()


def test_address_without_library_is_refused() -> None:
    with pytest.raises(UnknownAddressError, match="nosuch://x/y cannot be opened"):
        BackupFolder.open("nosuch://x/y")


def test_address_of_local_file_is_its_folder(tmp_path: Path) -> None:
    back_up(source_folder(tmp_path / "n0"), tmp_path / "bk")
    assert verify(BackupFolder.open(f"file://{tmp_path}/bk/")).entries == len(FRAMES)
    with pytest.raises(NoBackupError):
        verify(BackupFolder.open(f"file://{tmp_path}/empty"))
