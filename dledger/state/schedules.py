"""Repeated schedules in the replicated state: what is sent again and again, and how far each is.

What an expression means is decided elsewhere; here it is a text. Apply decides nothing: a message
and the instant it stands for come in one entry, and an instant that does not follow the one before
stops the node.

Spec: docs/internals/state.md, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from dledger.commitlog.errors import InvariantBroken

ANY_QUEUE = -1


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What is to be sent, and when.

    Attributes:
        queue_id: `ANY_QUEUE`: by message group where one is given, else one after the other.
        properties: Of each message; tags, keys and message group are among them.
        expression: Five fields of cron, or an interval: ``@every 30s``.
        time_zone: Of a cron expression; a name of the IANA's.
        begin_ms: No instant before it; 0: from when it is made.
        end_ms: No instant after it; 0: without an end.
    """

    name: str
    topic: str
    body: bytes
    expression: str
    properties: Mapping[str, str] = field(default_factory=dict)
    queue_id: int = ANY_QUEUE
    time_zone: str = "UTC"
    begin_ms: int = 0
    end_ms: int = 0
    paused: bool = False

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        return asdict(self)

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made.

        Raises:
            TypeError: A field is missing or not known here.
        """
        return cls(**value)

    @property
    def times(self) -> tuple[str, str, int, int]:
        """What decides about its instants."""
        return self.expression, self.time_zone, self.begin_ms, self.end_ms


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row: a schedule and how far it is.

    Attributes:
        counts_from_ms: When it got its times; an interval without a begin counts from there.
        after_ms: Instants up to this one are decided, or never were due.
        last_ms: The newest instant that a message was sent for; 0: none yet.
        fired: Messages sent.
        missed: Instants that passed without a message of their own.
    """

    config: ScheduleConfig
    counts_from_ms: int
    after_ms: int
    last_ms: int = 0
    fired: int = 0
    missed: int = 0

    def to_state(self) -> list[Any]:
        """Return the row as a snapshot has it."""
        return [
            self.config.to_state(),
            self.counts_from_ms,
            self.after_ms,
            self.last_ms,
            self.fired,
            self.missed,
        ]

    @classmethod
    def from_state(cls, value: list[Any]) -> Self:
        """Read what `to_state` made."""
        config, *numbers = value
        return cls(ScheduleConfig.from_state(config), *numbers)


@dataclass(frozen=True, slots=True)
class Fired:
    """The message of an instant stands in the same entry.

    Attributes:
        before_ms: `Schedule.after_ms` as the proposer had it.
        due_ms: The instant.
        missed: Instants between them without a message.
    """

    name: str
    before_ms: int
    due_ms: int
    missed: int = 0


@dataclass(frozen=True, slots=True)
class SchedulesChange:
    """Schedules put, deleted and fired.

    Attributes:
        at_ms: Time of the leader: instants of what is put count from there where its times are
            new, or where it was paused.
        asked_by: The requester; empty where the leader did it by itself.
    """

    put: tuple[ScheduleConfig, ...] = ()
    at_ms: int = 0
    delete: tuple[str, ...] = ()
    fired: tuple[Fired, ...] = ()
    asked_by: str = ""

    def to_state(self) -> dict[str, Any]:
        """Return the CBOR form of a state record."""
        state: dict[str, Any] = {}
        if self.put:
            state |= {"put": [config.to_state() for config in self.put], "at": self.at_ms}
        if self.delete:
            state["delete"] = list(self.delete)
        if self.fired:
            state["fired"] = [
                [item.name, item.before_ms, item.due_ms, item.missed] for item in self.fired
            ]
        if self.asked_by:
            state["asked_by"] = self.asked_by
        return state

    @classmethod
    def from_state(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_state` made."""
        return cls(
            tuple(ScheduleConfig.from_state(item) for item in value.get("put", ())),
            value["at"] if "put" in value else 0,
            tuple(value.get("delete", ())),
            tuple(Fired(*item) for item in value.get("fired", ())),
            value.get("asked_by", ""),
        )


def apply_schedules(rows: dict[str, Schedule], change: SchedulesChange, index: int) -> set[str]:
    """Bring *rows* to what they are behind *change*; return the names it is about.

    What is put comes first, then what is deleted, then what fired. A schedule that is not there is
    deleted already.

    Args:
        index: Of the entry.
    Raises:
        InvariantBroken: An instant does not follow the one its schedule stands at.
    """
    for config in change.put:
        rows[config.name] = _put(rows.get(config.name), config, change.at_ms)
    for name in change.delete:
        rows.pop(name, None)
    for item in change.fired:
        row = rows.get(item.name)
        if row is None or row.after_ms != item.before_ms or item.due_ms <= item.before_ms:
            raise InvariantBroken(
                f"entry {index} fires schedule {item.name} at {item.due_ms}, after"
                f" {item.before_ms}, where {row and row.after_ms} is"
            )
        rows[item.name] = replace(
            row,
            after_ms=item.due_ms,
            last_ms=item.due_ms,
            fired=row.fired + 1,
            missed=row.missed + item.missed,
        )
    return {
        *(config.name for config in change.put),
        *change.delete,
        *(item.name for item in change.fired),
    }


def _put(row: Schedule | None, config: ScheduleConfig, at_ms: int) -> Schedule:
    if row is None:
        return Schedule(config, at_ms, at_ms)
    has_new_times = config.times != row.config.times
    if not has_new_times and config.paused == row.config.paused:
        # Only what is sent is another: an instant that is due already is sent, too.
        return replace(row, config=config)
    return replace(
        row,
        config=config,
        counts_from_ms=at_ms if has_new_times else row.counts_from_ms,
        after_ms=max(row.after_ms, at_ms),
    )


def drop_schedules_of(rows: dict[str, Schedule], topic: str) -> set[str]:
    """Remove the schedules of a topic that is deleted; return their names."""
    gone = {name for name, row in rows.items() if row.config.topic == topic}
    for name in gone:
        del rows[name]
    return gone
