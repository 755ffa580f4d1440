"""The flush of consume queues: shared units, files of queues, and what moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from commitlog.queue_files import QueueKey, made
from commitlog.queue_unit import UNIT_BYTES, fillers
from commitlog.seams import CANNOT_BE_READ, Disk
from commitlog.shared_units import Row, RowKind, SharedUnits

FLUSH_TOGETHER: Final = 256
"""Above this number of files that were not open a flush asks for all of them at once: one after the
other takes a minute for 20,000 of them, and the next checkpoint waits for it."""


class Part(NamedTuple):
    """Units for one file."""

    path: str
    within: int
    """Unit of the file that they begin at."""
    units: bytes


class Move(NamedTuple):
    """Shared units that go into files of their queue."""

    topic: str
    queue_id: int
    end: int
    """Queue offset behind the last of them."""
    parts: Sequence[Part]


class ConsumeQueueFlush:
    """What is to be made durable. `run` blocks and may be called in a worker, one job at a time."""

    __slots__ = (
        "_disk",
        "_file_bytes",
        "_shared",
        "changes",
        "done",
        "folders",
        "has_moved",
        "moves",
        "paths",
        "unreadable",
    )

    def __init__(
        self,
        disk: Disk,
        paths: Sequence[str],
        folders: Sequence[str],
        *,
        shared: SharedUnits,
        changes: Sequence[Row] = (),
        moves: Sequence[Move] = (),
        file_bytes: int = 0,
    ) -> None:
        self._disk = disk
        self._shared = shared
        self._file_bytes = file_bytes
        self.paths = paths
        self.folders = folders
        self.changes = changes
        self.moves = moves
        self.has_moved = False
        self.done = False
        self.unreadable: dict[QueueKey, tuple[str, OSError]] = {}
        """Queues whose shared units stay: a file of theirs could not be written, as the disk does
        not give the rest of a page back."""

    def run(self) -> None:
        """Make it durable: shared units first, then files, then what has left the shared ones.

        Raises:
            OSError: No descriptor is left; what was not flushed is in the next job.
            DiskFullError: No space for a new file; what was not flushed is in the next job.
            FlushFailedError: The node must stop.
        """
        self._shared.write(self.changes)
        self._flush_files()
        self.done = True
        if self.moves:
            self._write_moves()
            self._shared.write(
                [
                    Row(RowKind.FROM, move.topic, move.queue_id, move.end)
                    for move in self.moves
                    if (move.topic, move.queue_id) not in self.unreadable
                ]
            )
            self.has_moved = True

    def _flush_files(self) -> None:
        for path in self.paths:
            # Descriptors of its own: the store may close or remove a file meanwhile.
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                continue
            try:
                file.flush()
            finally:
                file.close()
        for folder in self.folders:
            try:
                self._disk.flush_dir(folder)
            except FileNotFoundError:
                continue  # removed with its topic

    def _write_moves(self) -> None:
        parts = [part for move in self.moves for part in move.parts]
        many = len(parts) > FLUSH_TOGETHER
        folders: set[str] = set()
        for move in self.moves:
            for part in move.parts:
                try:
                    folders.update(self._write_part(part, many))
                except OSError as error:
                    if error.errno not in CANNOT_BE_READ:
                        raise
                    self.unreadable[move.topic, move.queue_id] = part.path, error
        if many:
            self._disk.flush_all([part.path for part in parts], sorted(folders))
        else:
            for folder in sorted(folders):
                self._disk.flush_dir(folder)

    def _write_part(self, part: Part, many: bool) -> Sequence[str]:
        """Write units into their file; return the folders whose names have changed."""
        path, within, units = part
        folder = path.rpartition("/")[0]
        if many:
            self._disk.make_dir(folder, durably=False)
        file, is_new = made(self._disk, path, self._file_bytes)
        try:
            if is_new and within:
                file.write_at(0, fillers(within))
            file.write_at(within * UNIT_BYTES, units)
            if not many:
                file.flush()
        finally:
            file.close()
        topic = folder.rpartition("/")[0]
        return (folder, topic, topic.rpartition("/")[0]) if is_new else ()
