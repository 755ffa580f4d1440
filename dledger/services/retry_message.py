"""The copy of a message that a consumer group has to consume again, or gave up. Pure.

A copy is the message with its body, keys and tags, born when and where it was; its properties say
what it is a copy of. One that is consumed again is a delayed message whose real topic is the
group's retry topic.

Spec: docs/internals/protocol/semantics.md, section 4.
"""

from __future__ import annotations

from commitlog.entry import Run
from commitlog.message_id import encode_offset_message_id
from commitlog.properties import (
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    with_properties,
    without_properties,
)
from commitlog.record import SYS_FLAG_TRANSACTION_MASK
from dledger.services.delay_level import queue_of_level
from dledger.services.leader_loop import fitting_properties, set_aside_properties
from dledger.services.stored_record import StoredRecord, copy_of
from dledger.state.names import SCHEDULE_TOPIC

NAME = "retries"
"""In dead letters, logs and metrics."""

MAX_ORIGIN_CHARS = 255
"""Of a topic's name, and more than a message id has."""

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry; each later one takes the next."""

MAX_RECONSUME_TIMES = 0x7FFFFFFF
"""What the field of a record holds; a client may have sent the number before."""

_NOT_OF_DEAD_LETTERS = frozenset(
    name.encode() for name in (PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID)
)


def retry_level(asked: int, reconsume_times: int, max_level: int) -> int:
    """Return the delay level of a retry: what the client *asked* for, or one more each time."""
    level = asked if asked > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return max(1, min(level, max_level))


def retry_copy(
    record: StoredRecord, store_host: bytes, topic: str, queue_id: int, level: int
) -> tuple[bytes, Run]:
    """Return the copy that comes to queue *queue_id* of a retry *topic* after *level*'s delay.

    Args:
        record: What was consumed.
        store_host: Of this broker; part of the id that the message had here.
    Raises:
        CorruptRecordError: The body does not fit its checksum.
        LocalProtocolError: There is no space for what is added.
    """
    added = {
        **_origin(record, store_host),
        PROPERTY_DELAY: str(level),
        PROPERTY_REAL_TOPIC: topic,
        PROPERTY_REAL_QUEUE_ID: str(queue_id),
    }
    run = Run(SCHEDULE_TOPIC, queue_of_level(level), 1)
    return _copy(record, run, with_properties(record.properties, added)), run


def dead_letter_copy(
    record: StoredRecord, store_host: bytes, topic: str, reason: str = ""
) -> tuple[bytes, Run]:
    """Return the copy for the dead letter *topic*; the arguments are those of `retry_copy`.

    Properties for which a record has no space are left out.

    Args:
        reason: Why the message is given up before its time; it stands in the copy.
    """
    origin = _origin(record, store_host)
    added = {
        **origin,
        PROPERTY_DLQ_ORIGIN_TOPIC: origin[PROPERTY_RETRY_TOPIC],
        PROPERTY_DLQ_ORIGIN_MESSAGE_ID: origin[PROPERTY_ORIGIN_MESSAGE_ID],
    }
    if reason:
        added |= set_aside_properties(record.phy_offset, NAME, reason)
    kept = without_properties(record.properties, _NOT_OF_DEAD_LETTERS)
    run = Run(topic, 0, 1)
    return _copy(record, run, fitting_properties(kept, added)), run


def _origin(record: StoredRecord, store_host: bytes) -> dict[str, str]:
    """Return what every copy has of the first message, which is that of a copy of a copy, too."""
    known = record.property_map
    first = {
        PROPERTY_RETRY_TOPIC: record.topic,
        PROPERTY_ORIGIN_MESSAGE_ID: encode_offset_message_id(store_host, record.phy_offset),
    }
    for name in first:
        value = known.get(name, "")
        # A client may have written it: what cannot be a name is not copied.
        if value and value.isprintable() and len(value) <= MAX_ORIGIN_CHARS:
            first[name] = value
    return {**first, PROPERTY_WAIT: "false"}


def _copy(record: StoredRecord, run: Run, properties: bytes) -> bytes:
    return copy_of(
        record,
        run,
        properties=properties,
        sys_flag=record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
        reconsume_times=min(record.reconsume_times + 1, MAX_RECONSUME_TIMES),
        prepared_transaction_offset=0,
    )
