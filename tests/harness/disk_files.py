"""A disk of ours as a file system of fsspec: for backups on disks that fill up or lose power."""

import io
import posixpath
from typing import Any

from fsspec.spec import AbstractFileSystem

from dledger.backup.folder import BackupFolder
from dledger.commitlog.seams import Disk


def folder_on(disk: Disk, root: str) -> BackupFolder:
    """Return the backup's folder *root* on *disk*."""
    return BackupFolder(DiskFiles(disk), root)


class DiskFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What a backup asks of fsspec. A file is there, durably, when it was closed."""

    cachable = False

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        assert mode == "wb"
        return _Written(self.disk, path)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.disk.replace(path, value)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return self.disk.read(path)[start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.disk.read(path))}

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return [f"{path}/{name}" for name in self.disk.list_dir(path)]

    def rm_file(self, path: str) -> None:
        self.disk.unlink(path)


class _Written(io.BytesIO):
    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__()
        self._disk, self._path = disk, path

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        self._disk.unlink(self._path)
        file = self._disk.create(self._path, len(data), reserve=True)
        file.write_at(0, data)
        file.flush()
        file.close()
        self._disk.flush_dir(posixpath.dirname(self._path))
