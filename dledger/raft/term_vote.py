"""Term and vote: one small CRC'd record, durable before anything that rests on it leaves."""

from __future__ import annotations

from typing import Final

import cbor2

from commitlog.errors import CorruptStoreError
from commitlog.slot_file import SlotFile

COPIES: Final = 2
"""Both slots hold the record before it counts: with one of them spoilt, the other would otherwise
have the vote before, and nobody could tell a bad sector from a write that a crash has torn."""


class TermVote:
    """The newest term seen and the vote given in it.

    `set` changes memory only and raises `version`; `snapshot` and `write` make it durable.
    Messages that rest on a vote wait until ``durable_version`` has reached the version that was
    current when they were made.
    """

    def __init__(self, slots: SlotFile) -> None:
        """Load the last durable record.

        Raises:
            CorruptStoreError: Both slots are damaged: a vote may be forgotten, so the node must
                not take part.
        """
        self._slots = slots
        self.term = 0
        self.voted_for: str | None = None
        self.version = 0
        self.durable_version = 0
        payload = slots.load()
        if payload is not None:
            record = cbor2.loads(payload)
            if not (isinstance(record, list) and len(record) == 2):
                raise CorruptStoreError("the term and vote record is not what this version writes")
            self.term, self.voted_for = record
            if not slots.is_doubled:
                # A crash came between the copies, or one is spoilt: written again before use.
                self.version = 1

    @property
    def is_durable(self) -> bool:
        """Whether the newest version is on disk."""
        return self.durable_version == self.version

    def set(self, term: int, voted_for: str | None) -> None:
        """Change term and vote in memory."""
        if (term, voted_for) != (self.term, self.voted_for):
            self.term, self.voted_for = term, voted_for
            self.version += 1

    def snapshot(self) -> tuple[int, bytes]:
        """Return the newest version and the record that `write` makes durable."""
        return self.version, cbor2.dumps([self.term, self.voted_for])

    def write(self, record: bytes) -> None:
        """Write and flush a record. Blocking, safe in a worker thread, one caller at a time.

        Raises:
            FlushFailedError: Nothing that rests on it may be sent; the node stops.
        """
        for _ in range(COPIES):
            self._slots.store(record)

    def mark_durable(self, version: int) -> None:
        """Take note that *version* is on disk."""
        self.durable_version = max(self.durable_version, version)
