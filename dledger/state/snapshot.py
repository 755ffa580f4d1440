"""The tables as one checksummed piece of canonical CBOR, and back.

Layout: ``magic 8 bytes · format u32 · crc32(body) u32 · body length u64 · body``, big-endian.
Built-in topics and groups are not in it: they come from the group's settings. `dledger.state.image`
writes the body.

Spec: docs/internals/state.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

import cbor2
from typing_extensions import Buffer

from dledger.commitlog.errors import CorruptStoreError, ForeignStoreError
from dledger.state.accounts import AccountConfig
from dledger.state.pending_timers import PendingTimers
from dledger.state.pop import rows_from_state
from dledger.state.producer_sessions import SESSIONS_MAX, ProducerSessions
from dledger.state.queue_lock import locks_from_state
from dledger.state.state_record import floor_from_state, floor_to_state
from dledger.state.tables import QueueBounds, StateTables
from dledger.state.topics import SubscriptionGroupConfig, TopicConfig
from dledger.state.transactions import (
    TransactionTable,
)


def scalars(tables: StateTables) -> dict[str, Any]:
    """Return the parts of a snapshot that are small whatever there is, by their names in it."""
    return {
        "members_index": tables.members_index,
        "members": tables.members_body,
        "applied_index": tables.applied_index,
        "applied_term": tables.applied_term,
        "applied_chain": tables.applied_chain,
        "applied_end_position": tables.applied_end_position,
        "last_store_time_ms": tables.last_store_time_ms,
        "topics_counter": tables.topics_counter,
        "topics_changed_ms": tables.topics_changed_ms,
        "delay_progress": dict(tables.delay_progress),
        "floor": floor_to_state(tables.floor),
        "queue_locks_index": tables.queue_locks_index,
        "pop_index": tables.pop_index,
        "request_modes": {topic: dict(modes) for topic, modes in tables.request_modes.items()},
        "white_addresses": tables.white_addresses,
        "access_counter": tables.access_counter,
        "access_changed_ms": tables.access_changed_ms,
    }


SNAPSHOT_MAGIC = b"DLSTATE\n"
SNAPSHOT_FORMAT: Final = 1
_HEADER = struct.Struct(">8sIIQ")

LOG_NUMBERS: Final = 1 << 62
"""Below it are indexes, positions, terms and times of entries: the log has 63 bits for each."""


def framed(body: bytes) -> bytes:
    """Return an encoded body with its head."""
    return _HEADER.pack(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT, zlib.crc32(body), len(body)) + body


def load(
    data: Buffer,
    *,
    builtin_topics: Mapping[str, TopicConfig],
    builtin_groups: Mapping[str, SubscriptionGroupConfig],
    sessions_max: int = SESSIONS_MAX,
) -> StateTables:
    """Return the tables in *data*, a result of `Image.snapshot`.

    Raises:
        CorruptStoreError: Not a whole snapshot.
        ForeignStoreError: It is of another format.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise CorruptStoreError(f"state snapshot of {len(view)} bytes is too short")
    magic, version, crc, length = _HEADER.unpack_from(view)
    if magic != SNAPSHOT_MAGIC:
        raise CorruptStoreError("not a state snapshot")
    if version != SNAPSHOT_FORMAT:
        raise ForeignStoreError(
            f"a state snapshot of format {version}; this program knows {SNAPSHOT_FORMAT}"
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
        timers=PendingTimers.from_state(value["timers"]),
        queues=_queues_of(value),
        transactions=TransactionTable.from_state(value["transactions"]),
        floor=floor_from_state(value["floor"]),
        producers=ProducerSessions.of_state(value["producers"], sessions_max),
        queue_locks=locks_from_state(value["queue_locks"]),
        queue_locks_index=value["queue_locks_index"],
        topics_counter=value["topics_counter"],
        topics_changed_ms=value["topics_changed_ms"],
        members_index=value["members_index"],
        members_body=value["members"],
        applied_index=value["applied_index"],
        applied_term=value["applied_term"],
        applied_chain=value["applied_chain"],
        applied_end_position=value["applied_end_position"],
        last_store_time_ms=value["last_store_time_ms"],
        pops=rows_from_state(value["pops"]),
        pop_index=value["pop_index"],
        request_modes=value["request_modes"],
        accounts={name: AccountConfig.from_state(item) for name, item in value["accounts"].items()},
        white_addresses=value["white_addresses"],
        access_counter=value["access_counter"],
        access_changed_ms=value["access_changed_ms"],
    )


def _queues_of(value: Mapping[str, Any]) -> dict[tuple[str, int], QueueBounds]:
    # Hints: the tables are the same without them.
    positions = value.get("queue_positions", {})
    queues = {}
    for topic, by_queue in value["queues"].items():
        first = positions.get(topic, {})
        for queue_id, (min_offset, max_offset) in by_queue.items():
            position = first.get(queue_id, 0)
            if type(position) is not int or position < 0:
                raise CorruptStoreError(f"{topic} {queue_id} begins at {position!r}")
            queues[topic, queue_id] = QueueBounds(min_offset, max_offset, position)
    return queues


def load_checked(data: Buffer, like: StateTables) -> StateTables:
    """Return the tables in a snapshot that may come from anywhere.

    Args:
        like: Tables with the same built-in topics and groups, and as many sessions of producers.
    Raises:
        CorruptStoreError: It is damaged, or of a shape or a place in the log that cannot be.
        ForeignStoreError: It is of another format.
    """
    try:
        loaded = load(
            data,
            builtin_topics=like.builtin_topics,
            builtin_groups=like.builtin_groups,
            sessions_max=like.producers.sessions_max,
        )
        _check_numbers(loaded)
    except (CorruptStoreError, ForeignStoreError):
        raise
    except Exception as error:
        # A checksum shows that it is whole, not its maker: it may be of any shape.
        raise CorruptStoreError(f"a state snapshot of another shape: {error!r}") from error
    floor = loaded.floor
    if not 1 <= floor.first_index <= loaded.applied_index + 1 or floor.position < 0:
        raise CorruptStoreError(
            f"a state snapshot of entry {loaded.applied_index} whose log begins with entry "
            f"{floor.first_index} at {floor.position}"
        )
    return loaded


def _check_numbers(tables: StateTables) -> None:
    """Let tables pass whose places in the log are numbers that a log comes to.

    Raises CorruptStoreError: they are none.
    """
    floor = tables.floor
    numbers = (
        tables.applied_index,
        tables.members_index,
        floor.first_index,
        floor.position,
        floor.prev_term,
        floor.prev_store_time_ms,
    )
    if not all(type(number) is int and 0 <= number < LOG_NUMBERS for number in numbers):
        raise CorruptStoreError("a state snapshot of a place that no log comes to")
