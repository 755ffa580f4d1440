"""Term and vote: one small CRC'd record, durable before anything that rests on it leaves."""

from __future__ import annotations

from typing import Final

import cbor2

from commitlog.errors import CorruptStoreError
from commitlog.slot_file import SlotFile
from dledger.raft.bounds import NUMBER_MAX, TERM_MAX, is_name

COPIES: Final = 2
"""Both slots hold the record before it counts: with one of them spoilt, the other would otherwise
have the vote before, and nobody could tell a bad sector from a write that a crash has torn."""


def parse_term_vote(payload: bytes) -> tuple[int, str | None]:
    """Return term and vote from their record.

    Raises:
        CorruptStoreError: It is none, or one that no member comes to.
    """
    try:
        record = cbor2.loads(payload)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise CorruptStoreError("the term and vote record cannot be read") from error
    if not (isinstance(record, list) and len(record) == 2):
        raise CorruptStoreError("the term and vote record is not what this version writes")
    term, voted_for = record
    if type(term) is not int or not 0 <= term <= TERM_MAX:
        shown = term if type(term) is int and 0 <= term <= NUMBER_MAX else "beyond all numbers"
        raise CorruptStoreError(
            f"the stored term, {shown}, is none that a group comes to: somebody made it up."
            " Repair it with: dledger raft repair-term DIR"
        )
    if voted_for is not None and not is_name(voted_for):
        raise CorruptStoreError(
            "the stored vote is for nobody who can be a member. Repair it with:"
            " dledger raft repair-term DIR"
        )
    return term, voted_for


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
                not take part. Or the term or the vote is none that a member comes to.
        """
        self._slots = slots
        self.term = 0
        self.voted_for: str | None = None
        self.version = 0
        self.durable_version = 0
        payload = slots.load()
        if payload is not None:
            self.term, self.voted_for = parse_term_vote(payload)
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
