"""Rows of a history read from a replica's own queues and log, not over the wire.

What it holds when a run is over (`read_replica`), and how it came to begin later (`move_of`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Final

from dledger.commitlog.entry import KIND_RECORDS, parse_header, record_starts
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import Record, decode_record
from dledger.jepsen_like.checkers.transactions import DISCARD_TOPIC
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import (
    NOTHING,
    FloorMove,
    History,
    ReplicaRead,
    ReplicaState,
)
from dledger.jepsen_like.workloads.recorder import TOPIC, value_of
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.snapshot import snapshot
from dledger.state.state_record import FloorChange, decode_change
from dledger.state.tables import StateTables
from dledger.state.topics import FLOOR_QUEUE
from dledger.store import ReplicaStore

Queue = tuple[str, int]

TOPICS: Final = (TOPIC, DISCARD_TOPIC)
"""Those of the history."""

HOUR_MS: Final = 3_600_000


def _records(log: EntryLog, first: int, last: int) -> Iterator[tuple[int, Record]]:
    """Yield the records in entries *first* … *last*, each with the index of its entry."""
    for index in range(first, last + 1):
        frame = log.frame(index)
        header = parse_header(frame)
        if header.kind == KIND_RECORDS:
            for start in record_starts(frame, header).tolist():
                yield index, decode_record(frame, start, check_crc=False)


def kept_offsets(log: EntryLog, tables: StateTables, first: int, last: int) -> dict[Queue, int]:
    """Return, by queue, the first offset in entries *first* … *last*; its end where there is none.

    Raises MQError: an entry cannot be read.
    """
    found: dict[Queue, int] = {}
    missing = set(tables.queues)
    for _, record in _records(log, first, last):
        queue = (record.topic, record.queue_id)
        found.setdefault(queue, record.queue_offset)
        missing.discard(queue)
        if not missing:
            break
    return {key: found.get(key, bounds.max_offset) for key, bounds in tables.queues.items()}


def move_of(log: EntryLog, index: int, change: FloorChange, *, node: str, at_ns: int) -> FloorMove:
    """Return the row of the move that entry *index* makes.

    Raises MQError: an entry cannot be read.
    """
    floor, reason = change.floor, change.reason
    header, newest_ms = parse_header(log.frame(index)), floor.prev_store_time_ms
    if floor.first_index > log.first_index:
        newest_ms = parse_header(log.frame(floor.first_index - 1)).store_time_ms
    return FloorMove(
        at_ns,
        node,
        index,
        cause=reason.cause,
        position=floor.position,
        end_position=header.position,
        newest_ms=newest_ms,
        stored_ms=header.store_time_ms,
        keep_bytes=reason.keep_bytes,
        keep_ms=reason.reserved_hours * HOUR_MS,
    )


def rows_of(
    move: FloorMove, kept: dict[Queue, int], *, before: dict[Queue, int]
) -> list[FloorMove]:
    """Return the rows of a move: its own, and one for each queue that begins later by it."""
    rows = [move]
    for (topic, queue_id), offset in sorted(kept.items()):
        if topic in TOPICS and offset > before.get((topic, queue_id), 0):
            row = FloorMove(move.at_ns, move.node, move.index, topic, queue_id, offset, move.cause)
            rows.append(row)
    return rows


def newest_move(log: EntryLog, tables: StateTables) -> tuple[int, FloorChange] | None:
    """Return the entry that moved the floor last, and its content; None: it never moved.

    Raises MQError: an entry cannot be read.
    """
    found: tuple[int, FloorChange] | None = None
    if tables.floor.first_index <= 1:
        return None
    for index, record in _records(log, tables.floor.first_index, tables.applied_index):
        if (record.topic, record.queue_id) == (STATE_TOPIC, FLOOR_QUEUE):
            change = decode_change(FLOOR_QUEUE, record.body)
            assert isinstance(change, FloorChange)
            found = index, change
    return found


def final_rows(
    log: EntryLog, tables: StateTables, known: Collection[int], *, node: str, at_ns: int
) -> list[FloorMove]:
    """Return where the log of a replica begins when a run is over.

    Raises MQError: an entry cannot be read.
    """
    moved = newest_move(log, tables)
    if moved is None:
        return [FloorMove(at_ns, node)]
    if moved[0] in known:
        return []
    move = move_of(log, *moved, node=node, at_ns=at_ns)
    kept = kept_offsets(log, tables, tables.floor.first_index, tables.applied_index)
    return rows_of(move, kept, before={})


CHECKER = "final_read"
UNREADABLE = "replica cannot be read"


def read_replica(
    name: str, replica: ReplicaStore | None, history: History, now_ns: int
) -> list[Violation]:
    """Add to *history* what the replica *name* holds; return what could not be read.

    Every unit must name a record of that queue and offset, with a right checksum.

    *replica*: None when it does not run, which is a violation, too.
    """
    if replica is None:
        return [Violation(UNREADABLE, name, "it does not run", checker=CHECKER)]
    tables = replica.tables
    digest = blake2b(snapshot(tables), digest_size=16).hexdigest()
    history.replica_states.append(
        ReplicaState(now_ns, name, tables.applied_index, tables.applied_chain, digest)
    )
    found: list[Violation] = []
    with suppress(MQError):  # what cannot be read here another replica has
        known = {move.index for move in history.floors} - {0}
        history.floors += final_rows(replica.log, tables, known, node=name, at_ns=now_ns)
    for (topic, queue_id), bounds in sorted(tables.queues.items()):
        if topic not in TOPICS:
            continue
        low, high = bounds.min_offset, bounds.max_offset
        values: list[int] = []
        subject = f"{name} {topic}/{queue_id}"
        units = replica.queues.queue(topic, queue_id).read(low, high - low)
        if len(units) != high - low:
            text = f"the consume queue has {len(units)} units for {low} … {high}"
            found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
        for place, (phy_offset, size, _) in enumerate(units.tolist()):
            at = low + place
            try:
                record = decode_record(replica.log.record_at(phy_offset))
            except MQError as error:
                text = f"offset {at} at {phy_offset}: {type(error).__name__}: {error}"
                found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
                values.append(NOTHING)
                continue
            right = (topic, queue_id, at, size)
            there = (record.topic, record.queue_id, record.queue_offset, record.size)
            if there != right:
                text = f"the unit of {right} leads to {there}"
                found.append(Violation(UNREADABLE, subject, text, checker=CHECKER, at_ns=now_ns))
            values.append(value_of(record.body))
        history.replica_reads.append(ReplicaRead(now_ns, name, topic, queue_id, low, tuple(values)))
    return found[:8]
