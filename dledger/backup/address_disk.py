"""Files at an address, for a backup: what fsspec opens (s3://, gs://, sftp://, memory:// …).

An object store has no folders that can be flushed and no locks. What a backup asks of a disk it has
all the same: files that are written once, in order, and are there as a whole or not at all, and one
small file that is replaced in one step.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs
from typing_extensions import Buffer

from dledger.backup.target import BackupDisk, BackupFile, BackupLock
from dledger.commitlog.errors import ConfigError, InvariantBroken, StoreError


class UnknownAddressError(ConfigError):
    """No library of this process opens the address; nothing was read or written."""


class AddressFailedError(StoreError):
    """The service at the address did not do what was asked. A backup there is what it was."""

    retriable = True


def open_address(address: str) -> tuple[BackupDisk, str]:
    """Return the disk that an address is on, and the path there.

    Raises:
        UnknownAddressError: No library opens such an address.
    """
    try:
        filesystem, path = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UnknownAddressError(
            f"{address} cannot be opened: {error}. Install the package that opens such addresses "
            "with fsspec, or give a folder; nothing was done"
        ) from error
    return AddressDisk(filesystem), str(path).rstrip("/")


class AddressDisk:
    """A file system of fsspec, as far as a backup uses a disk.

    Every method raises `AddressFailedError` when the service does not answer or refuses.

    Args:
        filesystem: Used by one thread at a time.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def create(self, path: str, size: int, *, reserve: bool) -> BackupFile:
        """Begin a file of *size* bytes; it is there when `AddressFile.flush` returns.

        Args:
            reserve: Of no effect: a service has no space to reserve.
        """
        with _failing("write", path):
            self._filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
            return AddressFile(self._filesystem, path, size, self._filesystem.open(path, "wb"))

    def open(self, path: str) -> BackupFile:
        """Open a file for reading.

        Raises:
            FileNotFoundError: There is none.
        """
        with _failing("read", path):
            self._filesystem.invalidate_cache()
            size = self._filesystem.info(path)["size"]
            return AddressFile(self._filesystem, path, int(size))

    def exists(self, path: str) -> bool:
        """Tell whether a file of that name is there."""
        with _failing("read", path):
            self._filesystem.invalidate_cache()
            try:
                # Not `isfile`: where the service does not answer, that states there is no file.
                kind: str = self._filesystem.info(path)["type"]
            except FileNotFoundError:
                return False
            return kind == "file"

    def list_dir(self, path: str) -> Sequence[str]:
        """Return the names below *path*, sorted; empty where there is nothing."""
        with _failing("list", path):
            self._filesystem.invalidate_cache()
            try:
                names = self._filesystem.ls(path, detail=False)
            except FileNotFoundError:
                return []
        found = {posixpath.basename(str(name).rstrip("/")) for name in names}
        return sorted(found - {"", posixpath.basename(path)})

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file.

        Raises:
            FileNotFoundError: There is none.
        """
        with _failing("read", path):
            data: bytes = self._filesystem.cat_file(path)
            return data

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of a small file; readers see the old or the new one."""
        with _failing("write", path):
            self._filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
            self._filesystem.pipe_file(path, bytes(data))

    def unlink(self, path: str) -> None:
        """Remove a file. Missing is fine."""
        with _failing("remove", path):
            try:
                self._filesystem.rm_file(path)
            except FileNotFoundError:
                return

    def flush_dir(self, path: str) -> None:
        """Do nothing: what the service has taken is durable."""

    def lock(self, path: str) -> BackupLock:
        """Return what locks nothing: services have no locks in common."""
        return _NoLock()


class AddressFile:
    """A file at an address: written once from its begin to its end, or read anywhere."""

    def __init__(self, filesystem: Any, path: str, size: int, writer: Any = None) -> None:
        self._filesystem = filesystem
        self._path = path
        self._size = size
        self._writer = writer
        self._written = 0

    @property
    def path(self) -> str:
        """Path in the file system."""
        return self._path

    @property
    def size(self) -> int:
        """Size in bytes, when it is whole."""
        return self._size

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of *data*, behind what was written before."""
        if offset != self._written:
            raise InvariantBroken(f"{self._path} is written at {offset}, not at {self._written}")
        with _failing("write", self._path):
            self._writer.write(bytes(data))
        self._written += memoryview(data).nbytes

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes *offset* … *offset+size*."""
        with _failing("read", self._path):
            data: bytes = self._filesystem.cat_file(self._path, start=offset, end=offset + size)
            return data

    def flush(self) -> None:
        """Hand the file over to the service, as a whole."""
        with _failing("write", self._path):
            self._writer.close()

    def close(self) -> None:
        """Do nothing: `flush` ends a file that is written."""


class _NoLock:
    def release(self) -> None:
        """Give nothing back."""


@contextmanager
def _failing(act: str, path: str) -> Iterator[None]:
    """Give errors of any library one type; a missing file stays `FileNotFoundError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each service has errors of its own
        why = " ".join(str(error).split()) or type(error).__name__
        raise AddressFailedError(
            f"{path} cannot be used ({act}): {why}. The backup is what it was; try again when the "
            "service answers"
        ) from error
