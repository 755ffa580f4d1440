"""Which entries the key index of a replica has: all that are applied, or those up to a position.

As a rule apply puts the keys of every entry. When files of the index are given up, because the
disk does not give them back, apply leaves it alone and the keys are put again from the log, a few
entries at a time, until the index is as far as apply; from then on apply puts them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog

from commitlog.derive import Derived, derive
from commitlog.entry import parse_header
from commitlog.errors import CorruptEntryError, DiskFullError, OffsetOutOfRangeError
from commitlog.key_index import KeyIndex, KeyIndexFlush

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from commitlog.entry_log import EntryLog

log = structlog.get_logger(__name__)

KEYS_ARE_MISSING: Final = "keys are being put into the key index again; ask again later"
"""Answer to a query that finds nothing meanwhile."""

TO_BE_FOUND: Final = 0
"""Stands for the entry from which on keys are missing, until it is searched."""


def walk(
    entry_log: EntryLog,
    first: int,
    last: int,
    delays: Mapping[int, int],
    max_bytes: int,
    *,
    skip_damaged: bool,
) -> Iterator[tuple[int, Derived | None]]:
    """Yield the entries from *first* to *last* with what follows from them, some at a time.

    Args:
        delays: Of levels, in milliseconds.
        max_bytes: Stop after this number of bytes of entries; at least one is read.
        skip_damaged: Yield None for an entry that cannot be read.
    Raises:
        CorruptEntryError: An entry waits for its repair.
    """
    left = max_bytes
    for index in range(max(first, entry_log.first_index), last + 1):
        if left <= 0:
            return
        try:
            frame = entry_log.frame(index)
        except CorruptEntryError:
            if not skip_damaged:
                raise
            yield index, None
        else:
            left -= len(frame)
            yield index, derive(frame, parse_header(frame), delay_ms=delays)


class KeyIndexing:
    """The key index, and how far it is.

    Attributes:
        index: The files.
        next_index: First entry whose keys are to be put again; None while apply puts them.
        on_behind: Called when keys are to be put again from now on.
    """

    def __init__(self, index: KeyIndex) -> None:
        self.index = index
        self.next_index: int | None = None
        self.on_behind: Callable[[], object] = lambda: None
        self._lost_seen = index.files_lost
        index.on_unreadable = self._note_unreadable

    def _note_unreadable(self, path: str, why: str) -> None:
        log.error("key_index_file_unreadable", path=path, error=why)
        self.on_behind()

    @property
    def is_behind(self) -> bool:
        """Whether keys of applied entries may be missing."""
        return self.index.is_behind

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows."""
        return {"behind": self.is_behind, "files_lost": self.index.files_lost}

    def begin(self, *, nothing_derived: bool) -> None:
        """Make ready for the first entry; blocking.

        Args:
            nothing_derived: Every entry of the log is still to be applied.
        """
        self.index.prepare()
        self._lost_seen = self.index.files_lost
        if not self.index.is_behind:
            return
        if not nothing_derived:
            self.next_index = TO_BE_FOUND
            return
        job = self.index.begin_completion()
        try:
            job.run()
        except DiskFullError as error:
            log.error("no_space_for_key_index", error=str(error))
        self.index.end_completion(job)

    def put(self, derived: Derived) -> None:
        """Put the keys of an entry that is being applied.

        Raises:
            DiskFullError: Some of them may be missing; to be put again.
        """
        if self.next_index is None and len(derived.key_hashes):
            self._put(derived)

    def _put(self, derived: Derived) -> bool:
        index = self.index
        index.put_bulk(derived.key_hashes, derived.key_phy_offsets, derived.key_store_times)
        if index.has_unreadable or index.files_lost != self._lost_seen:
            self._lost_seen = index.files_lost
            self.next_index = TO_BE_FOUND
            self.on_behind()
            return False
        return True

    def step(
        self,
        entry_log: EntryLog,
        last: int,
        delays: Mapping[int, int],
        max_bytes: int,
        *,
        skip_damaged: bool,
    ) -> bool:
        """Put the keys of a few more entries; tell whether there are more to be put.

        Args:
            last: Newest entry that is applied.
            max_bytes: Stop after this number of bytes of entries; at least one is read.
            skip_damaged: Leave out entries that cannot be repaired.
        Raises:
            CorruptEntryError: An entry waits for its repair; come again.
            DiskFullError: Come again when there is space.
        """
        if self.index.give_up_unreadable():
            self._lost_seen = self.index.files_lost
            self.next_index = TO_BE_FOUND
        if self.next_index is None:
            return False
        if self.next_index == TO_BE_FOUND:
            self.next_index = self._first_missing(entry_log)
            log.warning("key_index_is_made_again", first=self.next_index, last=last)
        for index, derived in walk(
            entry_log, self.next_index, last, delays, max_bytes, skip_damaged=skip_damaged
        ):
            if derived is not None and len(derived.key_hashes) and not self._put(derived):
                return True
            self.next_index = index + 1
        if self.next_index <= last:
            return True
        self.next_index = None
        return False

    def _first_missing(self, entry_log: EntryLog) -> int:
        try:
            return entry_log.index_of(self.index.end_phy_offset)
        except OffsetOutOfRangeError:
            return entry_log.first_index

    def begin_completion(self) -> KeyIndexFlush | None:
        """Return the job that notes, durably, that the index is as far as apply; None if it is not.

        Run by the caller, one at a time with the flushes of checkpoints; `KeyIndex.end_completion`
        follows.
        """
        if self.next_index is not None or not self.index.is_behind or self.index.has_unreadable:
            return None
        return self.index.begin_completion()
