"""Delayed messages: the way into the schedule topic, and the way out again. Pure.

A delayed message is an ordinary record of the schedule topic whose properties name its real topic
and queue. What is delivered is the same message with the property string unchanged, DELAY,
REAL_TOPIC and REAL_QID included: that is what RocketMQ's brokers store and its clients show.

Spec: docs/internals/protocol/semantics.md, section 1; docs/internals/state.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commitlog.entry import RecordBatch, Run
from commitlog.properties import PROPERTY_DELAY, PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC
from commitlog.properties import get_property as _get_property
from dledger.broker_errors import UnprocessableMessageError
from dledger.services.stored_record import StoredRecord, copy_of
from dledger.state.names import NOT_ALLOWED_SEND_TOPICS, topic_problem
from dledger.state.state_record import DelayProgressChange, state_record

_DELAY = PROPERTY_DELAY.encode()
_REAL_TOPIC = PROPERTY_REAL_TOPIC.encode()
_REAL_QUEUE_ID = PROPERTY_REAL_QUEUE_ID.encode()

_QUEUE_DIGITS = 9
"""More digits than any queue has, fewer than its field in a record holds."""


def delay_level_of(properties: bytes, max_level: int) -> int:
    """Return the delay level a message asks for: 0 for none, never above *max_level*.

    A value that is not a number counts as none, as RocketMQ's clients cannot set one.
    """
    value = _get_property(properties, _DELAY)
    if value is None:
        return 0
    try:
        level = int(value)
    except ValueError:
        return 0
    return max(0, min(level, max_level))


def queue_of_level(level: int) -> int:
    """Return the schedule queue of a delay level."""
    return level - 1


def with_real_destination(properties: bytes, topic: str, queue_id: int) -> bytes:
    """Return *properties* with the real topic and queue added. They must end with ``\\x02``."""
    return b"%b%b\x01%b\x02%b\x01%d\x02" % (
        properties,
        _REAL_TOPIC,
        topic.encode(),
        _REAL_QUEUE_ID,
        queue_id,
    )


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delayed message on its way to its real queue.

    Attributes:
        position: Where it stands now.
        reason: Why it is a dead letter; empty: it is none.
    """

    topic: str
    queue_id: int
    record: bytes
    position: int
    reason: str = ""


def real_destination(properties: bytes) -> Run:
    """Return where a message goes whose *properties* name its real topic and queue.

    Raises:
        UnprocessableMessageError: They name none, or one that clients may not write.
    """
    topic = _get_property(properties, _REAL_TOPIC)
    queue_id = _get_property(properties, _REAL_QUEUE_ID)
    if topic is None or queue_id is None:
        raise UnprocessableMessageError("it names no real topic")
    name = topic.decode("utf-8", "replace")
    problem = topic_problem(name)
    if problem is not None or name in NOT_ALLOWED_SEND_TOPICS:
        raise UnprocessableMessageError(problem or f"its real topic is {name}, a system topic")
    if not queue_id.isdigit() or len(queue_id) > _QUEUE_DIGITS:
        raise UnprocessableMessageError(f"its real queue is {queue_id!r}, no number of a queue")
    return Run(name, int(queue_id), 1)


def deliver(scheduled: StoredRecord) -> Delivery:
    """Return the message inside a record of the schedule topic, encoded for its real queue.

    Raises:
        CorruptRecordError: The record is damaged.
        UnprocessableMessageError: It names no topic it could go to.
    """
    run = real_destination(scheduled.properties)
    return Delivery(run.topic, run.queue_id, copy_of(scheduled, run), scheduled.phy_offset)


def delivery_batch(
    deliveries: Sequence[Delivery], level: int, from_offset: int, to_offset: int
) -> RecordBatch:
    """Return the messages and the level's new progress as one batch: both happen, or neither.

    The order of *deliveries* is kept, so messages of a level do not overtake each other.
    """
    progress = state_record(DelayProgressChange(level, from_offset, to_offset))
    runs: list[Run] = []
    for item in deliveries:
        if runs and runs[-1].topic == item.topic and runs[-1].queue_id == item.queue_id:
            runs[-1] = Run(item.topic, item.queue_id, runs[-1].count + 1)
        else:
            runs.append(Run(item.topic, item.queue_id, 1))
    records = [item.record for item in deliveries]
    records.append(progress.record)
    runs.append(progress.run)
    return RecordBatch(
        records=b"".join(records),
        sizes=np.array([len(record) for record in records], dtype=np.uint32),
        runs=tuple(runs),
        born_host=None,
    )
