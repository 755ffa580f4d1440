"""The flush of a log: what it has to make durable, and that one has failed."""

from __future__ import annotations

from dataclasses import dataclass

from commitlog.errors import FlushFailedError, InvariantBroken, MQError
from commitlog.seams import Disk, DiskFile


@dataclass(slots=True)
class Health:
    """Whether a log may be written. Shared with worker threads: set once, never cleared."""

    failure: str | None = None
    closed: bool = False

    def refusal(self) -> MQError:
        """Return why nothing may be written."""
        if self.closed:
            return InvariantBroken("the log is closed")
        return FlushFailedError(f"an earlier flush failed: {self.failure}")


class FlushTicket:
    """What one flush has to make durable; made by `EntryLog.begin_flush`.

    Only `run` may be called in a worker thread; it touches nothing but files.
    """

    __slots__ = ("_health", "done", "files", "folder", "generation", "last_index", "number")

    def __init__(
        self,
        number: int,
        last_index: int,
        generation: int,
        files: tuple[DiskFile, ...],
        folder: tuple[Disk, str] | None,
        health: Health,
    ) -> None:
        self.number = number
        self.last_index = last_index
        self.generation = generation
        self.files = files
        self.done = False
        self.folder = folder
        self._health = health

    def run(self) -> None:
        """Flush the files. Blocking; thread-safe.

        Raises:
            FlushFailedError: The log is poisoned from now on.
        """
        try:
            for file in self.files:
                file.flush()
            if self.folder is not None:
                disk, path = self.folder
                disk.flush_dir(path)
        except (MQError, OSError) as error:
            self._health.failure = str(error)
            raise FlushFailedError(
                f"flush up to entry {self.last_index} failed: {error}"
            ) from error
        self.done = True
