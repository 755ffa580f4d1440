"""Half messages: the way in, the three ways out, and decisions: applied, plus what is in flight.

A half message is an ordinary record of the half topic whose properties name its real topic and
queue. What is committed is the same message with the property string unchanged, REAL_TOPIC,
REAL_QID and TRAN_MSG included: that is what RocketMQ's brokers store and its clients show.

The decision and the message it brings into the world go into one entry. A half message has one
decision in flight at most, so `apply` has nothing to refuse.

Spec: docs/internals/protocol/semantics.md, section 3; docs/internals/protocol/store.md, sections 1
and 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from dledger.broker_errors import PropertyUnreadableError
from dledger.commitlog.entry import Run
from dledger.commitlog.errors import CorruptRecordError
from dledger.commitlog.properties import (
    MAX_PROPERTIES_BYTES,
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
from dledger.commitlog.record import SYS_FLAG_COMMIT, SYS_FLAG_TRANSACTION_MASK
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.remoting.protocol.topic_names import (
    HALF_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)
from dledger.services.delayed_message import (
    asked_number,
    real_destination,
    with_real_destination,
)
from dledger.services.pending_configs import TopicView, noting
from dledger.services.stored_record import StoredRecord, StoredRecords, copy_of
from dledger.state.state_record import TopicsChange, TransactionsChange, batch_of, state_record
from dledger.state.topics import TopicConfig
from dledger.state.transactions import TransactionDecision

# ---------------------------------------------------------------------------------- the message


HALF_RUN = Run(HALF_TOPIC, 0, 1)
"""Where a half message waits: one queue, so that its offset there names it."""

MAX_IMMUNITY_S = 72 * 3600
"""Longest time a producer may ask not to be asked: as long as messages are kept by default."""

_TRAN_MSG = PROPERTY_TRANSACTION_PREPARED.encode()
_PRODUCER_GROUP = PROPERTY_PRODUCER_GROUP.encode()
_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
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
    """Tell whether a message asks to be a half message.

    Raises PropertyUnreadableError: neither yes nor no.
    """
    value = get_property(properties, _TRAN_MSG) if _TRAN_MSG in properties else None
    if value is not None and value.lower() not in (b"true", b"false"):
        raise PropertyUnreadableError(PROPERTY_TRANSACTION_PREPARED, "true or false", value)
    return value is not None and value.lower() == b"true"


def delay_of(properties: bytes) -> str | None:
    """Return the name of a property that asks for a delay: a half message may have none."""
    for name in _DELAYS:
        value = get_property(properties, name) if name in properties else None
        if value is not None and value != b"0":
            return name.decode()
    return None


def half_properties(properties: bytes, group: str, topic: str, queue_id: int) -> bytes:
    """Return the *properties* that a half message for *topic* is stored with.

    Raises PropertyUnreadableError: how long its producers are not to be asked is no number.
    """
    asked_number(properties, PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS)
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

        Raises UnprocessableMessageError: it names no topic it could go to.
        """
        properties = record.properties
        run = real_destination(properties)
        try:
            asked_s = asked_number(properties, PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS) or 0
        except PropertyUnreadableError:  # stored by a version that took it
            asked_s = 0
        return cls(
            record,
            (get_property(properties, _PRODUCER_GROUP) or b"").decode("utf-8", "replace"),
            run.topic,
            run.queue_id,
            (get_property(properties, _UNIQ_KEY) or b"").decode("utf-8", "replace"),
            max(0, min(asked_s, MAX_IMMUNITY_S)),
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
        """Return the record that a producer is asked about for the *checks*-th time."""
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


# ---------------------------------------------------------------------------------- its decision


@dataclass(slots=True, eq=False)
class _InFlight:
    decision: TransactionDecision
    waiting: list[OnDone] = field(default_factory=list)
    answered: Proposed | None = None


class TransactionDecisions:
    """What is decided, or is being decided; the only way to propose a decision."""

    def __init__(self, group: BrokerGroup, topics: TopicView) -> None:
        self.counts: Counter[TransactionDecision] = Counter()
        self._group = group
        self._topics = topics
        self._in_flight: dict[int, _InFlight] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def is_open(self, half_offset: int) -> bool:
        """Tell whether a half message may be decided now: open, and nothing in flight."""
        is_open = half_offset in self._group.state.transactions.open
        return is_open and half_offset not in self._in_flight

    def decision(self, half_offset: int) -> TransactionDecision | None:
        """Return what was decided, or is being; None while it is open, or if it is forgotten."""
        pending = self._in_flight.get(half_offset)
        if pending is not None:
            return pending.decision
        return self._group.state.transactions.decided.get(half_offset)

    def wait(self, half_offset: int, on_done: OnDone) -> None:
        """Call *on_done* with what becomes of the decision in flight, or became of it.

        At once, from inside this call, when that is known: it is applied, the wait for a majority
        is over, or there was none.
        """
        pending = self._in_flight.get(half_offset)
        if pending is None:
            on_done(Proposed("stored"))
        elif pending.answered is not None:
            on_done(pending.answered)
        else:
            pending.waiting.append(on_done)

    def decide(
        self,
        half_offset: int,
        decision: TransactionDecision,
        on_done: OnDone,
        message: tuple[bytes, Run] | None = None,
        create: TopicConfig | None = None,
    ) -> None:
        """Propose the *decision* over an open half message, and with it the *message*.

        Raises MQError: what `BrokerGroup.propose` raises; nothing was stored and *on_done* is not
        called.
        """
        assert self.is_open(half_offset)
        mine = _InFlight(decision, [on_done])
        change = None if create is None else TopicsChange(put=(create,))
        records = [] if change is None else [state_record(change)]
        if message is not None:
            records.append(message)
        records.append(state_record(TransactionsChange(decided=((half_offset, decision),))))
        with noting((self._topics.pending, change)) as settled:
            settled.append(partial(self._settled, half_offset))
            self._group.propose(batch_of(records), partial(self._done, mine), settled=settled)
        self._in_flight[half_offset] = mine

    def _settled(self, half_offset: int, _proposed: Proposed) -> None:
        del self._in_flight[half_offset]

    def _done(self, mine: _InFlight, proposed: Proposed) -> None:
        mine.answered = proposed
        if proposed.outcome == "stored":
            self.counts[mine.decision] += 1
        waiting, mine.waiting = mine.waiting, []
        for on_done in waiting:
            on_done(proposed)
