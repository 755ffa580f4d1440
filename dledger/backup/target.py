"""The folder of a backup. Files in it are written once; only the manifest is ever replaced.

The manifest is written last. Until then the backup is the one of before, whatever an interrupted
`create` has left; the next `create` removes what the manifest does not name.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from typing_extensions import Buffer

from dledger.backup.manifest import (
    BackupDamagedError,
    Manifest,
    Part,
    Tables,
    decode_manifest,
    encode_manifest,
    sha256_of,
)
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.store_paths import file_name

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
LOG: Final = "log"
TABLES: Final = "tables"
WRITE_BYTES: Final = 1 << 20
"""Collected before it is written: one call of the disk for many small entries."""

_OWN: Final = frozenset((MANIFEST, LOCK, LOG, TABLES, MANIFEST + ".tmp"))


class BackupLock(Protocol):
    """See `dledger.commitlog.seams.Lock`."""

    def release(self) -> None:
        """Give the claim back."""


class BackupFile(Protocol):
    """What a backup asks of `dledger.commitlog.seams.DiskFile`; it writes from begin to end."""

    @property
    def path(self) -> str:
        """Path as it was opened."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of *data* at byte *offset*."""

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes *offset* … *offset+size*."""

    def flush(self) -> None:
        """Make it durable."""

    def close(self) -> None:
        """Give the descriptor back."""


class BackupDisk(Protocol):
    """What a backup asks of `dledger.commitlog.seams.Disk`, which is one; so is an address."""

    def create(self, path: str, size: int, *, reserve: bool) -> BackupFile:
        """Make a file of *size* bytes."""

    def open(self, path: str) -> BackupFile:
        """Open a file for reading."""

    def exists(self, path: str) -> bool:
        """Tell whether a file of that name is there."""

    def list_dir(self, path: str) -> Sequence[str]:
        """Return the names in a folder, sorted."""

    def read(self, path: str) -> bytes:
        """Return the whole content of a small file."""

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of a small file, atomically and durably."""

    def unlink(self, path: str) -> None:
        """Remove a file. Missing is fine."""

    def flush_dir(self, path: str) -> None:
        """Make the names in that folder durable."""

    def lock(self, path: str) -> BackupLock:
        """Take the exclusive lock file at *path*, where there are locks."""


class NoBackupError(ConfigError):
    """The folder holds no backup, or something else; nothing was changed."""


class PartWriter:
    """Writes one file of entries."""

    def __init__(self, file: BackupFile, name: str, position: int) -> None:
        self._file = file
        self._name = name
        self._position = position
        self._sum = hashlib.sha256()
        self._waiting = bytearray()
        self._written = 0

    @property
    def end(self) -> int:
        """Absolute byte of the log up to which something was added."""
        return self._position + self._written + len(self._waiting)

    def add(self, data: bytes | memoryview) -> None:
        """Append *data*, which was checked.

        Raises:
            DiskFullError: The target is full.
        """
        self._waiting += data
        if len(self._waiting) >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._sum.update(self._waiting)
        self._file.write_at(self._written, self._waiting)
        self._written += len(self._waiting)
        self._waiting = bytearray()

    def finish(self) -> Part:
        """Make the file durable and return what the manifest states of it.

        Raises:
            DiskFullError, FlushFailedError: It is not to be named in a manifest.
        """
        self._write()
        self._file.write_at(self._written, bytes(self._file.size - self._written))
        self._sum.update(bytes(self._file.size - self._written))
        self._file.flush()
        self._file.close()
        return Part(self._name, self._position, self._file.size, self._sum.hexdigest())


