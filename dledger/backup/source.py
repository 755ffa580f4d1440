"""A member's data folder as a backup reads it, while its broker runs or after it has stopped.

Nothing is written there, and no lock is taken. Three facts make that exact: what the commit mark
covers is durable and is never changed again; so is what the snapshot of the tables has applied, and
it is written before the mark that covers it; the begin of the log moves only behind a snapshot that
knows of it. So the snapshot is read first, then the mark, then the begin.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from typing import Final

from dledger.commitlog.errors import CorruptStoreError, StoreError
from dledger.commitlog.mark import Anchor, Mark, load_anchor, newest_payload
from dledger.commitlog.seams import Disk, DiskFile
from dledger.commitlog.segment import LogFormat, read_format, segment_base
from dledger.commitlog.store_paths import StorePaths
from dledger.raft.identity import Identity
from dledger.state.snapshot import load

ATTEMPTS_MAX: Final = 5
"""A checkpoint every few seconds may move the begin between two reads, not between all of them."""

NOT_KNOWN: Final = -1
"""Position of an entry that tables name: they have its end alone."""


class NotABrokersFolderError(StoreError):
    """There is no data folder of a broker, or nothing in it that could be backed up."""


class SegmentGoneError(StoreError):
    """Retention removed a segment while it was to be copied."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What a folder held at one moment.

    Attributes:
        tables: The snapshot of the tables after entry *applied_index*; None: none was written.
        mark: The newest entry that is known to be committed; its begin may be `NOT_KNOWN`.
    """

    anchor: Anchor
    mark: Mark
    tables: bytes | None
    applied_index: int
    applied_chain: int


class Source:
    """One data folder; *root*: absolute path."""

    def __init__(self, disk: Disk, root: str) -> None:
        """Read what does not change while it is there.

        Raises:
            NotABrokersFolderError: It is none.
            ForeignStoreError, CorruptStoreError: It cannot be read.
        """
        self._disk = disk
        self._paths = paths = StorePaths(root)
        if not (disk.exists(paths.identity) and disk.exists(paths.format)):
            raise NotABrokersFolderError(
                f"{root} is no data folder of a broker; nothing was copied. Give the folder that "
                "store.path_root_dir names"
            )
        self.log_format: LogFormat = read_format(disk, paths)
        self.identity = Identity.load(disk, paths.identity)
        self._segments: dict[int, DiskFile] = {}

    @property
    def root(self) -> str:
        """The folder."""
        return self._paths.root

    @property
    def is_running(self) -> bool:
        """Whether a broker holds the folder; it is not kept out by the question."""
        if not self._disk.exists(self._paths.lock):
            return False
        with open(self._paths.lock, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def mark(self) -> Mark | None:
        """Return the newest entry that this member knows to be committed; None: it knows none.

        Raises CorruptStoreError: the mark is damaged.
        """
        if not self._disk.exists(self._paths.commit_mark):
            return None
        payload = newest_payload(self._disk.read(self._paths.commit_mark))
        return None if payload is None else Mark.decode(payload)

    def look(self) -> Picture:
        """Return what the folder holds now.

        Raises:
            NotABrokersFolderError: Nothing in it is committed yet.
            CorruptStoreError: It is being refilled, or what is in it does not fit together.
        """
        failure: NotABrokersFolderError | None = None
        for _ in range(ATTEMPTS_MAX):
            try:
                picture = self._look()
            except NotABrokersFolderError as error:
                failure = error  # or the begin moved past the mark that was read before it
                continue
            failure = None
            if picture.tables is None and picture.anchor.first_index == 1:
                return picture
            if (
                picture.tables is not None
                and picture.anchor.first_index <= picture.applied_index + 1
            ):
                return picture
        if failure is not None:
            raise failure
        raise CorruptStoreError(
            f"the tables in {self.root} do not fit the log there; nothing was copied. Take the "
            "folder of another member"
        )

    def _look(self) -> Picture:
        disk, paths = self._disk, self._paths
        if disk.exists(paths.install):
            raise CorruptStoreError(
                f"{self.root} is being refilled from a leader; nothing was copied. Wait until "
                "dledger raft status shows no lag, or take the folder of another member"
            )
        data = disk.read(paths.snapshot) if disk.exists(paths.snapshot) else None
        tables = None if data is None else load(data)
        mark = self.mark()
        if tables is not None and (mark is None or mark.index < tables.applied_index):
            # A checkpoint is between its two writes, or was when the broker was killed.
            mark = Mark(
                tables.applied_index,
                tables.applied_term,
                NOT_KNOWN,
                tables.applied_chain,
                tables.applied_end_position,
            )
        anchor = load_anchor(disk, paths.anchor)
        if mark is None or mark.index < anchor.first_index:
            raise NotABrokersFolderError(
                f"{self.root} knows of no committed entry yet; nothing was copied. Send a message, "
                "wait for a checkpoint (seconds), and make the backup again"
            )
        if tables is None:
            return Picture(anchor, mark, None, 0, 0)
        return Picture(anchor, mark, data, tables.applied_index, tables.applied_chain)

    def at(self, position: int, size: int) -> bytes:
        """Return up to *size* bytes of the log; fewer at the end of a segment.

        Raises:
            SegmentGoneError: The segment is not there.
            CorruptStoreError: The disk does not give them.
        """
        base = segment_base(position, self.log_format.segment_bytes)
        file = self._segments.get(base)
        if file is None:
            self.close()
            try:
                file = self._disk.open(self._paths.segment(base))
            except FileNotFoundError as error:
                raise SegmentGoneError(
                    f"the segment {self._paths.segment(base)} is not there any more: retention "
                    "removed it. The backup is what it was; make it again"
                ) from error
            self._segments[base] = file
        try:
            return file.read(position - base, min(size, file.size - (position - base)))
        except OSError as error:
            raise CorruptStoreError(
                f"{file.path} cannot be read at byte {position - base}: {error}. The backup is "
                "what it was; take the folder of another member"
            ) from error

    def close(self) -> None:
        """Give the descriptor back."""
        for file in self._segments.values():
            file.close()
        self._segments.clear()
