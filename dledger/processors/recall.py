"""Scheduled messages are taken back: by RECALL_MESSAGE (370), and by a message that names one.

Whether a message is delivered or recalled is decided once, by the first entry that says so. A
recall that is repeated is told again that it was done.

Spec: remoting fact sheet, section 7.2; semantics, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commitlog.errors import CorruptEntryError, CorruptRecordError, MQError, OffsetOutOfRangeError
from commitlog.properties import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    get_property,
)
from dledger.group_api import BrokerGroup, Proposed
from dledger.key_indexing import KEYS_ARE_MISSING
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.refusal import RefusedError, failed_proposal, not_leader, refusal
from dledger.services.stored_record import StoredRecord, StoredRecords
from dledger.services.timer_claims import TimerClaims
from dledger.state.names import TIMER_TOPIC
from dledger.state.state_record import TimersChange, state_batch
from dledger.state.topic_config import PERM_WRITE
from remoting.connection import Connection
from remoting.processor import DEFERRED, Handled
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import RecallMessageHeader
from remoting.protocol.outcome import Condition
from remoting.protocol.recall_handle import RecallHandle

MAX_CANDIDATES = 64
"""Records with one key hash that are looked at; keys of clients are unique."""

_ALWAYS_MS = (1 << 62) - 1
_UNIQ_KEY = PROPERTY_UNIQ_KEY.encode()
_OUT_MS = PROPERTY_TIMER_OUT_MS.encode()
_REAL_TOPIC = PROPERTY_REAL_TOPIC.encode()


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message that is to be recalled: where it waits; empty when it was recalled before.

    A producer that did not hear the answer may have sent it again: it may wait more than once.
    """

    offsets: tuple[int, ...]


class TimerRecalls:
    """Finds messages that can be recalled, and takes the right to do it."""

    def __init__(self, group: BrokerGroup, claims: TimerClaims) -> None:
        self._group = group
        self._claims = claims

    def claim(self, topic: str, uniq_key: str, due_ms: int) -> ScheduledMessage:
        """Return the message, claimed wherever it still waits.

        Raises:
            RefusedError: It is not there, was delivered, or is being delivered now.
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
            TIMER_TOPIC, uniq_key, MAX_CANDIDATES, 0, _ALWAYS_MS
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

    def decided(self, message: ScheduledMessage, proposed: Proposed) -> None:
        """Give the claims back if the recall certainly is not stored."""
        if proposed.outcome == "not_stored":
            self._claims.give_back(message.offsets)


class RecallProcessor:
    """Answers 370."""

    def __init__(self, group: BrokerGroup, settings: BrokerSettings, recalls: TimerRecalls) -> None:
        self._group = group
        self._settings = settings
        self._recalls = recalls

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 370 when the message never will be delivered, or say that it was or will be."""
        try:
            return self._recall(connection, command)
        except MQError as error:
            return refusal(command, error)

    def _recall(self, connection: Connection, command: RemotingCommand) -> Handled:
        group, settings = self._group, self._settings
        if group.leadership is None:
            raise not_leader(group)
        if not settings.broker_permission & PERM_WRITE:
            raise RefusedError(
                Condition.NO_PERMISSION,
                f"the broker[{settings.address}] sending message is forbidden",
            )
        header = RecallMessageHeader.decode(command.ext)
        handle = RecallHandle.decode(header.recall_handle)
        if handle.topic != header.topic or handle.broker_name != settings.broker_name:
            raise RefusedError(
                Condition.BAD_REQUEST,
                f"recall failed, the handle is for {handle.topic} on {handle.broker_name}",
            )
        answer = response_to(command, 0, None, {"msgId": handle.uniq_key})
        message = self._recalls.claim(handle.topic, handle.uniq_key, handle.due_ms)
        if not message.offsets:
            return answer

        def done(proposed: Proposed) -> None:
            self._recalls.decided(message, proposed)
            stored = proposed.outcome == "stored"
            connection.reply(
                command, answer if stored else failed_proposal(command, proposed, group)
            )

        try:
            group.propose(state_batch(TimersChange(recalled=message.offsets)), done)
        except MQError:
            self._recalls.decided(message, Proposed("not_stored"))
            raise
        return DEFERRED
