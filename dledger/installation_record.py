"""How far the installation of a leader's snapshot has come, as one durable word.

::

    done ──► offered ──► refilling ──► done

* *offered*: the snapshot is on disk and replaces the log, whatever the log holds by now. The next
  start empties the log before it opens it.
* *refilling*: the log was emptied and begins at the snapshot's floor. What it holds has come since,
  from leaders, and is kept. Derived files are made again from it.
* *done*: the log is as far as the snapshot, and a checkpoint of this replica says so. A file of a
  snapshot that is still there means nothing.

Spec: docs/reference/formats.md, section 9.
"""

from __future__ import annotations

from enum import Enum

from commitlog.errors import ForeignStoreError
from commitlog.seams import Disk
from commitlog.slot_file import SlotFile


class Phase(Enum):
    """Of an installation; the value is what stands on disk."""

    OFFERED = b"offered"
    REFILLING = b"refilling"
    DONE = b"done"


class InstallationRecord:
    """The phase, kept in a slot file.

    Attributes:
        phase: None when none was ever recorded: there was no installation, or it was one of a
            version that kept no record.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        """Load the record.

        Raises:
            CorruptStoreError: Both copies are damaged.
            ForeignStoreError: A newer version wrote a phase that is unknown here.
        """
        self._slots = SlotFile(disk, path)
        recorded = self._slots.load()
        try:
            self.phase = None if recorded is None else Phase(recorded)
        except ValueError as error:
            raise ForeignStoreError(f"{path} holds {recorded!r}, an unknown phase") from error

    def become(self, phase: Phase) -> None:
        """Record *phase*, durably.

        Raises:
            DiskFullError: No space to make the file; the phase is as it was.
            FlushFailedError: Either phase may be there after a crash.
        """
        if phase is not self.phase:
            self._slots.store(phase.value)
            self.phase = phase

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._slots.close()
