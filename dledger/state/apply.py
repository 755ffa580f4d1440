"""Apply committed entries to the tables: one, or many that are read at once.

It never rejects: whatever could be wrong with a message was decided before it was appended, on the
applied state plus the leader's own pending entries. What contradicts the tables here is a bug, and
the node stops.

Of those that are applied at once, one that is not plain, or is damaged, is applied alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import Buffer

from dledger.commitlog.derive import Derived, derive_together
from dledger.commitlog.entry import (
    KIND_CONFIG,
    KIND_RECORDS,
    EntryHeader,
    config_body,
    parse_header,
)
from dledger.commitlog.entry_log import EntryLog
from dledger.commitlog.errors import CorruptEntryError, CorruptRecordError, InvariantBroken
from dledger.commitlog.properties import TIMER_TOPIC
from dledger.commitlog.queue_unit import Units
from dledger.commitlog.record import checked_body
from dledger.remoting.protocol.topic_names import HALF_TOPIC, STATE_TOPIC
from dledger.state.accounts import AccessChange, apply_accounts
from dledger.state.pop import PopChange, apply_pop
from dledger.state.producer_sessions import StoredSend
from dledger.state.queue_lock import QueueLocksChange, apply_queue_locks
from dledger.state.state_record import (
    ConsumerOffsetsChange,
    DelayProgressChange,
    FloorChange,
    ProducerOpenedChange,
    ProducerSendChange,
    QueueFloorsChange,
    SubscriptionGroupsChange,
    TimersChange,
    TopicsChange,
    TransactionsChange,
    decode_change,
)
from dledger.state.table import StateChange
from dledger.state.tables import QueueBounds, StateTables

# ---------------------------------------------------------------------------------- one entry


@dataclass(slots=True)
class QueueUnits:
    """Consume queue units of one entry for one queue, from *first* on without a gap."""

    topic: str
    queue_id: int
    first: int
    units: Units


STATE_BYTES_AT_ONCE: Final = 1 << 15
"""State records of entries that are applied together, in bytes: at most 1,400 rows, some 10 ms."""


@dataclass(slots=True)
class Applied:
    """What an entry did, for the derived files and for those that wait.

    Write `units` first, then delete the consume queues of `deleted_topics`.
    """

    index: int
    units: list[QueueUnits]
    changes: list[StateChange]
    topics_changed: bool
    deleted_topics: tuple[str, ...]
    floor_moved: bool = False
    """Then the caller raises the queues' min offsets with `raise_min_offsets`."""

    @property
    def touched(self) -> list[tuple[str, int, int]]:
        """Topic, queue id and new max offset of every queue that grew."""
        return [(item.topic, item.queue_id, item.first + len(item.units)) for item in self.units]

    @property
    def state_bytes(self) -> int:
        """Bytes of the records that changed tables."""
        return sum(
            int(each.units["size"].sum()) for each in self.units if each.topic == STATE_TOPIC
        )


def apply_entry(
    tables: StateTables, frame: Buffer, header: EntryHeader, derived: Derived
) -> Applied:
    """Bring *tables* from ``header.index - 1`` to ``header.index``.

    Raises InvariantBroken: the entry does not follow the applied one, a queue offset is not the
    next of its queue, or a state record contradicts the tables. The tables may be half changed:
    stop the node.
    """
    _check_follows(
        header, tables.applied_index, tables.applied_end_position, tables.last_store_time_ms
    )
    units: list[QueueUnits] = []
    changes: list[StateChange] = []
    if header.kind == KIND_RECORDS:
        units, state_positions = _apply_queues(tables, derived, header.store_time_ms)
        if state_positions:
            changes = _apply_state(tables, frame, header, state_positions)
    elif header.kind == KIND_CONFIG:
        tables.members_index = header.index
        tables.members_body = config_body(frame, header)
    _note_applied(tables, header)
    topic_changes = [change for change in changes if isinstance(change, TopicsChange)]
    return Applied(
        index=header.index,
        units=units,
        changes=changes,
        topics_changed=bool(topic_changes),
        deleted_topics=tuple(name for change in topic_changes for name in change.delete),
        floor_moved=any(isinstance(change, FloorChange) for change in changes),
    )


@dataclass(slots=True)
class EntriesTogether:
    """Entries that follow each other and may be applied at once; made by `entries_together`."""

    headers: Sequence[EntryHeader]
    derived: Derived
    changes: list[tuple[StateChange, EntryHeader, int]]
    """In record order, each with its entry and the position just after its record."""


