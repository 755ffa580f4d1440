"""Sends with a time of their own: when each is due, and what is stored of it until then.

Spec: semantics fact sheet, section 2; remoting, section 7.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitlog.properties import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELETE_UNIQ_KEY,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    get_property,
)
from commitlog.record import Record
from dledger.group_api import BrokerGroup, OnDone, Proposed
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.recall import ScheduledMessage, TimerRecalls
from dledger.processors.refusal import RefusedError
from dledger.services.timer_message import (
    TimerIllegalError,
    deliver_at_ms,
    due_ms,
    timed_properties,
    without_timer,
)
from dledger.state.names import TIMER_TOPIC
from dledger.state.state_record import StateRecord, TimersChange, state_record
from remoting.protocol.outcome import Condition
from remoting.protocol.recall_handle import RecallHandle
from remoting.seams import Clock

TOPIC_SEPARATOR: Final = "+"
"""Newer clients name a message as ``topic+key``; a topic holds no plus."""

_DELETE: Final = PROPERTY_TIMER_DELETE_UNIQ_KEY.encode()
_UNIQ_KEY: Final = PROPERTY_UNIQ_KEY.encode()
_OUT_MS: Final = PROPERTY_TIMER_OUT_MS.encode()


@dataclass(frozen=True, slots=True)
class TimedSend:
    """What is stored of a send whose time has not come.

    ``properties`` take the place of its own; ``recall_handle`` goes into the answer; ``recalls``
    is the message that this one takes back.
    """

    properties: bytes
    recall_handle: str = ""
    recalls: ScheduledMessage | None = None


class TimerSends:
    """Decides about sends with timer properties."""

    def __init__(
        self, group: BrokerGroup, settings: BrokerSettings, clock: Clock, recalls: TimerRecalls
    ) -> None:
        self._group = group
        self._settings = settings
        self._clock = clock
        self._recalls = recalls

    def refuse_in_batch(self, properties: bytes) -> None:
        """Let a message of a batch pass, unless it has a time of its own.

        Raises:
            RefusedError: It has.
        """
        if self._asked_ms(properties) is not None:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, "a batch may not hold timer messages")

    def _asked_ms(self, properties: bytes) -> int | None:
        try:
            return deliver_at_ms(properties, self._clock.wall_ms())
        except TimerIllegalError as error:
            raise RefusedError(Condition.MESSAGE_ILLEGAL, str(error)) from error

    def schedule(self, properties: bytes, topic: str, queue_id: int) -> TimedSend | None:
        """Return what is stored of a message for *topic*, or None when it goes there at once.

        Raises:
            RefusedError: Timers are switched off, its time is no number or too far away, too many
                messages wait already, or it takes back what cannot be taken back.
        """
        asked_ms = self._asked_ms(properties)
        if asked_ms is None:
            return None
        settings, now_ms = self._settings, self._clock.wall_ms()
        if not settings.timer_wheel_enable:
            raise RefusedError(
                Condition.TIMER_NOT_ENABLED, "the timer is switched off: timerWheelEnable=false"
            )
        deletes = get_property(properties, _DELETE)
        if asked_ms <= now_ms:
            if deletes is not None:
                raise RefusedError(Condition.MESSAGE_ILLEGAL, "the time to recall for is over")
            return None
        if asked_ms - now_ms > settings.timer_max_delay_s * 1000:
            raise RefusedError(
                Condition.MESSAGE_ILLEGAL,
                f"a delay of {asked_ms - now_ms} ms, at most {settings.timer_max_delay_s} s: "
                "timerMaxDelaySec",
            )
        due = due_ms(asked_ms)
        if deletes is not None:
            return self._recall(properties, deletes.decode(errors="replace"), topic, due)
        if len(self._group.state.timers) >= settings.timer_pending_max:
            raise RefusedError(
                Condition.TIMER_FLOW_CONTROL,
                f"{settings.timer_pending_max} messages wait for their time already",
            )
        key = (get_property(properties, _UNIQ_KEY) or b"").decode(errors="replace")
        handle = RecallHandle(topic, settings.broker_name, due, key)
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

    def recalling(
        self, recalled: ScheduledMessage, on_done: OnDone
    ) -> tuple[OnDone, StateRecord | None]:
        """Return who is to be told of a proposal that recalls a message, and what does it.

        What does it stands in the proposal; it is None where nothing is left to do.
        """

        def done(proposed: Proposed) -> None:
            self._recalls.decided(recalled, proposed)
            on_done(proposed)

        if not recalled.offsets:
            return on_done, None
        return done, state_record(TimersChange(recalled=recalled.offsets))

    def not_proposed(self, timed: TimedSend | None) -> None:
        """Forget a send that was not proposed after all."""
        if timed is not None and timed.recalls is not None:
            self._recalls.decided(timed.recalls, Proposed("not_stored"))


def handle_of(record: Record, broker_name: str) -> str:
    """Return the recall handle of a stored message; empty when it has no time of its own."""
    due = get_property(record.properties, _OUT_MS) if record.topic == TIMER_TOPIC else None
    if due is None:
        return ""
    found = record.property_map
    topic, key = found.get(PROPERTY_REAL_TOPIC, ""), found.get(PROPERTY_UNIQ_KEY, "")
    return RecallHandle(topic, broker_name, int(due), key).encode()
