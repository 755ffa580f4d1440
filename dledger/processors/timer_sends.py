"""Scheduled messages: when each is due, what is stored until then, and RECALL_MESSAGE (370).

A message is recalled by request 370 or by a message that names it. Whether a message is delivered
or recalled is decided once, by the first entry that decides it. A repeated recall is answered as
the first one was.

Spec: docs/internals/protocol/remoting.md, sections 7.1 and 7.2;
    docs/internals/protocol/semantics.md, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from dledger.commitlog.errors import (
    CorruptEntryError,
    CorruptRecordError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.key_index import FOREVER
from dledger.commitlog.properties import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    TIMER_TOPIC,
    get_property,
)
from dledger.commitlog.record import Record
from dledger.derived_files import KEYS_ARE_MISSING
from dledger.group_api import BrokerGroup, Proposed
from dledger.processors.answers import RefusedError, answer_when_done, bad_request, require_leader
from dledger.processors.destination import check_accepts
from dledger.processors.handles import PUB, Limit, handles, needs
from dledger.remoting.connection import Connection
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import RecallHandle, RecallMessageHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.seams import Clock
from dledger.services.delayed_message import (
    TimerClaims,
    deliver_at_ms,
    due_ms,
    timed_properties,
    without_timer,
)
from dledger.services.stored_record import StoredRecord, StoredRecords
from dledger.settings.parts import BrokerSettings
from dledger.state.state_record import StateRecord, TimersChange, state_batch, state_record

MAX_CANDIDATES = 64
"""Records with one key hash that are read; keys of clients are unique."""

TOPIC_SEPARATOR: Final = "+"
"""Newer clients name a message as ``topic+key``; a topic holds no plus."""

_DELETE: Final = PROPERTY_TIMER_DELETE_UNIQ_KEY.encode()
_UNIQ_KEY: Final = PROPERTY_UNIQ_KEY.encode()
_OUT_MS: Final = PROPERTY_TIMER_OUT_MS.encode()
_REAL_TOPIC: Final = PROPERTY_REAL_TOPIC.encode()


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message that is to be recalled: where it waits; empty when it was recalled before."""

    offsets: tuple[int, ...]


class TimerRecalls:
    """Finds messages that can be recalled, and claims them."""

    def __init__(self, group: BrokerGroup, claims: TimerClaims) -> None:
        self._group = group
        self._claims = claims

    def claim(self, topic: str, uniq_key: str, due_ms: int) -> ScheduledMessage:
        """Return the message, claimed wherever it still waits.

        Raises RefusedError: it is not there, was delivered, or is being delivered now.
        """
        copies = list(self._copies(topic, uniq_key))
        # One that was rolled is there more than once: the newest decides.
        named = next((offset for offset, due in copies if due == due_ms), None)
        if named is None and self._group.key_index.is_behind:
            raise RefusedError(Condition.BUSY, KEYS_ARE_MISSING)
        if named is None:
            raise RefusedError(
                Condition.NOT_FOUND,
                f"recall failed, no message {uniq_key} is scheduled for {due_ms}",
            )
        timers = self._group.state.timers
        if timers.was_recalled(named):
            return ScheduledMessage(())
        if named not in timers:
            raise RefusedError(
                Condition.ALREADY_DELIVERED, f"recall failed, {uniq_key} was delivered already"
            )
        waiting = tuple(offset for offset, _ in copies if offset in timers)
        claimed = [offset for offset in waiting if self._claims.claim(offset)]
        if len(claimed) < len(waiting):
            self._claims.give_back(claimed)
            raise RefusedError(
                Condition.BUSY, f"recall failed for now, {uniq_key} is being delivered or recalled"
            )
        return ScheduledMessage(waiting)

    def _copies(self, topic: str, uniq_key: str) -> Iterator[tuple[int, int]]:
        """Yield offset and time of each record of that key and real topic, newest first."""
        for position in self._group.key_index.query(
            TIMER_TOPIC, uniq_key, MAX_CANDIDATES, 0, FOREVER
        ):
            record = self._record_at(position)
            if record is None:
                continue
            properties = record.properties
            due = get_property(properties, _OUT_MS) or b""
            if (
                due.isdigit()
                and get_property(properties, _UNIQ_KEY) == uniq_key.encode()
                and get_property(properties, _REAL_TOPIC) == topic.encode()
            ):
                yield record.queue_offset, int(due)

    def _record_at(self, position: int) -> StoredRecord | None:
        try:
            record = StoredRecords(self._group).read(position)
        except (OffsetOutOfRangeError, CorruptRecordError, CorruptEntryError):
            return None
        return record if record.topic == TIMER_TOPIC else None

    def settled(self, message: ScheduledMessage, _proposed: Proposed | None = None) -> None:
        """Give the claims back: the recall is applied, or never will be."""
        self._claims.give_back(message.offsets)