def entries_together(
    frames: Buffer, headers: Sequence[EntryHeader], derived: Derived
) -> EntriesTogether | int:
    """Return what `apply_together` applies, or the index of an entry that is applied alone.

    At once is for messages, for notes of stamped sends and for committed offsets: these say nothing
    about a queue, so it makes no difference that all messages of the entries come before them.

    Raises CorruptRecordError: a state record does not fit its checksum.
    """
    begins = [header.position for header in headers]
    positions: list[tuple[int, int]] = []
    state_bytes = 0
    for topic, queue_id, where in derived.groups:
        if topic in (HALF_TOPIC, TIMER_TOPIC):
            first = int(derived.phy_offset[where][0])
            return headers[bisect_right(begins, first) - 1].index
        if topic == STATE_TOPIC:
            positions.extend((at, queue_id) for at in derived.phy_offset[where].tolist())
    positions.sort()
    changes: list[tuple[StateChange, EntryHeader, int]] = []
    for position, queue_id in positions:
        header = headers[bisect_right(begins, position) - 1]
        body, size = checked_body(frames, position - begins[0])
        change = decode_change(queue_id, body)
        state_bytes += size
        is_plain = isinstance(change, ProducerSendChange | ConsumerOffsetsChange)
        if not is_plain or state_bytes > STATE_BYTES_AT_ONCE:
            return header.index
        changes.append((change, header, position + size))
    return EntriesTogether(headers, derived, changes)


def apply_together(tables: StateTables, entries: EntriesTogether) -> Applied:
    """Do what `apply_entry` does for one entry after the other; the tables are the same then.

    Raises InvariantBroken: as `apply_entry`.
    """
    before = (tables.applied_index, tables.applied_end_position, tables.last_store_time_ms)
    for header in entries.headers:
        _check_follows(header, *before)
        before = (header.index, header.position + header.size, header.store_time_ms)
    last = entries.headers[-1]
    units, _ = _apply_queues(tables, entries.derived, last.store_time_ms)
    for change, header, end_position in entries.changes:
        _apply_change(tables, change, header, end_position)
    _note_applied(tables, last)
    changes = [change for change, _, _ in entries.changes]
    return Applied(last.index, units, changes, topics_changed=False, deleted_topics=())


def _check_follows(
    header: EntryHeader, applied_index: int, end_position: int, store_time_ms: int
) -> None:
    if header.index != applied_index + 1:
        raise InvariantBroken(f"entry {header.index} applied on top of entry {applied_index}")
    if header.position < end_position:
        raise InvariantBroken(
            f"entry {header.index} at {header.position} starts before the applied end "
            f"{end_position}"
        )
    if header.store_time_ms < store_time_ms:
        raise InvariantBroken(
            f"store time of entry {header.index} goes back from {store_time_ms} "
            f"to {header.store_time_ms}"
        )


def _note_applied(tables: StateTables, header: EntryHeader) -> None:
    tables.applied_index = header.index
    tables.applied_term = header.term
    tables.applied_chain = header.chain
    tables.applied_end_position = header.position + header.size
    tables.last_store_time_ms = header.store_time_ms


def raise_min_offsets(
    tables: StateTables, first_kept: Callable[[str, int, QueueBounds], tuple[int, int]]
) -> None:
    """Let every queue begin with its first message at or after the floor.

    *first_kept*: topic, queue id and bounds to the least offset in ``min … max`` whose message
    stands at or after ``tables.floor.position``, and where; ``max`` when none does. After an error
    of it this can be called again.
    """
    for topic, queue_id, bounds in tables.take_before(tables.floor.position):
        try:
            bounds.min_offset, position = first_kept(topic, queue_id, bounds)
        except BaseException:
            first = tables.first_positions.get((topic, queue_id), 0)
            tables.set_first(topic, queue_id, first)
            raise
        tables.queues.mark((topic, queue_id))
        if bounds.min_offset < bounds.max_offset:
            tables.set_first(topic, queue_id, position)


