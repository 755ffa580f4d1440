"""State changes as records on the state topic: CBOR bodies in, CBOR bodies out.

A body is one CBOR array: the version of its form, and the fields of the change that `CHANGES` has
for its queue of the state topic.

Beside a floor stands why messages were given up: the cause, the settings in force, and what was
measured. Every member and every checker can judge afterwards whether the move was entitled.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self

import cbor2
import msgspec
import numpy as np
from msgspec.structs import replace
from typing_extensions import Buffer

from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.errors import InvariantBroken
from dledger.commitlog.mark import Anchor
from dledger.commitlog.record import (
    BORN_HOST_OFFSET,
    HOST_FLAGS,
    IPV6_HOST_BYTES,
    LAYOUTS,
    MAGIC_OFFSET,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_V6,
    Layout,
    encode_record,
)
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.accounts import AccessChange
from dledger.state.pop import PopChange
from dledger.state.queue_lock import QueueLocksChange
from dledger.state.table import StateChange, plain
from dledger.state.topics import (
    ACCESS_QUEUE,
    CONSUMER_OFFSETS_QUEUE,
    DELAY_PROGRESS_QUEUE,
    FLOOR_QUEUE,
    POP_QUEUE,
    PRODUCER_SENDS_QUEUE,
    PRODUCERS_OPENED_QUEUE,
    QUEUE_FLOORS_QUEUE,
    QUEUE_LOCKS_QUEUE,
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


class FloorReason(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
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


class TopicsChange(StateChange, frozen=True):
    """Topics created or changed, and topics deleted.

    ``asked_by`` is the requester of a change that gives up messages; empty for others.
    """

    put: tuple[TopicConfig, ...] = ()
    delete: tuple[str, ...] = ()
    asked_by: str = ""


class SubscriptionGroupsChange(StateChange, frozen=True):
    """Subscription groups created or changed, and groups deleted.

    The request modes of a deleted group go with it; ``forget`` names groups whose consumer offsets
    go, too.
    """

    put: tuple[SubscriptionGroupConfig, ...] = ()
    delete: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


class ConsumerOffsetsChange(StateChange, frozen=True):
    """Offsets committed: consumer group → topic → queue id → offset.

    A record has each name once: it may have thousands of offsets of a group.
    """

    offsets: dict[str, dict[str, dict[int, int]]]

    @classmethod
    def of(cls, offsets: Iterable[ConsumerOffset]) -> Self:
        """Return the change to *offsets*."""
        tree: dict[str, dict[str, dict[int, int]]] = {}
        for group, topic, queue, offset in offsets:
            tree.setdefault(group, {}).setdefault(topic, {})[queue] = offset
        return cls(tree)


class DelayProgressChange(StateChange, frozen=True):
    """A delay level delivered up to an offset of its schedule queue.

    ``from_offset`` is where the proposer stood: apply stops the node when it stands elsewhere.
    """

    level: int
    from_offset: int
    to_offset: int


class FloorChange(StateChange, frozen=True):
    """What stands before *floor* is given up on every replica: retention."""

    floor: Anchor
    reason: FloorReason


class ProducerOpenedChange(StateChange, frozen=True):
    """A producer begins an epoch: the index of the entry this stands in."""

    producer_id: bytes


class ProducerSendChange(StateChange, frozen=True):
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


class TransactionsChange(StateChange, frozen=True):
    """Half messages decided, and half messages whose producers are asked.

    Both name them by their offset in the half topic. Apply stops the node when one is not open,
    or was not checked exactly once less.
    """

    decided: tuple[tuple[int, TransactionDecision], ...] = ()
    checked: tuple[tuple[int, int], ...] = ()
    """Half offset, and how often it is asked for with this time."""


class TimersChange(StateChange, frozen=True):
    """Messages of the timer queue that wait no longer, by queue offset.

    ``done`` were delivered, or stored again further on; ``recalled`` never will be delivered.
    """

    done: tuple[int, ...] = ()
    recalled: tuple[int, ...] = ()


class QueueFloorsChange(StateChange, frozen=True):
    """Queues that begin later from now on: retention of a topic."""

    floors: tuple[tuple[str, int, int], ...]
    """Topic, queue id, first offset kept."""
    decided_ms: int = 0
    """Wall time of the leader."""
    retention_ms: tuple[tuple[str, int], ...] = ()
    """Topic, and how long it kept its messages then."""


StateRecord = tuple[bytes, Run]
"""An encoded change, as a record and its run."""

CHANGES: Final[Mapping[int, type[StateChange]]] = {
    TOPICS_QUEUE: TopicsChange,
    SUBSCRIPTION_GROUPS_QUEUE: SubscriptionGroupsChange,
    CONSUMER_OFFSETS_QUEUE: ConsumerOffsetsChange,
    DELAY_PROGRESS_QUEUE: DelayProgressChange,
    FLOOR_QUEUE: FloorChange,
    TRANSACTIONS_QUEUE: TransactionsChange,
    POP_QUEUE: PopChange,
    QUEUE_LOCKS_QUEUE: QueueLocksChange,
    PRODUCERS_OPENED_QUEUE: ProducerOpenedChange,
    PRODUCER_SENDS_QUEUE: ProducerSendChange,
    TIMERS_QUEUE: TimersChange,
    QUEUE_FLOORS_QUEUE: QueueFloorsChange,
    ACCESS_QUEUE: AccessChange,
}
"""What stands in each state queue."""

_QUEUES: Final = {change: queue_id for queue_id, change in CHANGES.items()}


def encode_change(change: StateChange) -> tuple[int, bytes]:
    """Return the state queue of *change* and its CBOR body."""
    return _QUEUES[type(change)], cbor2.dumps((STATE_RECORD_VERSION, *plain(change)))


def decode_change(queue_id: int, body: Buffer) -> StateChange:
    """Return the change in the body of a record of state queue *queue_id*.

    Raises InvariantBroken: not a body this version can read. The entry is committed, so going on
    without it would make this replica differ from the others.
    """
    kind = CHANGES.get(queue_id)
    if kind is None:
        raise InvariantBroken(f"state record on unknown queue {queue_id}")
    try:
        form = cbor2.loads(bytes(body))
        if not isinstance(form, list):
            raise TypeError(f"a {type(form).__name__} where an array should be")
        version, *values = form
        if version == STATE_RECORD_VERSION:
            return msgspec.convert(values, kind)
    except (cbor2.CBORDecodeError, TypeError, ValueError, AttributeError) as exc:
        raise InvariantBroken(f"unreadable state record on queue {queue_id}: {exc}") from exc
    raise InvariantBroken(
        f"state record of version {version}; this program reads {STATE_RECORD_VERSION}"
    )


def state_record(change: StateChange) -> StateRecord:
    """Return *change* as a record ready to be joined with others into a batch."""
    queue_id, body = encode_change(change)
    record = encode_record(topic=STATE_TOPIC, queue_id=queue_id, body=body, properties=b"")
    return record, Run(STATE_TOPIC, queue_id, 1)


def state_batch(*changes: StateChange) -> RecordBatch:
    """Return *changes* as one batch: they take effect together, in this order, or not at all."""
    return batch_of(map(state_record, changes))


def batch_of(records: Iterable[StateRecord]) -> RecordBatch:
    """Return single records, each with its run, as one batch; messages may be among them."""
    pairs = list(records)
    return RecordBatch.joined([record for record, _ in pairs], (run for _, run in pairs))


def behind_heads(heads: Sequence[StateRecord], batch: RecordBatch) -> RecordBatch:
    """Return *batch* behind single records, which answers do not count."""
    if not heads:
        return batch
    first = batch_of(heads)
    return RecordBatch(
        b"".join((first.records, batch.records)),
        np.concatenate([first.sizes, batch.sizes]),
        first.runs + batch.runs,
        batch.born_host,
        heads=len(heads) + batch.heads,
    )


def with_hosts(batch: RecordBatch, store_host: bytes) -> RecordBatch:
    """Return *batch* with space in each record for *store_host*, and for the born host it brings.

    IPv4 hosts have space in any record that clients send or brokers make; one of IPv6 makes each
    12 bytes longer.
    """
    wanted = SYS_FLAG_STORE_HOST_V6 if len(store_host) == IPV6_HOST_BYTES else 0
    if batch.born_host is not None and len(batch.born_host) == IPV6_HOST_BYTES:
        wanted |= SYS_FLAG_BORN_HOST_V6
    if not wanted:
        return batch
    view, start, records = memoryview(batch.records), 0, list[bytes]()
    for size in batch.sizes.tolist():
        records.append(_with_space(view[start : start + size], wanted))
        start += size
    widened = RecordBatch.joined(records, batch.runs)
    return replace(widened, born_host=batch.born_host, heads=batch.heads)


def _with_space(record: memoryview, wanted: int) -> bytes:
    """Return *record* in the layout that has the host flags *wanted*, too."""
    flags = record[SYS_FLAG_OFFSET + 3] | wanted
    before, after = Layout.at(record), LAYOUTS[flags & HOST_FLAGS]
    # A born host stays where its length does. Store time and store host are not written yet.
    is_kept = before.store_time == after.store_time
    head = bytearray(record[: before.store_time if is_kept else BORN_HOST_OFFSET])
    head += bytes(after.reconsume_times - len(head))
    size = len(record) + after.body - before.body
    head[:MAGIC_OFFSET] = size.to_bytes(MAGIC_OFFSET, "big")
    head[SYS_FLAG_OFFSET + 3] = flags
    return b"".join((head, record[before.reconsume_times :]))
