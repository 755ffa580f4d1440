"""The folder of a backup, local or at an address: what fsspec opens (s3://, gs://, sftp:// …).

Files in it are written once, from begin to end; only the manifest is ever replaced. It is written
last: until then the backup is the one of before, whatever an interrupted `create` has left; the
next `create` removes what the manifest does not name.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from dledger.backup.manifest import (
    BackupDamagedError,
    Manifest,
    Part,
    Tables,
    decode_manifest,
    encode_manifest,
    sha256_of,
)
from dledger.commitlog.disk import OsDisk
from dledger.commitlog.errors import ConfigError, StoreError
from dledger.commitlog.store_paths import file_name

MANIFEST: Final = "manifest.json"
LOG: Final = "log"
TABLES: Final = "tables"
READ_BYTES: Final = 1 << 20
"""Read at once."""

_OWN: Final = frozenset((MANIFEST, LOG, TABLES, MANIFEST + ".tmp", "lost+found"))


class NoBackupError(ConfigError):
    """The folder holds no backup, or something else; nothing was changed."""


class UnknownAddressError(ConfigError):
    """No library of this process opens the address; nothing was read or written."""


class BackupFailedError(StoreError):
    """The disk or the service did not do what was asked. A backup there is what it was."""

    retriable = True


class PartWriter:
    """Writes one file of entries, from *position* up to *end* of the log."""

    def __init__(self, folder: BackupFolder, position: int, end: int) -> None:
        self._folder = folder
        self._name = f"{LOG}/{file_name(position)}-{file_name(end)}"
        self._position, self._end = position, end
        self._sum = hashlib.sha256()
        self._file = folder.begin(self._name)
        self.at = position
        """Absolute byte of the log up to which something was added."""

    def add(self, data: bytes | memoryview) -> None:
        """Append *data*, which was checked."""
        with failing("write", self._name):
            self._file.write(data)
        self._sum.update(data)
        self.at += len(data)

    def finish(self) -> Part:
        """Make the file durable and return what the manifest states of it."""
        self.add(bytes(self._end - self.at))
        self._folder.end(self._file, self._name)
        return Part(self._name, self._position, self._end - self._position, self._sum.hexdigest())


class BackupFolder:
    """A backup's folder.

    Every method raises `BackupFailedError` when the disk or the service does not do what is asked.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self.root = root
        # What a service has taken is durable; a local file is when it is flushed.
        self._is_local = isinstance(filesystem, LocalFileSystem)

    @classmethod
    def open(cls, target: str) -> Self:
        """Return the folder at a path or an address.

        Raises UnknownAddressError: no library opens such an address.
        """
        try:
            filesystem, path = url_to_fs(target if "://" in target else str(Path(target).resolve()))
        except (ImportError, ValueError) as error:
            raise UnknownAddressError(
                f"{target} cannot be opened: {error}. Install the package that opens such "
                "addresses with fsspec, or give a folder; nothing was done"
            ) from error
        return cls(filesystem, str(path).rstrip("/"))

    def path(self, name: str) -> str:
        """Return the path of a file of the backup."""
        return posixpath.join(self.root, name)

    # -- the manifest ----------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """Return the manifest; None in an empty folder, or in one that is not there.

        Raises:
            NoBackupError: Something else is in the folder.
            BackupDamagedError, ForeignStoreError: It cannot be read.
        """
        there = self._names("")
        if MANIFEST in there:
            path = self.path(MANIFEST)
            with failing("read", path):
                data = self._filesystem.cat_file(path)
            return decode_manifest(data, path)
        if strange := sorted(there - _OWN):
            raise NoBackupError(
                f"{self.root} holds {strange[0]}, which is not of a backup; nothing was changed. "
                "Give an empty folder"
            )
        return None

    def need_manifest(self) -> Manifest:
        """Return the manifest. Raises NoBackupError: there is none."""
        manifest = self.manifest()
        if manifest is None:
            raise NoBackupError(
                f"{self.root} holds no backup: there is no {MANIFEST}; make one with "
                "dledger backup create"
            )
        return manifest

    def finish(self, manifest: Manifest) -> None:
        """Make *manifest* the backup, atomically, and remove what it does not name.

        Raises BackupDamagedError: the backup is the one of before: a file is missing.
        """
        self.need_files(
            manifest,
            "something else removed it, a second create perhaps. The backup is what it was; make "
            "it again",
        )
        path, data = self.path(MANIFEST), encode_manifest(manifest)
        with failing("write", path):
            if self._is_local:
                for name in (LOG, TABLES, ""):
                    if self._filesystem.isdir(self.path(name)):
                        OsDisk().flush_dir(self.path(name))
                OsDisk().replace(path, data)
            else:
                self._filesystem.pipe_file(path, data)
        self.remove_strays(manifest)

    def need_files(self, manifest: Manifest, why: str) -> None:
        """Check that the files of a backup are there. Raises BackupDamagedError: one is not."""
        missing = sorted(manifest.files - self._files())
        if missing:
            raise BackupDamagedError(f"{self.path(missing[0])} is missing: {why}")

    def remove_strays(self, manifest: Manifest | None) -> None:
        """Remove files of entries and tables that *manifest* does not name."""
        for name in sorted(self._files() - (set() if manifest is None else manifest.files)):
            with failing("remove", self.path(name)):
                self._filesystem.rm_file(self.path(name))

    def _files(self) -> set[str]:
        return {f"{part}/{name}" for part in (LOG, TABLES) for name in self._names(part)}

    def _names(self, part: str) -> set[str]:
        path = self.path(part).rstrip("/")
        with failing("list", path):
            self._filesystem.invalidate_cache()
            try:
                names = self._filesystem.ls(path, detail=False)
            except FileNotFoundError:
                return set()
        return {posixpath.basename(str(name).rstrip("/")) for name in names} - {""}

    # -- files -----------------------------------------------------------------------------

    def begin(self, name: str) -> Any:
        """Return a new file that is open for writing."""
        path = self.path(name)
        with failing("write", path):
            self._filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
            return self._filesystem.open(path, "wb")

    def end(self, file: Any, name: str) -> None:
        """Close a file that was written; it is durable."""
        with failing("write", self.path(name)), file:
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())

    def write_tables(self, data: bytes, applied_index: int) -> Tables:
        """Store a snapshot of the tables, durably."""
        name = f"{TABLES}/{file_name(applied_index)}"
        file = self.begin(name)
        with failing("write", self.path(name)):
            file.write(data)
        self.end(file, name)
        return Tables(name, len(data), sha256_of(data), applied_index)

    def tables(self, tables: Tables) -> bytes:
        """Return the snapshot of the tables.

        Raises BackupDamagedError: the file is missing, or not what was written.
        """
        data = self.read(tables, 0, tables.size)
        if sha256_of(data) != tables.sha256:
            raise BackupDamagedError(
                f"{self.path(tables.file)} is damaged: it does not fit its checksum"
            )
        return data

    def read(self, file: Part | Tables, begin: int, end: int) -> bytes:
        """Return some bytes of a file.

        Raises BackupDamagedError: it is missing, or has another size than was written.
        """
        path = self.path(file.file)
        with failing("read", path):
            try:
                size = self._filesystem.info(path)["size"]
                data: bytes = self._filesystem.cat_file(path, start=begin, end=end)
            except FileNotFoundError as error:
                raise BackupDamagedError(f"{path} cannot be read: it is missing") from error
        if size != file.size:
            raise BackupDamagedError(f"{path} has {size} bytes, {file.size} were written")
        return data

    def check_part(self, part: Part, each: Callable[[int, bytes], None] | None = None) -> None:
        """Read a file of entries and compare it with its checksum.

        Raises:
            BackupDamagedError: It is missing, or not what was written. *each* may have been called.
        """
        checksum = hashlib.sha256()
        for begin in range(0, part.size, READ_BYTES):
            data = self.read(part, begin, min(begin + READ_BYTES, part.size))
            checksum.update(data)
            if each is not None:
                each(part.position + begin, data)
        if checksum.hexdigest() != part.sha256:
            raise BackupDamagedError(
                f"{self.path(part.file)} is damaged: it does not fit its checksum"
            )

    def reader(self, parts: tuple[Part, ...]) -> Callable[[int, int], bytes]:
        """Return what reads the log out of the files: fewer bytes at the end of one."""

        def at(position: int, size: int) -> bytes:
            part = next((p for p in parts if p.position <= position < p.end), None)
            if part is None:
                return b""
            begin = position - part.position
            return self.read(part, begin, min(begin + size, part.size))

        return at


@contextmanager
def failing(act: str, path: str) -> Iterator[None]:
    """Give errors of any disk and library one type; ours stay what they are."""
    try:
        yield
    except BackupDamagedError:
        raise
    except Exception as error:  # each service has errors of its own
        why = " ".join(str(error).split()) or type(error).__name__
        raise BackupFailedError(
            f"{path} cannot be used ({act}): {why}. The backup is what it was; try again when the "
            "cause is removed"
        ) from error
