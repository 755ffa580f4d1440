"""The copy of a message that a consumer group has to consume again, or gave up. Pure.

A copy is the message with its body, keys and tags, born when and where it was; its properties say
what it is a copy of. One that is consumed again is a delayed message whose real topic is the
group's retry topic.

Spec: semantics fact sheet, section 4.
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
    encode_properties,
)
from commitlog.record import SYS_FLAG_TRANSACTION_MASK, Record, encode_record, pack_host
from dledger.services.delay_level import queue_of_level
from dledger.state.names import SCHEDULE_TOPIC

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry; each later one takes the next."""


def retry_level(asked: int, reconsume_times: int, max_level: int) -> int:
    """Return the delay level of a retry: what the client *asked* for, or one more each time."""
    level = asked if asked > 0 else FIRST_RETRY_LEVEL + reconsume_times
    return min(level, max_level)


def retry_copy(
    record: Record, store_host: bytes, topic: str, queue_id: int, level: int
) -> tuple[bytes, Run]:
    """Return the copy that comes to queue *queue_id* of a retry *topic* after *level*'s delay.

    Args:
        record: What was consumed.
        store_host: Of this broker; part of the id that the message had here.
    """
    properties = _origin(record, store_host)
    properties[PROPERTY_DELAY] = str(level)
    properties[PROPERTY_REAL_TOPIC] = topic
    properties[PROPERTY_REAL_QUEUE_ID] = str(queue_id)
    run = Run(SCHEDULE_TOPIC, queue_of_level(level), 1)
    return _copy(record, run, properties), run


def dead_letter_copy(record: Record, store_host: bytes, topic: str) -> tuple[bytes, Run]:
    """Return the copy for the dead letter *topic*; `retry_copy` says what the arguments are."""
    properties = _origin(record, store_host)
    for name in (PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID):
        properties.pop(name, None)
    properties[PROPERTY_DLQ_ORIGIN_TOPIC] = properties[PROPERTY_RETRY_TOPIC]
    properties[PROPERTY_DLQ_ORIGIN_MESSAGE_ID] = properties[PROPERTY_ORIGIN_MESSAGE_ID]
    run = Run(topic, 0, 1)
    return _copy(record, run, properties), run


def _origin(record: Record, store_host: bytes) -> dict[str, str]:
    properties = record.property_map
    properties.setdefault(PROPERTY_RETRY_TOPIC, record.topic)
    properties.setdefault(
        PROPERTY_ORIGIN_MESSAGE_ID, encode_offset_message_id(store_host, record.phy_offset)
    )
    properties[PROPERTY_WAIT] = "false"
    return properties


def _copy(record: Record, run: Run, properties: dict[str, str]) -> bytes:
    return encode_record(
        topic=run.topic,
        queue_id=run.queue_id,
        body=record.body,
        properties=encode_properties(properties),
        flag=record.flag,
        sys_flag=record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK,
        born_timestamp_ms=record.born_timestamp_ms,
        born_host=pack_host(*record.born_host),
        reconsume_times=record.reconsume_times + 1,
    )
