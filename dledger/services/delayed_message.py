"""Delayed messages: the way into the schedule and the timer topic, and the way out again.

A delayed message is an ordinary record of the schedule topic whose properties name its real topic
and queue; one with a time of its own is a record of the timer topic, and when it is due stands in
TIMER_OUT_MS. What is delivered is the same message with the property string unchanged, DELAY,
REAL_TOPIC and REAL_QID included: that is what RocketMQ's brokers store and its clients show.

Delivery, recall and rolling of one message exclude each other. What is applied shows which wait;
what this leader has proposed since stands here, so that no second decision is proposed.

Spec: docs/internals/protocol/semantics.md, sections 1 and 2; docs/internals/state.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from dledger.broker_errors import PropertyUnreadableError, UnprocessableMessageError
from dledger.commitlog.entry import RecordBatch, Run
from dledger.commitlog.properties import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    TIMER_TOPIC,
    get_property,
    with_properties,
    without_properties,
)
from dledger.commitlog.record import (
    BODY_LENGTH_OFFSET,
    BODY_OFFSET,
    HOST_FLAGS,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAX_TOPIC_V1_BYTES,
    PHY_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_OFFSET,
    TOTAL_SIZE_OFFSET,
)
from dledger.group_api import BrokerGroup
from dledger.remoting.protocol.header_codec import whole_number
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS
from dledger.services.stored_record import StoredBytes, StoredRecord, copy_of, decode_stored
from dledger.state.state_record import state_record
from dledger.state.table import StateChange
from dledger.state.topics import topic_problem

FARTHEST: Final = 1 << 62
"""A larger number counts as this one, which is too far away: a number of thousands of digits cannot
be written into the refusal."""


def asked_number(properties: bytes, name: str) -> int | None:
    """Return the number that a property has, at most `FARTHEST` from 0; None: it is not there.

    Raises PropertyUnreadableError: it has something else.
    """
    value = get_property(properties, name.encode())
    if value is None:
        return None
    try:
        return max(-FARTHEST, min(whole_number(value), FARTHEST))
    except ValueError:
        raise PropertyUnreadableError(name, "a number", value) from None


# ---------------------------------------------------------------------------------- by delay level


_REAL_TOPIC = PROPERTY_REAL_TOPIC.encode()
_REAL_QUEUE_ID = PROPERTY_REAL_QUEUE_ID.encode()

_QUEUE_DIGITS = 9
"""More digits than any queue has, fewer than its field in a record holds."""


def delay_level_of(properties: bytes, max_level: int) -> int:
    """Return the delay level a message asks for: 0 for none, never above *max_level*.

    Raises PropertyUnreadableError: it is no number.
    """
    return max(0, min(asked_number(properties, PROPERTY_DELAY) or 0, max_level))


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
    """One delayed message on its way to its real queue."""

    topic: str
    queue_id: int
    record: bytes
    position: int
    reason: str = ""


RealQueue = Callable[[str, int, int], int]
"""From a topic, the queue of it that a message was sent to, and where the message waits in the log,
to the queue that it goes to; raises UnprocessableMessageError: the topic is absent."""


def same_queue(_topic: str, queue_id: int, _position: int) -> int:
    """Return the queue that a message was sent to."""
    return queue_id


def real_destination(
    properties: bytes, position: int = 0, real_queue: RealQueue = same_queue
) -> Run:
    """Return where a message goes whose *properties* name its real topic and queue.

    Raises UnprocessableMessageError: they name none, or one that is removed or that clients may not
        write.
    """
    topic = get_property(properties, _REAL_TOPIC)
    queue_id = get_property(properties, _REAL_QUEUE_ID)
    if topic is None or queue_id is None:
        raise UnprocessableMessageError("it names no real topic")
    name = topic.decode("utf-8", "replace")
    problem = topic_problem(name)
    if problem is not None or name in CLOSED_TOPICS:
        raise UnprocessableMessageError(problem or f"its real topic is {name}, a system topic")
    if not queue_id.isdigit() or len(queue_id) > _QUEUE_DIGITS:
        raise UnprocessableMessageError(f"its real queue is {queue_id!r}, no number of a queue")
    return Run(name, real_queue(name, int(queue_id), position), 1)


def deliver(scheduled: StoredRecord, real_queue: RealQueue = same_queue) -> Delivery:
    """Return the message inside a record of the schedule topic, encoded for its real queue.

    Raises:
        CorruptRecordError: The record is damaged.
        UnprocessableMessageError: It names no topic it could go to.
    """
    run = real_destination(scheduled.properties, scheduled.phy_offset, real_queue)
    return Delivery(run.topic, run.queue_id, copy_of(scheduled, run), scheduled.phy_offset)


def delivery_batch(deliveries: Sequence[Delivery], change: StateChange) -> RecordBatch:
    """Return messages, and what becomes of those that waited, as one batch: both or neither.

    The order of messages is kept within each queue.
    """
    by_queue: dict[tuple[str, int], list[bytes]] = {}
    for item in deliveries:
        by_queue.setdefault((item.topic, item.queue_id), []).append(item.record)
    runs = [Run(*queue, len(records)) for queue, records in by_queue.items()]
    record, run = state_record(change)
    return RecordBatch.joined([*chain(*by_queue.values()), record], [*runs, run])


# ------------------------------------------------------------------------- with a time of their own


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
_ASKS: Final = frozenset(
    name.encode() for name in (*_TIMER_PROPERTIES, PROPERTY_TIMER_DELETE_UNIQ_KEY)
)
_ROLL_DIGITS: Final = 9
"""A message that is rolled every second for thirty years has fewer."""


def deliver_at_ms(properties: bytes, now_ms: int) -> int | None:
    """Return when a message asks to be delivered, or None when it does not.

    Raises PropertyUnreadableError: one of its times is no number.
    """
    seconds, delay_ms, at_ms = (asked_number(properties, name) for name in _TIMER_PROPERTIES)
    if seconds is not None:
        return now_ms + seconds * 1000
    return at_ms if delay_ms is None else now_ms + delay_ms


def due_ms(asked_ms: int) -> int:
    """Return the whole second at which a message is delivered that asks for *asked_ms*."""
    return -(-asked_ms // PRECISION_MS) * PRECISION_MS


def without_timer(properties: bytes) -> bytes:
    """Return *properties* without those that ask for a time."""
    return without_properties(properties, _ASKS)


def timed_properties(properties: bytes, topic: str, queue_id: int, due: int) -> bytes:
    """Return what is stored of a message that is due at *due*: one asked-for time, and the rest.

    Args:
        properties: End with ``\\x02``.
        topic, queue_id: Where it goes then.
    """
    found = [name for name in _TIMER_PROPERTIES if get_property(properties, name.encode())]
    if len(found) > 1:
        properties = without_properties(properties, {name.encode() for name in found[1:]})
    return b"%b%b\x01%d\x02" % (with_real_destination(properties, topic, queue_id), _OUT_MS, due)


def delivered_message(scheduled: StoredBytes, real_queue: RealQueue = same_queue) -> Delivery:
    """Return the message inside a record of the timer topic, encoded for its real queue.

    Raises:
        CorruptRecordError: The record is damaged.
        UnprocessableMessageError: It names no topic it could go to.
    """
    view = scheduled
    magic = int.from_bytes(view[MAGIC_OFFSET : MAGIC_OFFSET + 4], "big")
    sys_flag = int.from_bytes(view[SYS_FLAG_OFFSET : SYS_FLAG_OFFSET + 4], "big")
    if magic != MAGIC_V1 or sys_flag & HOST_FLAGS:
        return deliver(decode_stored(view), real_queue)
    body_end = BODY_OFFSET + int.from_bytes(view[BODY_LENGTH_OFFSET:BODY_OFFSET], "big")
    rest = body_end + 1 + view[body_end]  # behind the topic: length and properties
    properties = bytes(view[rest + 2 :])
    position = int.from_bytes(view[PHY_OFFSET_OFFSET:SYS_FLAG_OFFSET], "big")
    run = real_destination(properties, position, real_queue)
    topic = run.topic.encode()
    if len(topic) > MAX_TOPIC_V1_BYTES:
        return deliver(decode_stored(view), real_queue)
    head = bytearray(view[:body_end])
    size = body_end + 1 + len(topic) + 2 + len(properties)
    head[TOTAL_SIZE_OFFSET : TOTAL_SIZE_OFFSET + 4] = size.to_bytes(4, "big")
    head[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4] = run.queue_id.to_bytes(4, "big")
    # Given when the entry is sealed.
    head[QUEUE_OFFSET_OFFSET:PHY_OFFSET_OFFSET] = bytes(PHY_OFFSET_OFFSET - QUEUE_OFFSET_OFFSET)
    head[PHY_OFFSET_OFFSET:SYS_FLAG_OFFSET] = bytes(SYS_FLAG_OFFSET - PHY_OFFSET_OFFSET)
    record = b"".join((head, bytes((len(topic),)), topic, view[rest:]))
    return Delivery(run.topic, run.queue_id, record, position)


def rolled_message(scheduled: StoredRecord) -> Delivery:
    """Return a waiting message as it is stored once more in the timer topic, counted as rolled.

    Raises CorruptRecordError: the record is damaged.
    """
    counted = get_property(scheduled.properties, _ROLL_TIMES) or b""
    times = int(counted) if counted.isdigit() and len(counted) <= _ROLL_DIGITS else 0
    properties = with_properties(scheduled.properties, {PROPERTY_TIMER_ROLL_TIMES: str(times + 1)})
    if len(properties) > MAX_PROPERTIES_BYTES:  # stored by a version that left no space
        properties = scheduled.properties
    copy = copy_of(scheduled, TIMER_RUN, properties=properties)
    return Delivery(TIMER_TOPIC, 0, copy, scheduled.phy_offset)


# ---------------------------------------------------------------------------------- decided once


class TimerClaims:
    """Offsets of the timer queue with a decision on its way."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._claimed: set[int] = set()

    def __len__(self) -> int:
        return len(self._claimed)

    def claim(self, offset: int) -> bool:
        """Take the right to decide about *offset*; false when it waits no more, or another has it.

        Keep it until the decision is applied or certainly never will be.
        """
        if offset in self._claimed or offset not in self._group.state.timers:
            return False
        self._claimed.add(offset)
        return True

    def is_claimed(self, offset: int) -> bool:
        """Whether a decision about *offset* is on its way."""
        return offset in self._claimed

    def give_back(self, offsets: Iterable[int]) -> None:
        """The decision about *offsets* is applied, or certainly never will be."""
        self._claimed.difference_update(offsets)
