"""Half messages: the way in, and the three ways out. Pure.

A half message is an ordinary record of the half topic whose properties name its real topic and
queue, so that no consumer of these sees it. What is committed is the same message with the
property string unchanged, REAL_TOPIC, REAL_QID and TRAN_MSG included: that is what RocketMQ's
brokers store and its clients show.

Spec: docs/internals/protocol/semantics.md, section 3; docs/internals/protocol/store.md, sections 1
and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from commitlog.entry import Run
from commitlog.errors import CorruptRecordError
from commitlog.properties import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_DELAY,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    get_property,
    with_properties,
)
from commitlog.record import (
    MAX_PROPERTIES_BYTES,
    SYS_FLAG_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
)
from dledger.services.delay_level import real_destination, with_real_destination
from dledger.services.stored_record import StoredRecord, StoredRecords, copy_of
from dledger.state.names import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

HALF_RUN = Run(HALF_TOPIC, 0, 1)
"""Where a half message waits: one queue, so that its offset there names it."""

MAX_IMMUNITY_S = 72 * 3600
"""Longest time a producer may ask not to be asked: as long as messages are kept by default."""

_TRAN_MSG = PROPERTY_TRANSACTION_PREPARED.encode()
_PRODUCER_GROUP = PROPERTY_PRODUCER_GROUP.encode()
_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
_IMMUNITY = PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS.encode()
_DELAYS = tuple(
    name.encode()
    for name in (
        PROPERTY_DELAY,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_TIMER_DELIVER_MS,
    )
)


def is_half(properties: bytes) -> bool:
    """Tell whether a message asks to be a half message."""
    return _TRAN_MSG in properties and (get_property(properties, _TRAN_MSG) or b"").lower() == (
        b"true"
    )


def delay_of(properties: bytes) -> str | None:
    """Return the name of a property that asks for a delay: a half message may have none."""
    for name in _DELAYS:
        value = get_property(properties, name) if name in properties else None
        if value is not None and value != b"0":
            return name.decode()
    return None


def half_properties(properties: bytes, group: str, topic: str, queue_id: int) -> bytes:
    """Return the *properties* that a half message for *topic* is stored with.

    Args:
        properties: They end with ``\\x02``.
        group: The producer group; asked for the decision later, unless the message names one.
    """
    if get_property(properties, _PRODUCER_GROUP) is None and group:
        properties = b"%b%b\x01%b\x02" % (properties, _PRODUCER_GROUP, group.encode())
    return with_real_destination(properties, topic, queue_id)


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A record of the half topic, looked at."""

    record: StoredRecord
    group: str
    """The producer group that decides."""
    topic: str
    queue_id: int
    """The real topic and queue."""
    transaction_id: str
    immunity_s: int
    """For how long its producers are not to be asked."""

    @classmethod
    def of(cls, record: StoredRecord) -> HalfMessage:
        """Return what stands in *record*.

        Raises:
            UnprocessableMessageError: It names no topic it could go to.
        """
        properties = record.properties
        run = real_destination(properties)
        return cls(
            record,
            (get_property(properties, _PRODUCER_GROUP) or b"").decode("utf-8", "replace"),
            run.topic,
            run.queue_id,
            (get_property(properties, _UNIQ_KEY) or b"").decode("utf-8", "replace"),
            _seconds(get_property(properties, _IMMUNITY)),
        )

    def committed(self, queue_id: int) -> tuple[bytes, Run]:
        """Return the message for consumers, in queue *queue_id* of its real topic."""
        run = Run(self.topic, queue_id, 1)
        sys_flag = self.record.sys_flag & ~SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_COMMIT
        return copy_of(
            self.record,
            run,
            sys_flag=sys_flag,
            prepared_transaction_offset=self.record.phy_offset,
        ), run

    def given_up(self) -> tuple[bytes, Run]:
        """Return the copy for people, of a message without a decision."""
        run = Run(TRANS_CHECK_MAX_TIME_TOPIC, 0, 1)
        return copy_of(self.record, run, prepared_transaction_offset=0), run

    def question(self, checks: int) -> bytes:
        """Return the record that a producer is asked about for the *checks*-th time.

        It stands in its real topic and queue; offsets and times are those of the half message.
        """
        asked = {PROPERTY_TRANSACTION_CHECK_TIMES: str(checks), PROPERTY_WAIT: "false"}
        properties = with_properties(self.record.properties, asked)
        if len(properties) > MAX_PROPERTIES_BYTES:  # stored by a version that left no space
            properties = self.record.properties
        run = Run(self.topic, self.queue_id, 1)
        return copy_of(self.record, run, properties=properties, in_place=True)


def half_message_at(
    records: StoredRecords, position: int, half_offset: int | None = None
) -> HalfMessage:
    """Return the half message, the one with that offset if it is named, that stands at *position*.

    Raises:
        CorruptEntryError: It is damaged; that is reported.
        CorruptRecordError, OffsetOutOfRangeError: It does not stand there.
        UnprocessableMessageError: It names no topic it could go to.
    """
    record = records.read(position)
    if record.topic != HALF_TOPIC or half_offset not in (None, record.queue_offset):
        raise CorruptRecordError(f"half message {half_offset or ''} does not stand at {position}")
    return HalfMessage.of(record)


def _seconds(value: bytes | None) -> int:
    try:
        return max(0, min(int(value or b"0"), MAX_IMMUNITY_S))
    except ValueError:
        return 0
