"""Messages with a time of their own: the way into the timer topic, and the way out again. Pure.

Such a message is an ordinary record of the timer topic; its properties say when it is due
(TIMER_OUT_MS) and where it goes then. What is delivered is the same message with the property
string unchanged, as with delay levels.

Spec: semantics fact sheet, section 2; docs/state.md, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from commitlog.entry import RecordBatch, Run
from commitlog.errors import InvariantBroken
from commitlog.properties import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    decode_properties,
    encode_properties,
    get_property,
)
from commitlog.record import (
    BODY_LENGTH_OFFSET,
    BODY_OFFSET,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAX_TOPIC_V1_BYTES,
    PHY_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_V6,
    TOTAL_SIZE_OFFSET,
    decode_record,
    encode_record,
    pack_host,
)
from dledger.services.delay_level import Delivery, deliver, with_real_destination
from dledger.state.names import TIMER_TOPIC
from dledger.state.state_record import StateRecord, TimersChange, state_record

PRECISION_MS: Final = 1000
"""A message is due at the next whole second: never before what was asked for."""

TIMER_MARK: Final = b"TIMER_DEL"
"""Stands in every property that makes a timer message, and in hardly any other message."""

TIMER_RUN: Final = Run(TIMER_TOPIC, 0, 1)

_TIMER_PROPERTIES: Final = (
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
)
"""What counts comes first."""

_OUT_MS: Final = PROPERTY_TIMER_OUT_MS.encode()
_ROLL_TIMES: Final = PROPERTY_TIMER_ROLL_TIMES.encode()
_REAL_TOPIC: Final = PROPERTY_REAL_TOPIC.encode()
_REAL_QUEUE_ID: Final = PROPERTY_REAL_QUEUE_ID.encode()
_HOSTS_V6: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6


class TimerIllegalError(ValueError):
    """A time that cannot be; the text says why."""


def deliver_at_ms(properties: bytes, now_ms: int) -> int | None:
    """Return when a message asks to be delivered, or None when it does not.

    Raises:
        TimerIllegalError: The value that counts is no number.
    """
    for name in _TIMER_PROPERTIES:
        value = get_property(properties, name.encode())
        if value is None:
            continue
        try:
            number = int(value)
        except ValueError:
            text = value.decode(errors="replace")
            raise TimerIllegalError(f"{name} is not a number: {text!r}") from None
        if name == PROPERTY_TIMER_DELIVER_MS:
            return number
        return now_ms + number * (1000 if name == PROPERTY_TIMER_DELAY_SEC else 1)
    return None


def due_ms(asked_ms: int) -> int:
    """Return the whole second at which a message is delivered that asks for *asked_ms*."""
    return -(-asked_ms // PRECISION_MS) * PRECISION_MS


def without_timer(properties: bytes) -> bytes:
    """Return *properties* without those that ask for a time."""
    kept = decode_properties(properties)
    for name in (*_TIMER_PROPERTIES, PROPERTY_TIMER_DELETE_UNIQ_KEY):
        kept.pop(name, None)
    return encode_properties(kept)


def timed_properties(properties: bytes, topic: str, queue_id: int, due: int) -> bytes:
    """Return what is stored of a message that is due at *due*: one asked-for time, and the rest.

    Args:
        properties: End with ``\\x02``.
        topic, queue_id: Where it goes then.
    """
    found = [name for name in _TIMER_PROPERTIES if get_property(properties, name.encode())]
    if len(found) > 1:
        kept = decode_properties(properties)
        for name in found[1:]:
            del kept[name]
        properties = encode_properties(kept)
    return b"%b%b\x01%d\x02" % (with_real_destination(properties, topic, queue_id), _OUT_MS, due)


def delivered_message(scheduled: memoryview) -> Delivery:
    """Return the message inside a record of the timer topic, encoded for its real queue.

    The body is copied as it stands: its checksum goes with it.

    Raises:
        CorruptRecordError: The record is damaged.
        InvariantBroken: It names no real topic: it cannot have been written by this broker.
    """
    view = scheduled
    magic = int.from_bytes(view[MAGIC_OFFSET : MAGIC_OFFSET + 4], "big")
    sys_flag = int.from_bytes(view[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4], "big")
    if magic != MAGIC_V1 or sys_flag & _HOSTS_V6:
        return deliver(view)
    body_end = BODY_OFFSET + int.from_bytes(view[BODY_LENGTH_OFFSET:BODY_OFFSET], "big")
    rest = body_end + 1 + view[body_end]  # behind the topic: length and properties
    properties = bytes(view[rest + 2 :])
    topic = get_property(properties, _REAL_TOPIC)
    queue_id = get_property(properties, _REAL_QUEUE_ID)
    if topic is None or queue_id is None:
        raise InvariantBroken("a timer message has no real topic")
    if len(topic) > MAX_TOPIC_V1_BYTES:
        return deliver(view)
    head = bytearray(view[:body_end])
    size = body_end + 1 + len(topic) + 2 + len(properties)
    head[TOTAL_SIZE_OFFSET : TOTAL_SIZE_OFFSET + 4] = size.to_bytes(4, "big")
    head[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4] = int(queue_id).to_bytes(4, "big")
    # Given when the entry is sealed.
    head[QUEUE_OFFSET_OFFSET:PHY_OFFSET_OFFSET] = bytes(PHY_OFFSET_OFFSET - QUEUE_OFFSET_OFFSET)
    head[PHY_OFFSET_OFFSET:SYS_FLAG_OFFSET] = bytes(SYS_FLAG_OFFSET - PHY_OFFSET_OFFSET)
    record = b"".join((head, bytes((len(topic),)), topic, view[rest:]))
    return Delivery(topic.decode(), int(queue_id), record)


def rolled_message(scheduled: memoryview) -> Delivery:
    """Return a waiting message as it is stored anew in the timer topic, counted as rolled.

    Raises:
        CorruptRecordError: The record is damaged.
    """
    record = decode_record(scheduled, check_crc=False)
    times = int(get_property(record.properties, _ROLL_TIMES) or 0) + 1
    properties = decode_properties(record.properties)
    properties[PROPERTY_TIMER_ROLL_TIMES] = str(times)
    return Delivery(
        TIMER_TOPIC,
        0,
        encode_record(
            topic=TIMER_TOPIC,
            queue_id=0,
            body=record.body,
            properties=encode_properties(properties),
            flag=record.flag,
            sys_flag=record.sys_flag,
            born_timestamp_ms=record.born_timestamp_ms,
            born_host=pack_host(*record.born_host),
            reconsume_times=record.reconsume_times,
            prepared_transaction_offset=record.prepared_transaction_offset,
        ),
    )


def timer_batch(deliveries: Sequence[Delivery], change: TimersChange) -> RecordBatch:
    """Return messages and what becomes of those that waited as one batch: both happen, or neither.

    The order of *deliveries* is kept within each queue.
    """
    by_queue: dict[tuple[str, int], list[bytes]] = {}
    for item in deliveries:
        by_queue.setdefault((item.topic, item.queue_id), []).append(item.record)
    records = [record for queue in by_queue.values() for record in queue]
    runs = [Run(*queue, len(records)) for queue, records in by_queue.items()]
    progress: StateRecord = state_record(change)
    records.append(progress.record)
    runs.append(progress.run)
    return RecordBatch(
        records=b"".join(records),
        sizes=np.array([len(record) for record in records], dtype=np.uint32),
        runs=tuple(runs),
        born_host=None,
    )
