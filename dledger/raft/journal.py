"""The library's Journal over the CommitLog, with term and vote: the only place that seals an entry.

The library sees a list whose item 0 is the *anchor* (the position just below the first kept
entry) and whose item *n* is the entry at index ``anchor + n``. Entries are handed over as
(payload, index, term) tuples whose payload is a placeholder: the bytes stay in the segments.

Term and vote are one small CRC'd record, durable before anything that depends on it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex, overload

import cbor2
from pysyncobj.journal import Journal
from typing_extensions import Buffer

from dledger.commitlog.entry import (
    ENTRY_HEADER_BYTES,
    KIND_CONFIG,
    SIZE_FIELD_BYTES,
    EntryHeader,
    RecordBatch,
    config_body,
    parse_header,
    seal_config,
    seal_entry,
    seal_no_op,
)
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptStoreError, InvariantBroken
from dledger.commitlog.mark import SlotFile
from dledger.raft.membership import Members, MembersLog
from dledger.raft.settings import Guards
from dledger.raft.wire import NUMBER_MAX, TERM_MAX, is_name

Item = tuple[bytes, int, int]

NO_OP_COMMAND = b"\x01"
"""What the library appends when it becomes leader."""

OURS_COMMAND = b"\x10"
"""Stands for an entry of ours; above the library's own command types, so it is only ordered."""


@dataclass(slots=True)
class Proposal:
    """What a leader appends: batches of records and the first queue offset of each run."""

    batches: Sequence[RecordBatch]
    queue_offsets: Sequence[int]
    store_time_ms: int


@dataclass(slots=True)
class ConfigProposal:
    """What a leader appends to change the list of members."""

    members: Members


@dataclass(slots=True)
class Frame:
    """What a follower appends: a leader's entry, verbatim. *data* may view a network buffer."""

    data: memoryview
    header: EntryHeader
    verified_after: int | None = None
    """Chain of the entry that it was verified to follow; None: it is not verified yet."""


def entry_size(batches: Sequence[RecordBatch]) -> int:
    """Return the bytes of the entry that `batches` make."""
    return ENTRY_HEADER_BYTES + sum(
        SIZE_FIELD_BYTES * len(batch.sizes) + memoryview(batch.records).nbytes for batch in batches
    )


def members_in(
    log: EntryLog, *, after: int = 0, index: int = 0, members: Members | None = None
) -> MembersLog:
    """Return the list in force at the end of *log*, and those it may fall back to.

    Args:
        after: Entries up to here are committed and *members* is their newest list; the others are
            searched, header by header.
    Raises:
        CorruptEntryError: An entry that should hold a list does not.
    """
    found = MembersLog(index, members)
    for at in range(max(after + 1, log.first_index), log.last_index + 1):
        if at in log.damaged:
            continue  # read again once it is repaired
        frame = log.frame(at)
        header = parse_header(frame)
        if header.kind == KIND_CONFIG:
            found.append(at, Members.decode(config_body(frame, header)))
    return found


class EntryRange(Sequence[Item]):
    """A lazy run of entries. It dies with the generation it was cut from."""

    __slots__ = ("_first", "_generation", "_journal", "_stop")

    def __init__(self, journal: CommitLogJournal, first: int, stop: int) -> None:
        self._journal = journal
        self._first = first
        self._stop = max(first, stop)
        self._generation = journal.log.generation

    def __len__(self) -> int:
        return self._stop - self._first

    @overload
    def __getitem__(self, item: SupportsIndex) -> Item: ...
    @overload
    def __getitem__(self, item: slice) -> EntryRange: ...
    def __getitem__(self, item: SupportsIndex | slice) -> Item | EntryRange:
        if self._journal.log.generation != self._generation:
            raise InvariantBroken("a range of log entries was used after the log was truncated")
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                raise InvariantBroken("log ranges are cut without a step")
            return EntryRange(self._journal, self._first + start, self._first + stop)
        at = item.__index__()
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._journal.item(self._first + at)

    def __iter__(self) -> Iterator[Item]:
        for index in range(self._first, self._stop):
            yield self[index - self._first]


