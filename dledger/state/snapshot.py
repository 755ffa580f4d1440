"""The tables as one checksummed piece of canonical CBOR, and back.

Layout: ``magic 8 bytes · format u32 · crc32(body) u32 · body length u64 · body``, big-endian.
Built-in topics and groups are not in it: they come from the group's settings.

Spec: docs/state.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import cbor2
from typing_extensions import Buffer

from commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.state.pending_timers import PendingTimers
from dledger.state.producer_sessions import ProducerSessions
from dledger.state.queue_lock import locks_from_state, locks_to_state
from dledger.state.state_record import floor_from_state, floor_to_state
from dledger.state.subscription_group_config import SubscriptionGroupConfig
from dledger.state.tables import QueueBounds, StateTables
from dledger.state.topic_config import TopicConfig
from dledger.state.transactions import TransactionTable

SNAPSHOT_MAGIC = b"DLSTATE\n"
SNAPSHOT_FORMAT = 1
_HEADER = struct.Struct(">8sIIQ")


def snapshot(tables: StateTables) -> bytes:
    """Return *tables* as bytes; equal tables give equal bytes."""
    queues: dict[str, dict[int, list[int]]] = {}
    for (topic, queue_id), bounds in tables.queues.items():
        queues.setdefault(topic, {})[queue_id] = [bounds.min_offset, bounds.max_offset]
    offsets: dict[str, dict[str, dict[int, int]]] = {}
    for (group, topic), by_queue in tables.consumer_offsets.items():
        offsets.setdefault(group, {})[topic] = by_queue
    value = {
        "members_index": tables.members_index,
        "members": tables.members_body,
        "applied_index": tables.applied_index,
        "applied_term": tables.applied_term,
        "applied_chain": tables.applied_chain,
        "applied_end_position": tables.applied_end_position,
        "last_store_time_ms": tables.last_store_time_ms,
        "topics_counter": tables.topics_counter,
        "topics_changed_ms": tables.topics_changed_ms,
        "topics": {name: config.to_state() for name, config in tables.topics.items()},
        "subscription_groups": {
            name: config.to_state() for name, config in tables.subscription_groups.items()
        },
        "consumer_offsets": offsets,
        "delay_progress": tables.delay_progress,
        "timers": tables.timers.to_state(),
        "queues": queues,
        "transactions": tables.transactions.to_state(),
        "floor": floor_to_state(tables.floor),
        "producers": tables.producers.to_state(),
        "queue_locks": locks_to_state(tables.queue_locks),
        "queue_locks_index": tables.queue_locks_index,
    }
    body = cbor2.dumps(value, canonical=True)
    return _HEADER.pack(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT, zlib.crc32(body), len(body)) + body


def load(
    data: Buffer,
    *,
    builtin_topics: Mapping[str, TopicConfig],
    builtin_groups: Mapping[str, SubscriptionGroupConfig],
) -> StateTables:
    """Return the tables in *data*, a result of `snapshot`.

    Raises:
        CorruptStoreError: Not a whole snapshot.
        ForeignStoreError: A newer version made it.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise CorruptStoreError(f"state snapshot of {len(view)} bytes is too short")
    magic, version, crc, length = _HEADER.unpack_from(view)
    if magic != SNAPSHOT_MAGIC or not version:
        raise CorruptStoreError("not a state snapshot")
    if version > SNAPSHOT_FORMAT:
        raise ForeignStoreError(
            f"a state snapshot of format {version}; this version knows up to {SNAPSHOT_FORMAT}"
        )
    body = view[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != crc:
        raise CorruptStoreError("state snapshot does not match its checksum")
    value: dict[str, Any] = cbor2.loads(bytes(body))
    return StateTables(
        builtin_topics=builtin_topics,
        builtin_groups=builtin_groups,
        topics={name: TopicConfig.from_state(item) for name, item in value["topics"].items()},
        subscription_groups={
            name: SubscriptionGroupConfig.from_state(item)
            for name, item in value["subscription_groups"].items()
        },
        consumer_offsets={
            (group, topic): by_queue
            for group, topics in value["consumer_offsets"].items()
            for topic, by_queue in topics.items()
        },
        delay_progress=value["delay_progress"],
        timers=PendingTimers.from_state(value.get("timers", {"pieces": {}, "recalled": []})),
        queues={
            (topic, queue_id): QueueBounds(*bounds)
            for topic, by_queue in value["queues"].items()
            for queue_id, bounds in by_queue.items()
        },
        transactions=TransactionTable.from_state(value.get("transactions", {})),
        floor=floor_from_state(value["floor"]),
        producers=ProducerSessions.of_state(value.get("producers", [])),
        queue_locks=locks_from_state(value.get("queue_locks", {})),
        queue_locks_index=value.get("queue_locks_index", 0),
        topics_counter=value["topics_counter"],
        topics_changed_ms=value["topics_changed_ms"],
        members_index=value.get("members_index", 0),
        members_body=value.get("members", b""),
        applied_index=value["applied_index"],
        applied_term=value["applied_term"],
        applied_chain=value["applied_chain"],
        applied_end_position=value["applied_end_position"],
        last_store_time_ms=value["last_store_time_ms"],
    )