def _apply_queues(
    tables: StateTables, derived: Derived, store_time_ms: int
) -> tuple[list[QueueUnits], list[tuple[int, int]]]:
    """Return units per queue, and (position, state queue) of each state record."""
    result: list[QueueUnits] = []
    state_positions: list[tuple[int, int]] = []
    queues = tables.queues
    for topic, queue_id, where in derived.groups:
        offsets = derived.queue_offset[where]
        count = len(offsets)
        if not count:
            continue
        key = (topic, queue_id)
        bounds = queues.get(key)
        if bounds is None:
            bounds = tables.add_queue(topic, queue_id)
        first = bounds.max_offset
        if int(offsets[0]) != first or (
            count > 1 and not np.array_equal(offsets, np.arange(first, first + count))
        ):
            raise InvariantBroken(
                f"queue offsets {offsets.tolist()[:8]} of {topic} {queue_id} do not follow {first}"
            )
        if first == bounds.min_offset:
            tables.set_first(topic, queue_id, int(derived.phy_offset[where][0]))
        bounds.max_offset = first + count
        queues.mark(key)
        result.append(QueueUnits(topic, queue_id, first, derived.units[where]))
        if topic == STATE_TOPIC:
            state_positions.extend(
                (position, queue_id) for position in derived.phy_offset[where].tolist()
            )
        elif topic == HALF_TOPIC:
            for half_offset, position in enumerate(derived.phy_offset[where].tolist(), first):
                tables.transactions.begin(half_offset, position, store_time_ms)
        elif topic == TIMER_TOPIC:
            # A record without a time is a note of a recall: it waits for nothing.
            timed = derived.tags_code[where] > 0
            tables.timers.add((np.flatnonzero(timed) + first).tolist())
    return result, state_positions


def _apply_state(
    tables: StateTables, frame: Buffer, header: EntryHeader, positions: list[tuple[int, int]]
) -> list[StateChange]:
    # Record order, not queue order: a topic may be deleted and made again in one entry.
    positions.sort()
    changes = []
    for position, queue_id in positions:
        body, size = checked_body(frame, position - header.position)
        change = decode_change(queue_id, body)
        _apply_change(tables, change, header, position + size)
        changes.append(change)
    return changes


def _apply_change(
    tables: StateTables, change: StateChange, header: EntryHeader, end_position: int
) -> None:
    match change:
        case TopicsChange(put=put, delete=delete):
            for config in put:
                tables.set_topic(config.topic, config, end_position)
            for topic in delete:
                _delete_topic(tables, topic, end_position)
            tables.topics_counter += 1
            tables.note_topics((*(config.topic for config in put), *delete))
            tables.topics_changed_ms = header.store_time_ms
        case SubscriptionGroupsChange(groups, delete, forget):
            for group in groups:
                if group.group_name not in tables.subscription_groups:
                    tables.group_begins[group.group_name] = end_position
                tables.subscription_groups[group.group_name] = group
            for name in delete:
                tables.subscription_groups.pop(name)
                tables.group_begins.pop(name)
                tables.request_modes.drop_of(1, name)
                tables.queue_locks.drop_of(0, name)
            for name in forget:
                tables.pops.drop_of(0, name)
                tables.consumer_offsets.drop_of(0, name)
        case ConsumerOffsetsChange(offsets):
            for group_name, topics in offsets.items():
                for topic, queues in topics.items():
                    tables.set_offsets(group_name, topic, queues)
                    # What was out of these queues is consumed from the new offsets on.
                    for queue_id in queues if tables.pops else ():
                        tables.pops.pop((group_name, topic, queue_id))
        case DelayProgressChange(level, from_offset, to_offset):
            current = tables.delay_progress.get(level, 0)
            if current != from_offset or to_offset < from_offset:
                raise InvariantBroken(
                    f"entry {header.index} moves delay level {level} from {from_offset} to "
                    f"{to_offset}, but it stands at {current}"
                )
            tables.delay_progress[level] = to_offset
        case FloorChange(floor=floor):
            if floor.first_index < tables.floor.first_index or floor.first_index > header.index:
                raise InvariantBroken(
                    f"entry {header.index} moves the floor from entry {tables.floor.first_index} "
                    f"to {floor.first_index}"
                )
            tables.floor = floor
        case ProducerOpenedChange(producer_id):
            tables.producers.open(producer_id, header.index, header.store_time_ms)
        case ProducerSendChange(producer_id, epoch, sequence, first_open, refused):
            # What was sent stands right behind this record.
            send = StoredSend(end_position, refused)
            tables.producers.note(
                producer_id, epoch, sequence, first_open, send, header.store_time_ms
            )
        case TransactionsChange(decided, checked):
            for half_offset, checks in checked:
                tables.transactions.check(half_offset, checks, header.store_time_ms)
            for half_offset, decision in decided:
                tables.transactions.decide(half_offset, decision)
        case TimersChange(done, recalled):
            tables.timers.finish(done)
            tables.timers.recall(recalled)
        case QueueFloorsChange(floors=floors):
            for topic, queue_id, offset in floors:
                bounds = tables.queues.get((topic, queue_id))
                if bounds is None or offset > bounds.max_offset:
                    raise InvariantBroken(
                        f"entry {header.index} lets {topic} {queue_id} begin at {offset}, "
                        f"where {bounds} is"
                    )
                bounds.min_offset = max(bounds.min_offset, offset)
                tables.queues.mark((topic, queue_id))
        case QueueLocksChange():
            apply_queue_locks(tables.queue_locks, change, header.index)
        case PopChange():
            _apply_pop(tables, change, header)
        case AccessChange():
            apply_accounts(tables.accounts, change)
            if change.white_addresses is not None:
                tables.white_addresses = change.white_addresses
            tables.access_counter += 1
            tables.access_changed_ms = header.store_time_ms