class CommitLogJournal(Journal):
    """The replicated log as the library knows it, kept in an `EntryLog`.

    Invariant: ``stable_index <= log.last_index``; an entry at or below `commit_index` is never
    truncated.
    """

    def __init__(
        self,
        log: EntryLog,
        term_vote: TermVote,
        *,
        restored_commit_index: int,
        store_host: bytes,
        sync_flush: bool,
        guards: Guards,
        members: MembersLog | None = None,
    ) -> None:
        self.log = log
        self.term_vote = term_vote
        self.members = members_in(log) if members is None else members
        if guards.commit_restored_clamped:
            restored_commit_index = min(restored_commit_index, log.durable_index)
        self._commit_index = restored_commit_index
        self._store_host = store_host
        self._sync_flush = sync_flush
        self._guards = guards
        self.truncations = 0
        self._unflushed_lists: list[int] = []
        """Entries with a list of members that were not on disk when this was last looked at."""
        self._anchor: Item = (b"", log.first_index - 1, log.term_at(log.first_index - 1))
        self._last: Item = self.item(log.last_index)

    # -- what the rest of dledger.raft reads -----------------------------------------------

    @property
    def anchor_index(self) -> int:
        """Index just below the first kept entry."""
        return self._anchor[1]

    @property
    def last_index(self) -> int:
        """Index of the newest entry, durable or not."""
        return self._last[1]

    @property
    def last_term(self) -> int:
        """Term of the newest entry."""
        return self._last[2]

    @property
    def stable_index(self) -> int:
        """Newest index this node may acknowledge: durable, or written with an async flush.

        A list of members is flushed in any case: were one lost that counted, the members before it
        could elect without those that it brought.
        """
        if self._sync_flush and self._guards.durable_before_promise:
            return self.log.durable_index
        return self._unflushed_lists[0] - 1 if self.waits_for_list else self.last_index

    @property
    def waits_for_list(self) -> bool:
        """Whether an async flush must not wait: it covers a list of members."""
        lists, durable_index = self._unflushed_lists, self.log.durable_index
        while lists and lists[0] <= durable_index:
            del lists[0]
        return bool(lists)

    @property
    def has_unflushed(self) -> bool:
        """Whether entries were written that no flush covers yet."""
        return self.log.durable_index < self.last_index

    @property
    def commit_index(self) -> int:
        """What the library last reported as committed."""
        return self._commit_index

    def term_at(self, index: int) -> int:
        """Return the term of the entry at *index*, the anchor included."""
        if index == self._last[1]:
            return self._last[2]
        return self._anchor[2] if index == self._anchor[1] else self.log.term_at(index)

    def end_position_of(self, index: int) -> int:
        """Return the byte position just after the entry at *index*, the anchor included."""
        if index < self.log.first_index:
            return self.log.first_position
        if index == self._last[1]:
            return self.log.end_position
        return self.log.position_at(index) + self.log.size_at(index)

    def item(self, index: int) -> Item:
        """Return the library's tuple for the entry at *index*."""
        if index < self.log.first_index:
            return self._anchor
        return (OURS_COMMAND, index, self.log.term_at(index))

    def first_index_of_term(self, index: int) -> int:
        """Return the first index at or below *index* that has the same term as *index*."""
        term = self.term_at(index)
        low, high = self.anchor_index, index
        while low < high:
            middle = (low + high) // 2
            if self.term_at(middle) < term:
                low = middle + 1
            else:
                high = middle
        return low

    def replace_log(self, log: EntryLog) -> None:
        """Continue on *log*, which holds nothing of what the old one held.

        What was committed in the old one is void: only what the anchor stands for is committed.
        """
        self.log = log
        self._unflushed_lists = []
        self.anchor_moved()
        self._last = self.item(log.last_index)
        self._commit_index = self.anchor_index

    def anchor_moved(self) -> None:
        """Read the anchor again: the log begins elsewhere now."""
        before = self.log.first_index - 1
        self._anchor = (b"", before, self.log.term_at(before))

    # -- the library's Journal -------------------------------------------------------------

    def add(self, command: Proposal | ConfigProposal | Frame | bytes, idx: int, term: int) -> None:
        """Append one entry; sealing happens here and nowhere earlier.

        Raises:
            DiskFullError: Nothing was appended.
            InvariantBroken: *idx* is not the next index, or a frame differs from its place.
            CorruptEntryError: A list of members of a newer version; nothing was appended.
        """
        if idx != self.last_index + 1:
            raise InvariantBroken(f"append at index {idx} after {self.last_index}")
        if isinstance(command, Frame):
            if (command.header.index, command.header.term) != (idx, term):
                raise InvariantBroken(
                    f"entry {command.header.index} of term {command.header.term} "
                    f"offered as {idx} of term {term}"
                )
            brought = _members_of(command)
            self.log.append(
                command.data, header=command.header, verified_after=command.verified_after
            )
        else:
            brought = command.members if isinstance(command, ConfigProposal) else None
            self.log.append(self._seal(command, idx, term), sealed_here=True)
        if brought is not None:
            self.members.append(idx, brought)
            if not self._sync_flush:
                self._unflushed_lists.append(idx)
        self._last = (OURS_COMMAND, idx, term)

    def _seal(self, command: Proposal | ConfigProposal | bytes, index: int, term: int) -> Buffer:
        log = self.log
        if isinstance(command, Proposal):
            size = entry_size(command.batches)
            return seal_entry(
                command.batches,
                command.queue_offsets,
                index=index,
                term=term,
                position=log.place(size),
                prev_chain=log.last_chain,
                store_time_ms=max(command.store_time_ms, log.last_store_time_ms),
                store_host=self._store_host,
            )
        if isinstance(command, ConfigProposal):
            body = command.members.encode()
            return seal_config(
                body,
                index=index,
                term=term,
                position=log.place(ENTRY_HEADER_BYTES + len(body)),
                prev_chain=log.last_chain,
                store_time_ms=log.last_store_time_ms,
            )
        if command != NO_OP_COMMAND:
            raise InvariantBroken("the library tried to append a command of its own")
        return seal_no_op(
            index=index,
            term=term,
            position=log.place(entry_size(())),
            prev_chain=log.last_chain,
            store_time_ms=log.last_store_time_ms,
        )

    @overload
    def __getitem__(self, item: int) -> Item: ...
    @overload
    def __getitem__(self, item: slice) -> EntryRange | list[Item]: ...
    def __getitem__(self, item: int | slice) -> Item | EntryRange | list[Item]:
        if isinstance(item, slice):
            start, stop, _ = item.indices(len(self))
            cut = EntryRange(self, self.anchor_index + start, self.anchor_index + stop)
            return cut if self._guards.lazy_ranges else list(cut)
        if item == -1:
            return self._last
        return self._anchor if item == 0 else self.item(self.anchor_index + item)

    def __len__(self) -> int:
        return self.last_index - self.anchor_index + 1

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803 - the library's name
        """Drop the entry at list position *entryFrom* and all after it.

        Raises InvariantBroken: a committed entry would go; the node must stop.
        """
        index = self.anchor_index + entryFrom
        if index <= self._commit_index and self._guards.idempotent_append:
            raise InvariantBroken(
                f"truncation at {index} would cut what is committed up to {self._commit_index}"
            )
        if index > self.last_index:
            return
        self.log.truncate_from(index)
        self.members.truncate_from(index)
        self._unflushed_lists = [at for at in self._unflushed_lists if at < index]
        self.truncations += 1
        self._last = self.item(index - 1)

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803 - the library's name
        """Refuse: a prefix is removed by retention only, whole segments at a time."""
        raise InvariantBroken("the library tried to compact the log")

    def clear(self) -> None:
        """Refuse: nothing empties the log."""
        raise InvariantBroken("the library tried to clear the log")

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        """Record the library's commit index."""
        self._commit_index = raftCommitIndex
        self.members.committed(raftCommitIndex)

    def getRaftCommitIndex(self) -> int:  # noqa: N802 - the library's name
        """Return the commit index this node may start from."""
        return self._commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        """Record term and vote; durable once `TermVote` was flushed."""
        self.term_vote.set(term, votedForNodeId)

    def getCurrentTerm(self) -> int:  # noqa: N802 - the library's name
        """Return the newest term this node has seen."""
        return self.term_vote.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802 - the library's name
        """Return whom this node voted for in that term."""
        return self.term_vote.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802 - the library's name
        """Nothing: the commit mark is written by the node's own housekeeping."""

    def _destroy(self) -> None:
        """Nothing: the log is closed by its owner."""