class Target:
    """A backup's folder.

    Args:
        root: Absolute path.
    """

    def __init__(self, disk: BackupDisk, root: str) -> None:
        self._disk = disk
        self.root = root

    def _path(self, name: str) -> str:
        return posixpath.join(self.root, name)

    def lock(self) -> BackupLock:
        """Keep a second `create` out, where there are locks: not at an address.

        Raises:
            StoreLockedError: One is under way.
        """
        return self._disk.lock(self._path(LOCK))

    def manifest(self) -> Manifest | None:
        """Return the manifest; None in an empty folder, or in one that is not there.

        Raises:
            NoBackupError: Something else is in the folder.
            BackupDamagedError, ForeignStoreError: It cannot be read.
        """
        if self._disk.exists(self._path(MANIFEST)):
            return decode_manifest(self._disk.read(self._path(MANIFEST)), self._path(MANIFEST))
        strange = sorted(set(self._disk.list_dir(self.root)) - _OWN - {"lost+found"})
        if strange:
            raise NoBackupError(
                f"{self.root} holds {strange[0]}, which is not of a backup; nothing was changed. "
                "Give an empty folder"
            )
        return None

    def need_manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            NoBackupError: There is none.
        """
        found = self.manifest()
        if found is None:
            raise NoBackupError(
                f"{self.root} holds no backup: there is no {MANIFEST}; make one with "
                "dledger backup create"
            )
        return found

    def begin_part(self, position: int, end: int) -> PartWriter:
        """Make the file for the bytes from *position* to *end* of the log.

        Raises:
            DiskFullError: No space for it; it was removed again.
        """
        name = f"{LOG}/{file_name(position)}-{file_name(end)}"
        path = self._path(name)
        self._disk.unlink(path)
        return PartWriter(self._disk.create(path, end - position, reserve=True), name, position)

    def write_tables(self, data: bytes, applied_index: int) -> Tables:
        """Store a snapshot of the tables, durably.

        Raises:
            DiskFullError: No space for it.
        """
        name = f"{TABLES}/{file_name(applied_index)}"
        self._disk.replace(self._path(name), data)
        return Tables(name, len(data), sha256_of(data), applied_index)

    def finish(self, manifest: Manifest) -> None:
        """Make *manifest* the backup, atomically, and remove what it does not name.

        Raises:
            DiskFullError: The backup is the one of before.
            BackupDamagedError: So it is, as a file is missing; a second `create` removed it.
        """
        self._check_files(manifest)
        self._disk.flush_dir(self._path(LOG))
        self._disk.flush_dir(self.root)
        self._disk.replace(self._path(MANIFEST), encode_manifest(manifest))
        self.remove_strays(manifest)

    def need_files(self, manifest: Manifest) -> None:
        """Check that the files of a backup are there, before it is brought up to date.

        Raises:
            BackupDamagedError: One is not.
        """
        missing = self._missing(manifest)
        if missing:
            raise BackupDamagedError(
                f"{missing} is missing, which the backup there needs; nothing was copied. Make a "
                "new backup in another folder"
            )

    def _check_files(self, manifest: Manifest) -> None:
        missing = self._missing(manifest)
        if missing:
            raise BackupDamagedError(
                f"{missing} is missing, which this backup needs: something else removed it, a "
                "second create perhaps. The backup is what it was; make it again"
            )

    def _missing(self, manifest: Manifest) -> str:
        """Return the path of the first file that is not there; empty: all are."""
        there = {
            f"{folder}/{name}"
            for folder in (LOG, TABLES)
            for name in self._disk.list_dir(self._path(folder))
        }
        missing = sorted(manifest.files - there)
        return self._path(missing[0]) if missing else ""

    def remove_strays(self, manifest: Manifest | None) -> None:
        """Remove files of entries and tables that *manifest* does not name."""
        kept = set() if manifest is None else manifest.files
        for folder in (LOG, TABLES):
            for name in self._disk.list_dir(self._path(folder)):
                if f"{folder}/{name}" not in kept:
                    self._disk.unlink(self._path(f"{folder}/{name}"))

    # -- reading ---------------------------------------------------------------------------

    def tables(self, tables: Tables) -> bytes:
        """Return the snapshot of the tables.

        Raises:
            BackupDamagedError: The file is missing, or not what was written.
        """
        path = self._path(tables.file)
        try:
            data = self._disk.read(path)
        except OSError as error:
            raise BackupDamagedError(f"{path} cannot be read: {error}") from error
        if len(data) != tables.size or sha256_of(data) != tables.sha256:
            raise BackupDamagedError(f"{path} is damaged: it does not fit its checksum")
        return data

    def check_part(self, part: Part, each: Callable[[int, bytes], None] | None = None) -> None:
        """Read a file of entries and compare it with its checksum.

        Args:
            each: Called with the position in the log and the bytes of every piece.
        Raises:
            BackupDamagedError: It is missing, or not what was written. *each* may have been called.
        """
        file = self._open(part)
        try:
            found = hashlib.sha256()
            for at in range(0, part.size, WRITE_BYTES):
                data = _read(file, at, min(WRITE_BYTES, part.size - at))
                found.update(data)
                if each is not None:
                    each(part.position + at, data)
        finally:
            file.close()
        if found.hexdigest() != part.sha256:
            raise BackupDamagedError(
                f"{self._path(part.file)} is damaged: it does not fit its checksum"
            )

    def _open(self, part: Part) -> BackupFile:
        path = self._path(part.file)
        try:
            file = self._disk.open(path)
        except OSError as error:
            raise BackupDamagedError(f"{path} cannot be read: {error}") from error
        if file.size != part.size:
            file.close()
            raise BackupDamagedError(f"{path} has {file.size} bytes, {part.size} were written")
        return file

    def reader(self, parts: tuple[Part, ...]) -> PartReader:
        """Return what reads the log out of the files."""
        return PartReader(self._open, parts)


def _read(file: BackupFile, offset: int, size: int) -> bytes:
    try:
        return file.read(offset, size)
    except OSError as error:
        raise BackupDamagedError(f"{file.path} cannot be read at byte {offset}: {error}") from error


class PartReader:
    """Reads the log in order out of the files that hold it; one file is open at a time."""

    def __init__(self, open_part: Callable[[Part], BackupFile], parts: tuple[Part, ...]) -> None:
        self._open_part = open_part
        self._parts = parts
        self._part: Part | None = None
        self._file: BackupFile | None = None

    def at(self, position: int, size: int) -> bytes:
        """Return up to *size* bytes; fewer at the end of a file, none where there is no file.

        Raises:
            BackupDamagedError: The file is missing or has another size.
        """
        part = self._part
        if part is None or not part.position <= position < part.end:
            self.close()
            part = next((p for p in self._parts if p.position <= position < p.end), None)
            if part is None:
                return b""
            self._file, self._part = self._open_part(part), part
        assert self._file is not None
        return _read(self._file, position - part.position, min(size, part.end - position))

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            self._file.close()
        self._file = self._part = None