class RecallProcessor:
    """Answers 370."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings, recalls: TimerRecalls) -> None:
        self._group = group
        self._settings = settings
        self._recalls = recalls

    @handles(RequestCode.RECALL_MESSAGE, limit=Limit.SEND, rule=needs(PUB, topic="topic"))
    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 370 when the message will never be delivered, or that it was or will be."""
        group, settings = self._group, self._settings
        require_leader(group)
        check_accepts(settings)
        header = RecallMessageHeader.decode(command.ext)
        handle = RecallHandle.decode(header.recall_handle)
        if handle.topic != header.topic or handle.broker_name != settings.broker.broker_name:
            raise bad_request(
                f"recall failed, the handle is for {handle.topic} on {handle.broker_name}"
            )
        recalled = response_to(command, ext={"msgId": handle.uniq_key})
        message = self._recalls.claim(handle.topic, handle.uniq_key, handle.due_ms)
        if not message.offsets:
            return recalled
        answer = answer_when_done(connection, command, group, lambda _: recalled)
        settled = partial(self._recalls.settled, message)
        batch = state_batch(TimersChange(recalled=message.offsets))
        try:
            group.propose(batch, answer, settled=[settled])
        except MQError:
            self._recalls.settled(message)
            raise
        return DEFERRED


@dataclass(frozen=True, slots=True)
class TimedSend:
    """What is stored of a send whose time has not come.

    ``properties`` take the place of its own; ``recall_handle`` goes into the answer; ``recalls``
    is the message that this one takes back.
    """

    properties: bytes
    recall_handle: str = ""
    recalls: ScheduledMessage | None = None


@dataclass(eq=False, repr=False)
class TimerSends:
    """Decides about sends with timer properties."""

    _group: BrokerGroup
    _settings: BrokerSettings
    _clock: Clock
    _recalls: TimerRecalls

    def refuse_in_batch(self, properties: bytes) -> None:
        """Let a message of a batch pass, unless it has a time of its own.

        Raises:
            RefusedError: It has.
            PropertyUnreadableError: It has one that is no number.
        """
        if deliver_at_ms(properties, self._clock.wall_ms()) is not None:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, "a batch may not hold timer messages")

    def schedule(self, properties: bytes, topic: str, queue_id: int) -> TimedSend | None:
        """Return what is stored of a message for *topic*, or None when it goes there at once.

        Raises:
            RefusedError: Timers are switched off, its time is too far away, too many messages wait
                already, or it takes back what cannot be taken back.
            PropertyUnreadableError: Its time is no number.
        """
        settings, now_ms = self._settings, self._clock.wall_ms()
        asked_ms = deliver_at_ms(properties, now_ms)
        if asked_ms is None:
            return None
        if not settings.store.timer_wheel_enable:
            raise RefusedError(
                Condition.TIMER_NOT_ENABLED, "the timer is switched off: timerWheelEnable=false"
            )
        deletes = get_property(properties, _DELETE)
        if asked_ms <= now_ms:
            if deletes is not None:
                raise RefusedError(Condition.MESSAGE_ILLEGAL, "the time to recall for is over")
            return None
        if asked_ms - now_ms > settings.store.timer_max_delay_sec * 1000:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"a delay of {asked_ms - now_ms} ms, at most"
                f" {settings.store.timer_max_delay_sec} s: timerMaxDelaySec",
            )
        due = due_ms(asked_ms)
        if deletes is not None:
            return self._recall(properties, deletes.decode(errors="replace"), topic, due)
        if len(self._group.state.timers) >= settings.store.timer_pending_max:
            raise RefusedError(
                Condition.TIMER_FLOW_CONTROL,
                f"{settings.store.timer_pending_max} messages wait for their time already",
            )
        key = (get_property(properties, _UNIQ_KEY) or b"").decode(errors="replace")
        handle = RecallHandle(topic, settings.broker.broker_name, due, key)
        return TimedSend(timed_properties(properties, topic, queue_id, due), handle.encode())

    def _recall(self, properties: bytes, deletes: str, topic: str, due: int) -> TimedSend:
        named, separator, key = deletes.rpartition(TOPIC_SEPARATOR)
        if separator and named != topic:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL, f"the message to recall is one of {named}, not {topic}"
            )
        try:
            found = self._recalls.claim(topic, key, due)
        except RefusedError as error:
            if error.condition is Condition.BUSY:
                raise
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error
        return TimedSend(without_timer(properties), recalls=found)

    def recalling(self, recalled: ScheduledMessage) -> list[StateRecord]:
        """Return what stands in a proposal that recalls a message; nothing where none is left."""
        return [state_record(TimersChange(recalled=recalled.offsets))] if recalled.offsets else []

    def settled(self, timed: TimedSend | None, _proposed: Proposed | None = None) -> None:
        """Give back what a send claimed: it is settled, or was not proposed after all."""
        if timed is not None and timed.recalls is not None:
            self._recalls.settled(timed.recalls)


def handle_of(record: Record, broker_name: str) -> str:
    """Return the recall handle of a stored message; empty when it has no time of its own."""
    due = get_property(record.properties, _OUT_MS) if record.topic == TIMER_TOPIC else None
    if due is None:
        return ""
    found = record.property_map
    topic, key = found.get(PROPERTY_REAL_TOPIC, ""), found.get(PROPERTY_UNIQ_KEY, "")
    return RecallHandle(topic, broker_name, int(due), key).encode()
