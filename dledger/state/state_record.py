"""State changes as records on the state topic: CBOR bodies in, CBOR bodies out.

A body is one canonical CBOR map; ``v`` is the version of its form. Queue 0 changes topics, 1
subscription groups, 2 consumer offsets, 3 the progress of delayed delivery, 4 the floor.

Spec: docs/state.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cbor2
import numpy as np
from typing_extensions import Buffer

from commitlog.entry import RecordBatch, Run
from commitlog.errors import InvariantBroken
from commitlog.mark import Anchor
from commitlog.record import encode_record
from dledger.state.names import (
    CONSUMER_OFFSETS_QUEUE,
    DELAY_PROGRESS_QUEUE,
    FLOOR_QUEUE,
    STATE_TOPIC,
    SUBSCRIPTION_GROUPS_QUEUE,
    TOPICS_QUEUE,
)
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from dledger.state.topic_config import TopicConfig

STATE_RECORD_VERSION = 1

ConsumerOffset = tuple[str, str, int, int]
"""Consumer group, topic, queue id, offset."""


@dataclass(frozen=True, slots=True)
class TopicsChange:
    """Topics created or changed, and topics deleted."""

    put: tuple[TopicConfig, ...] = ()
    delete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriptionGroupsChange:
    """Subscription groups created or changed, and groups deleted."""

    put: tuple[SubscriptionGroupConfig, ...] = ()
    delete: tuple[str, ...] = ()


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


StateChange = (
    TopicsChange
    | SubscriptionGroupsChange
    | ConsumerOffsetsChange
    | DelayProgressChange
    | FloorChange
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
        case TopicsChange(put, delete):
            queue_id = TOPICS_QUEUE
            body = {"put": [config.to_state() for config in put], "delete": list(delete)}
        case SubscriptionGroupsChange(groups, delete):
            queue_id = SUBSCRIPTION_GROUPS_QUEUE
            body = {"put": [config.to_state() for config in groups], "delete": list(delete)}
        case ConsumerOffsetsChange(offsets):
            queue_id = CONSUMER_OFFSETS_QUEUE
            tree: dict[str, dict[str, dict[int, int]]] = {}
            for group, topic, queue, offset in offsets:
                tree.setdefault(group, {}).setdefault(topic, {})[queue] = offset
            body = {"offsets": tree}
        case DelayProgressChange(level, from_offset, to_offset):
            queue_id = DELAY_PROGRESS_QUEUE
            body = {"level": level, "from": from_offset, "to": to_offset}
        case FloorChange(floor):
            queue_id = FLOOR_QUEUE
            body = {"floor": floor_to_state(floor)}
    body["v"] = STATE_RECORD_VERSION
    return queue_id, cbor2.dumps(body, canonical=True)


def decode_change(queue_id: int, body: Buffer) -> StateChange:
    """Return the change in the body of a record of state queue *queue_id*.

    Raises:
        InvariantBroken: Not a body this version can read. The entry is committed, so going on
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
            )
        if queue_id == SUBSCRIPTION_GROUPS_QUEUE:
            return SubscriptionGroupsChange(
                tuple(SubscriptionGroupConfig.from_state(item) for item in value["put"]),
                tuple(value["delete"]),
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
            return FloorChange(floor_from_state(value["floor"]))
    except (cbor2.CBORDecodeError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvariantBroken(f"unreadable state record on queue {queue_id}: {exc}") from exc
    raise InvariantBroken(f"state record on unknown queue {queue_id}")


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
    return RecordBatch(
        records=b"".join(item.record for item in items),
        sizes=np.array([len(item.record) for item in items], dtype=np.uint32),
        runs=tuple(item.run for item in items),
        born_host=None,
    )
