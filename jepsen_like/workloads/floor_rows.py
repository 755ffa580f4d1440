"""How a replica came to begin later: rows of a history, read from its log."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from commitlog.entry import KIND_RECORDS, parse_header, record_starts
from commitlog.entry_log import EntryLog
from commitlog.record import decode_record
from dledger.state.names import FLOOR_QUEUE, STATE_TOPIC
from dledger.state.state_record import FloorChange, decode_change
from dledger.state.tables import StateTables
from jepsen_like.checkers.half_messages import DISCARD_TOPIC
from jepsen_like.history.operation import FloorMove
from jepsen_like.workloads.recorder import TOPIC

Queue = tuple[str, int]

TOPICS: Final = (TOPIC, DISCARD_TOPIC)
"""Those of the history."""

HOUR_MS: Final = 3_600_000


def kept_offsets(log: EntryLog, tables: StateTables, first: int, last: int) -> dict[Queue, int]:
    """Return, by queue, the first offset in entries *first* … *last*; its end where there is none.

    Args:
        tables: Which queues there are after *last*, and where they end.
    Raises:
        MQError: An entry cannot be read.
    """
    found: dict[Queue, int] = {}
    for index in range(first, last + 1):
        frame = log.frame(index)
        header = parse_header(frame)
        if header.kind != KIND_RECORDS:
            continue
        for start in record_starts(frame, header).tolist():
            record = decode_record(frame, start, check_crc=False)
            found.setdefault((record.topic, record.queue_id), record.queue_offset)
        if tables.queues.keys() <= found.keys():
            break
    return {key: found.get(key, bounds.max_offset) for key, bounds in tables.queues.items()}


def move_of(log: EntryLog, index: int, change: FloorChange, *, node: str, at_ns: int) -> FloorMove:
    """Return the row of the move that entry *index* makes.

    Raises:
        MQError: An entry cannot be read.
    """
    floor, reason = change.floor, change.reason
    header, newest_ms = parse_header(log.frame(index)), floor.prev_store_time_ms
    if floor.first_index > log.first_index:
        newest_ms = parse_header(log.frame(floor.first_index - 1)).store_time_ms
    return FloorMove(
        at_ns,
        node,
        index,
        cause="" if reason is None else reason.cause,
        position=floor.position,
        end_position=header.position,
        newest_ms=newest_ms,
        stored_ms=header.store_time_ms,
        keep_bytes=0 if reason is None else reason.keep_bytes,
        keep_ms=0 if reason is None else reason.reserved_hours * HOUR_MS,
    )


def rows_of(
    move: FloorMove, kept: dict[Queue, int], *, before: dict[Queue, int]
) -> list[FloorMove]:
    """Return the rows of a move: its own, and one for each queue that begins later by it.

    Args:
        kept: As of `kept_offsets`.
        before: Where queues began already.
    """
    rows = [move]
    for (topic, queue_id), offset in sorted(kept.items()):
        if topic in TOPICS and offset > before.get((topic, queue_id), 0):
            row = FloorMove(move.at_ns, move.node, move.index, topic, queue_id, offset, move.cause)
            rows.append(row)
    return rows


def newest_move(log: EntryLog, tables: StateTables) -> tuple[int, FloorChange] | None:
    """Return the entry that moved the floor last, and its content; None: it never moved.

    Raises:
        MQError: An entry cannot be read.
    """
    found: tuple[int, FloorChange] | None = None
    if tables.floor.first_index <= 1:
        return None
    for index in range(tables.floor.first_index, tables.applied_index + 1):
        frame = log.frame(index)
        header = parse_header(frame)
        if header.kind != KIND_RECORDS:
            continue
        for start in record_starts(frame, header).tolist():
            record = decode_record(frame, start, check_crc=False)
            if (record.topic, record.queue_id) == (STATE_TOPIC, FLOOR_QUEUE):
                change = decode_change(FLOOR_QUEUE, record.body)
                assert isinstance(change, FloorChange)
                found = index, change
    return found


def final_rows(
    log: EntryLog, tables: StateTables, known: Collection[int], *, node: str, at_ns: int
) -> list[FloorMove]:
    """Return where the log of a replica begins when a run is over.

    Args:
        known: Entries whose move has its rows.
    Raises:
        MQError: An entry cannot be read.
    """
    moved = newest_move(log, tables)
    if moved is None:
        return [FloorMove(at_ns, node)]
    if moved[0] in known:
        return []
    move = move_of(log, *moved, node=node, at_ns=at_ns)
    kept = kept_offsets(log, tables, tables.floor.first_index, tables.applied_index)
    return rows_of(move, kept, before={})