def _apply_pop(tables: StateTables, change: PopChange, header: EntryHeader) -> None:
    floors = apply_pop(
        tables.pops,
        change,
        header.index,
        header.store_time_ms,
        lambda key: tables.consumer_offset(*key),
    )
    for key, floor in floors.items():
        tables.pops.mark(key)
        if tables.consumer_offset(*key) != floor:
            group, topic, queue_id = key
            tables.set_offsets(group, topic, {queue_id: floor})
    for mode in change.modes:
        tables.request_modes[mode.topic, mode.group] = mode


def _delete_topic(tables: StateTables, topic: str, position: int) -> None:
    tables.set_topic(topic, None, position)
    tables.drop_queues(topic)
    for table in (tables.consumer_offsets, tables.queue_locks, tables.pops):
        table.drop_of(1, topic)
    tables.request_modes.drop_of(0, topic)


# -------------------------------------------------------------------- entries that are read at once


APPLIED_TOGETHER_BYTES: Final = 1 << 20
"""Entries applied at once, bytes: some 10 ms of the event loop with messages of 256 bytes."""

APPLIED_TOGETHER_RECORDS: Final = 1_024
"""Records in entries applied at once: each may be of another queue, which costs some 30
microseconds."""


def read_together(
    entry_log: EntryLog, first: int, last: int, delays: Mapping[int, int]
) -> EntriesTogether | int:
    """Return entries from *first* to *last*, or fewer, to apply at once.

    Returns:
        An index instead: that entry is to be applied alone, those before it may be read again.
    """
    try:
        frames, headers = read_plain(entry_log, first, last, APPLIED_TOGETHER_BYTES)
        if len(headers) < 2:
            return first
        return entries_together(frames, headers, derive_together(frames, headers, delay_ms=delays))
    except (CorruptEntryError, CorruptRecordError):
        return first  # alone the damaged entry is found


def read_plain(
    entry_log: EntryLog, first: int, last: int, max_bytes: int
) -> tuple[memoryview, list[EntryHeader]]:
    """Return entries from *first* to *last*, or fewer, back to back, and their headers.

    They end before an entry without records; none is returned when *first* is one.

    Raises CorruptEntryError: one of the entries is damaged.
    """
    headers: list[EntryHeader] = []
    frames = entry_log.frames(first, max_bytes, last)[0]
    return frames[: _read_headers(frames, first, headers)], headers


def _read_headers(frames: memoryview, first: int, headers: list[EntryHeader]) -> int:
    """Read the headers of entries from *first* on that have records, up to a number of these.

    Returns:
        Their bytes.

    Raises:
        CorruptEntryError: Something else stands behind the entries in *headers*.
    """
    offset = records = 0
    while offset < len(frames):
        header = parse_header(frames, offset)
        index = first + len(headers)
        if header.index != index:
            raise CorruptEntryError(f"entry {header.index} stands where {index} should")
        records += header.record_count
        if header.kind != KIND_RECORDS or (headers and records > APPLIED_TOGETHER_RECORDS):
            break
        headers.append(header)
        offset += header.size
    return offset
