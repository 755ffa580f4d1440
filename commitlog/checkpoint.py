"""The checkpoint and abort files as RocketMQ has them.

The checkpoint holds up to which store time log, queues and key index are on disk; the abort file is
there while a broker runs, so that finding it at start means an unclean stop.

Spec: docs/reference/formats.md, section 8.
"""

from __future__ import annotations

import posixpath
import struct
from dataclasses import astuple, dataclass
from typing import Final

from commitlog.seams import CANNOT_BE_READ, Disk, DiskFile

CHECKPOINT_BYTES: Final = 4096

_FIELDS: Final = struct.Struct(">qqqqq")


@dataclass(slots=True)
class Checkpoint:
    """What was on disk when the checkpoint was taken; the newest such store times."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0

    def encode(self) -> bytes:
        """Return the 40 bytes that are stored; the rest of the file is zero."""
        return _FIELDS.pack(*astuple(self))


class CheckpointFile:
    """The 4 KiB checkpoint file. It is a hint: a damaged one only makes recovery start earlier."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None

    def load(self) -> Checkpoint:
        """Return what is stored; all zero when there is none, or none that can be read."""
        file = self._open()
        if file is None:
            return Checkpoint()
        try:
            return Checkpoint(*_FIELDS.unpack(file.read(0, _FIELDS.size)))
        except OSError as error:
            if error.errno not in CANNOT_BE_READ:
                raise
            return Checkpoint()

    def store(self, checkpoint: Checkpoint) -> None:
        """Write and flush *checkpoint*. Its 40 bytes lie in one sector, so they change together.

        Raises:
            DiskFullError: No space to make the file.
            FlushFailedError: The flush failed.
        """
        file = self._open()
        if file is None:
            file = self._disk.create(self._path, CHECKPOINT_BYTES, reserve=True)
            self._disk.flush_dir(posixpath.dirname(self._path))
            self._file = file
        file.write_at(0, checkpoint.encode())
        file.flush()

    def _open(self) -> DiskFile | None:
        if self._file is None and self._disk.exists(self._path):
            file = self._disk.open(self._path)
            if file.size == CHECKPOINT_BYTES:
                self._file = file
            else:
                file.close()
                self._disk.unlink(self._path)
        return self._file

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class AbortFile:
    """Marks a broker as running."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path

    def exists(self) -> bool:
        """Tell whether the last broker in this folder did not stop clean."""
        return self._disk.exists(self._path)

    def create(self, pid: int) -> None:
        """Write the file, durably; its content is the process id, as RocketMQ 5 has it."""
        self._disk.replace(self._path, str(pid).encode())

    def remove(self) -> None:
        """Remove the file, durably: the last act of a clean stop."""
        self._disk.unlink(self._path)
        self._disk.flush_dir(posixpath.dirname(self._path))
