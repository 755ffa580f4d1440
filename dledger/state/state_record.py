"""State changes as records on the state topic: CBOR bodies in, CBOR bodies out.

A body is one canonical CBOR map; ``v`` is the version of its form. Queue 0 changes topics, 1
subscription groups, 2 consumer offsets, 3 the progress of delayed delivery, 4 the floor, 5
transactions, 6 messages that are out by POP, 8 queue locks, 10 producer
sessions, 12 messages with a time of their own, 13 queues that begin later, 14 accounts.

Beside a floor stands why messages were given up: the cause, the settings in force, and what was
measured. Every member and every checker can judge afterwards whether the move was entitled.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import cbor2
from typing_extensions import Buffer

from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.mark import Anchor
from dledger.commitlog.record import encode_record
from dledger.state.accounts import AccessChange
from dledger.state.pop import PopChange
from dledger.state.queue_lock import QueueLocksChange
from dledger.state.topics import (
    ACCESS_QUEUE,
    CONSUMER_OFFSETS_QUEUE,
    DELAY_PROGRESS_QUEUE,
    FLOOR_QUEUE,
    POP_QUEUE,
    PRODUCER_SESSIONS_QUEUE,
    QUEUE_FLOORS_QUEUE,
    QUEUE_LOCKS_QUEUE,
    STATE_TOPIC,
    SUBSCRIPTION_GROUPS_QUEUE,
    TIMERS_QUEUE,
    TOPICS_QUEUE,
    TRANSACTIONS_QUEUE,
    SubscriptionGroupConfig,
    TopicConfig,
)
from dledger.state.transactions import TransactionDecision

AGE: Final = "age"
"""Older than `fileReservedTime`, at an hour of `deleteWhen` or on a filling disk."""
REQUEST: Final = "request"
"""Older than `fileReservedTime`, at once because a request asked for it."""
SIZE: Final = "size"
"""More than `keep_bytes`."""
FORCED: Final = "forced"
"""Not expired: the leader's disk was fuller than `diskSpaceCleanForciblyRatio` allows."""