def _members_of(frame: Frame) -> Members | None:
    if frame.header.kind != KIND_CONFIG:
        return None
    return Members.decode(config_body(frame.data, frame.header))


COPIES: Final = 2
"""Both slots hold the record before it counts: with one of them damaged, the other would otherwise
have the vote before, and a bad sector would be the same as a write that a crash has torn."""


def parse_term_vote(payload: bytes) -> tuple[int, str | None]:
    """Return term and vote from their record.

    Raises CorruptStoreError: it cannot be read, or holds a term or vote that no member comes to.
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
            f"the stored term, {shown}, cannot come from elections: it is forged or damaged."
            " Repair it with: dledger raft repair-term DIR"
        )
    if voted_for is not None and not is_name(voted_for):
        raise CorruptStoreError(
            "the stored vote does not name a member. Repair it with: dledger raft repair-term DIR"
        )
    return term, voted_for


def load_term_vote(slots: SlotFile, *, has_taken_part: bool) -> TermVote:
    """Return the stored term and vote. Blocking: a new folder gets its first record.

    So a record that is missing is noticed: *has_taken_part* is whether this member is in a group,
    or has a log.

    Raises:
        CorruptStoreError: As `TermVote`; or the record is missing, and a vote with it.
        DiskFullError, FlushFailedError: The first record was not written; start again.
    """
    if slots.load() is None:
        if has_taken_part:
            raise CorruptStoreError(
                "the term and vote record is missing: a vote of this member may be forgotten."
                " Write one again with: dledger raft repair-term DIR"
            )
        slots.store(cbor2.dumps([0, None]))
    return TermVote(slots)


class TermVote:
    """The newest term seen and the vote given in it.

    `set` changes memory only and raises `version`; `snapshot` and `write` make it durable.
    Messages that rest on a vote wait until ``durable_version`` has reached the version that was
    current when they were made.
    """

    def __init__(self, slots: SlotFile) -> None:
        """Load the last durable record.

        Raises CorruptStoreError: both slots are damaged: a vote may be forgotten, so the node must
        not take part. Or no member comes to the term or the vote.
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
                # A crash came between the copies, or one is damaged: written again before use.
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

        Raises FlushFailedError: nothing that rests on it may be sent; the node stops.
        """
        for _ in range(COPIES):
            self._slots.store(record)

    def mark_durable(self, version: int) -> None:
        """Record that *version* is on disk."""
        self.durable_version = max(self.durable_version, version)