CAUSES: Final = (AGE, REQUEST, SIZE, FORCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorReason:
    """Cause of a move of the floor, and the settings in force on the leader that moved it.

    Attributes:
        cause: One of `CAUSES`. It covers all that the move gives up: what is older than the newest
            message given up was older, and further from the end, as well.
        decided_ms: Wall time of the leader.
        keep_bytes: `store.keep_bytes`; 0: no limit.
        disk_used_permille: Used part of the leader's disk.
        force_permille: From where on unexpired segments go; 0: never.
        asked_by: The requester: of a request, or for the setting that the cause comes from, where
            it was changed while the broker ran. Empty: its configuration.
    """

    cause: str
    decided_ms: int
    end_position: int
    reserved_hours: int
    keep_bytes: int
    disk_used_permille: int
    force_permille: int
    asked_by: str = ""


STATE_RECORD_VERSION = 1

ConsumerOffset = tuple[str, str, int, int]
"""Consumer group, topic, queue id, offset."""


@dataclass(frozen=True, slots=True)
class TopicsChange:
    """Topics created or changed, and topics deleted.

    ``asked_by`` is the requester of a change that gives up messages; empty for others.
    """

    put: tuple[TopicConfig, ...] = ()
    delete: tuple[str, ...] = ()
    asked_by: str = ""


@dataclass(frozen=True, slots=True)
class SubscriptionGroupsChange:
    """Subscription groups created or changed, and groups deleted.

    The request modes of a deleted group go with it; ``forget`` names groups whose consumer offsets
    go, too.
    """

    put: tuple[SubscriptionGroupConfig, ...] = ()
    delete: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConsumerOffsetsChange:
    """Offsets committed."""

    offsets: tuple[ConsumerOffset, ...]


@dataclass(frozen=True, slots=True)
class DelayProgressChange:
    """A delay level delivered up to an offset of its schedule queue.

    ``from_offset`` is where the proposer stood: apply stops the node when it stands elsewhere.
    """

    level: int
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class FloorChange:
    """What stands before *floor* is given up on every replica: retention."""

    floor: Anchor
    reason: FloorReason


@dataclass(frozen=True, slots=True)
class ProducerOpenedChange:
    """A producer begins an epoch: the index of the entry this stands in."""

    producer_id: bytes


@dataclass(frozen=True, slots=True)
class ProducerSendChange:
    """The records that follow in the same proposal are a producer's send *sequence*.

    Attributes:
        first_open: Lowest sequence the producer still waits for.
        refused: Numbers of the request's runs that were refused and do not follow.
    """

    producer_id: bytes
    epoch: int
    sequence: int
    first_open: int
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionsChange:
    """Half messages decided, and half messages whose producers are asked.

    Both name them by their offset in the half topic. Apply stops the node when one is not open,
    or was not checked exactly once less.
    """

    decided: tuple[tuple[int, TransactionDecision], ...] = ()
    checked: tuple[tuple[int, int], ...] = ()
    """Half offset, and how often it is asked for with this time."""


@dataclass(frozen=True, slots=True)
class TimersChange:
    """Messages of the timer queue that wait no longer, by queue offset.

    ``done`` were delivered, or stored again further on; ``recalled`` never will be delivered.
    """

    done: tuple[int, ...] = ()
    recalled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueFloorsChange:
    """Queues that begin later from now on: retention of a topic."""

    floors: tuple[tuple[str, int, int], ...]
    """Topic, queue id, first offset kept."""
    decided_ms: int = 0
    """Wall time of the leader."""
    retention_ms: tuple[tuple[str, int], ...] = ()
    """Topic, and how long it kept its messages then."""


StateChange = (
    TopicsChange
    | SubscriptionGroupsChange
    | ConsumerOffsetsChange
    | DelayProgressChange
    | FloorChange
    | TimersChange
    | QueueFloorsChange
    | ProducerOpenedChange
    | ProducerSendChange
    | TransactionsChange
    | QueueLocksChange
    | PopChange
    | AccessChange
)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One encoded record and the queue of the state topic it belongs to."""

    queue_id: int
    record: bytes

    @property
    def run(self) -> Run:
        """The run this record makes."""
        return Run(STATE_TOPIC, self.queue_id, 1)


def encode_change(change: StateChange) -> tuple[int, bytes]:
    """Return the state queue of *change* and its canonical CBOR body."""
    body: dict[str, Any]
    match change:
        case TopicsChange(put, delete, asked_by):
            queue_id = TOPICS_QUEUE
            body = {
                "put": [config.to_state() for config in put],
                "delete": list(delete),
                "asked_by": asked_by,
            }
        case SubscriptionGroupsChange(groups, delete, forget):
            queue_id = SUBSCRIPTION_GROUPS_QUEUE
            body = {
                "put": [config.to_state() for config in groups],
                "delete": list(delete),
                "forget": list(forget),
            }
        case ConsumerOffsetsChange(offsets):
            queue_id = CONSUMER_OFFSETS_QUEUE
            tree: dict[str, dict[str, dict[int, int]]] = {}
            for group, topic, queue, offset in offsets:
                tree.setdefault(group, {}).setdefault(topic, {})[queue] = offset
            body = {"offsets": tree}
        case DelayProgressChange(level, from_offset, to_offset):
            queue_id = DELAY_PROGRESS_QUEUE
            body = {"level": level, "from": from_offset, "to": to_offset}
        case FloorChange(floor, reason):
            queue_id = FLOOR_QUEUE
            body = {"floor": floor_to_state(floor), "reason": asdict(reason)}
        case TimersChange(done, recalled):
            queue_id = TIMERS_QUEUE
            body = {"done": list(done), "recalled": list(recalled)}
        case QueueFloorsChange(floors, decided_ms, keeps):
            queue_id = QUEUE_FLOORS_QUEUE
            body = {
                "floors": _by_topic(floors),
                "at": decided_ms,
                "retention_ms": dict(keeps),
            }
        case ProducerOpenedChange(producer_id):
            queue_id = PRODUCER_SESSIONS_QUEUE
            body = {"open": producer_id}
        case ProducerSendChange(producer_id, epoch, sequence, first_open, refused):
            # Once in every idempotent request: in canonical order as it stands, and not sorted.
            sent = [producer_id, epoch, sequence, first_open, *refused]
            body = {"v": STATE_RECORD_VERSION, "send": sent}
            return PRODUCER_SESSIONS_QUEUE, cbor2.dumps(body)
        case TransactionsChange(decided, checked):
            queue_id = TRANSACTIONS_QUEUE
            body = {
                "decided": {half: int(decision) for half, decision in decided},
                "checked": dict(checked),
            }
        case QueueLocksChange():
            queue_id = QUEUE_LOCKS_QUEUE
            body = change.to_state()
        case PopChange():
            queue_id = POP_QUEUE
            body = change.to_state()
        case AccessChange():
            queue_id = ACCESS_QUEUE
            body = change.to_state()
    body["v"] = STATE_RECORD_VERSION
    return queue_id, cbor2.dumps(body, canonical=True)


def decode_change(queue_id: int, body: Buffer) -> StateChange:
    """Return the change in the body of a record of state queue *queue_id*.

    Raises InvariantBroken: not a body this version can read. The entry is committed, so going on
    without it would make this replica differ from the others.
    """
    try:
        value: Mapping[str, Any] = cbor2.loads(bytes(body))
        version = value["v"]
        if version != STATE_RECORD_VERSION:
            raise InvariantBroken(
                f"state record of version {version}; this program reads {STATE_RECORD_VERSION}"
            )
        if queue_id == TOPICS_QUEUE:
            return TopicsChange(
                tuple(TopicConfig.from_state(item) for item in value["put"]),
                tuple(value["delete"]),
                value["asked_by"],
            )
        if queue_id == SUBSCRIPTION_GROUPS_QUEUE:
            return SubscriptionGroupsChange(
                tuple(SubscriptionGroupConfig.from_state(item) for item in value["put"]),
                tuple(value["delete"]),
                tuple(value["forget"]),
            )
        if queue_id == CONSUMER_OFFSETS_QUEUE:
            return ConsumerOffsetsChange(
                tuple(
                    (group, topic, queue, offset)
                    for group, topics in value["offsets"].items()
                    for topic, queues in topics.items()
                    for queue, offset in queues.items()
                )
            )
        if queue_id == DELAY_PROGRESS_QUEUE:
            return DelayProgressChange(value["level"], value["from"], value["to"])
        if queue_id == FLOOR_QUEUE:
            return FloorChange(floor_from_state(value["floor"]), FloorReason(**value["reason"]))
        if queue_id == TIMERS_QUEUE:
            return TimersChange(tuple(value["done"]), tuple(value["recalled"]))
        if queue_id == QUEUE_FLOORS_QUEUE:
            return QueueFloorsChange(
                _places(value["floors"]),
                value["at"],
                tuple(value["retention_ms"].items()),
            )
        if queue_id == PRODUCER_SESSIONS_QUEUE:
            if "open" in value:
                return ProducerOpenedChange(value["open"])
            producer_id, epoch, sequence, first_open, *refused = value["send"]
            return ProducerSendChange(producer_id, epoch, sequence, first_open, tuple(refused))
        if queue_id == TRANSACTIONS_QUEUE:
            return TransactionsChange(
                tuple((half, TransactionDecision(by)) for half, by in value["decided"].items()),
                tuple(value["checked"].items()),
            )
        if queue_id == QUEUE_LOCKS_QUEUE:
            return QueueLocksChange.from_state(value)
        if queue_id == POP_QUEUE:
            return PopChange.from_state(value)
        if queue_id == ACCESS_QUEUE:
            return AccessChange.from_state(value)
    except (cbor2.CBORDecodeError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvariantBroken(f"unreadable state record on queue {queue_id}: {exc}") from exc
    raise InvariantBroken(f"state record on unknown queue {queue_id}")


def _by_topic(places: Iterable[tuple[str, int, int]]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for topic, queue, offset in places:
        found.setdefault(topic, {})[queue] = offset
    return found


def _places(by_topic: Mapping[str, Mapping[int, int]]) -> tuple[tuple[str, int, int], ...]:
    return tuple(
        (topic, queue, offset)
        for topic, queues in by_topic.items()
        for queue, offset in queues.items()
    )


def floor_to_state(floor: Anchor) -> list[int]:
    """Return a floor as it stands in state records and snapshots."""
    return [
        floor.first_index,
        floor.position,
        floor.prev_term,
        floor.prev_chain,
        floor.prev_store_time_ms,
    ]


def floor_from_state(value: list[int]) -> Anchor:
    """Return the floor that `floor_to_state` wrote."""
    return Anchor(*value)


def state_record(change: StateChange) -> StateRecord:
    """Return *change* as a record ready to be joined with others into a batch."""
    queue_id, body = encode_change(change)
    return StateRecord(
        queue_id,
        encode_record(topic=STATE_TOPIC, queue_id=queue_id, body=body, properties=b""),
    )


def state_batch(*changes: StateChange) -> RecordBatch:
    """Return *changes* as one batch: they take effect together, in this order, or not at all."""
    return batch_of(state_record(change) for change in changes)


def batch_of(records: Iterable[StateRecord]) -> RecordBatch:
    """Join state records into one batch."""
    items = list(records)
    return RecordBatch.joined([item.record for item in items], (item.run for item in items))


def batch_with_messages(
    messages: Iterable[tuple[tuple[str, int], bytes]], change: StateChange
) -> RecordBatch:
    """Return messages, each with its topic and queue, and a change as one batch.

    Both happen, or neither. The order of messages is kept within each queue.
    """
    by_queue: dict[tuple[str, int], list[bytes]] = {}
    for queue, record in messages:
        by_queue.setdefault(queue, []).append(record)
    runs = [Run(*queue, len(found)) for queue, found in by_queue.items()]
    records = [record for found in by_queue.values() for record in found]
    last = state_record(change)
    return RecordBatch.joined([*records, last.record], [*runs, last.run])
