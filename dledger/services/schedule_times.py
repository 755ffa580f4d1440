"""Instants of repeated schedules: those of a cron expression in a time zone, those of an interval.

Pure: instants are milliseconds since 1970, and nothing reads a clock.

A library reads expressions and walks local times without a zone. What a local time is in true time
is decided here, as Debian's cron does. An expression whose minute or hour begins with ``*`` runs by
the clock on the wall: at a local time that comes twice it runs twice, at one that never comes it
does not run. Any other runs once for each local time: at the first of two equal ones, and for one
that never comes at the end of the gap.

Spec: docs/how-to/schedules.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from dledger.state.schedules import Schedule, ScheduleConfig

EXPRESSION_CHARS_MAX: Final = 256
"""Of an expression: sixty minutes written out one by one have 170."""

INTERVAL_MIN_MS: Final = 1000
"""Shortest interval: what is to come more often is a stream, and has a producer."""

INTERVAL_MAX_MS: Final = 366 * 86_400_000
"""Longest interval; a longer one is a date, which cron has."""

MISSED_COUNTED_MAX: Final = 200
"""Instants of a cron expression without a message that are counted for one message: some 15 ms of
the event loop. An expression of every minute comes to that in three hours without a leader."""

LAST_MS: Final = 253_370_764_800_000
"""Begin of the year 9999: dates behind it cannot be computed with."""

SHORTHANDS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PARTS: Final = re.compile(r"(\d{1,9})(ms|s|m|h|d)")
_LOOK_S: Final = 2 * 86_400
"""More than two offsets of a zone ever differed by, and less than lies between two changes."""
_ZONES_OF_A_MACHINE: Final = frozenset({"localtime", "posixrules"})
_PARSED_KEPT: Final = 2048
"""Expressions that stay parsed: twice as many as a group has schedules."""


class Times(Protocol):
    """The instants of a schedule."""

    def next_after(self, ms: int) -> int | None:
        """Return the first instant after *ms*; None: there is none any more."""


@dataclass(frozen=True, slots=True)
class Every:
    """An interval: *anchor_ms*, and from there on in equal steps."""

    interval_ms: int
    anchor_ms: int

    def next_after(self, ms: int) -> int | None:
        """Return the first instant after *ms*."""
        if ms < self.anchor_ms:
            return self.anchor_ms
        steps = (ms - self.anchor_ms) // self.interval_ms + 1
        return self.anchor_ms + steps * self.interval_ms


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone.

    Attributes:
        fields: Five, with one space between them.
    """

    fields: str
    zone: ZoneInfo

    def next_after(self, ms: int) -> int | None:
        """Return the first instant after *ms*; None: there is none within fifty years."""
        after_s = ms // 1000
        minute, hour, *_ = self.fields.split(" ")
        by_the_wall = minute.startswith("*") or hour.startswith("*")
        found = self._by_the_wall(after_s) if by_the_wall else self._once_each(after_s)
        return None if found is None or found * 1000 > LAST_MS else found * 1000

    def _by_the_wall(self, at_s: int) -> int | None:
        offset = self._offset_s(at_s)
        while (local := next(self._locals(at_s + offset), None)) is not None:
            due = local - offset
            look = min(due, at_s + _LOOK_S)
            if self._offset_s(look) != offset:
                # Up to the change there is none: local times go on with another offset there.
                change = self._first_with_other_offset(at_s, look)
                at_s, offset = change - 1, self._offset_s(change)
            elif look == due:
                return due
            else:
                # With another offset it would come a day earlier or later: none comes before that.
                at_s = max(look, due - _LOOK_S)
                offset = self._offset_s(at_s)
        return None

    def _once_each(self, after_s: int) -> int | None:
        for local in self._locals(after_s + self._offset_s(after_s)):
            due = self._first_at(local)
            if due > after_s:
                return due
        return None

    def _first_at(self, local: int) -> int:
        """Return when the clock on the wall first shows a local time, or one behind it."""
        naive = datetime.fromtimestamp(local, UTC).replace(tzinfo=None)
        early = int(naive.replace(tzinfo=self.zone, fold=0).timestamp())
        if early + self._offset_s(early) == local:
            return early
        late = int(naive.replace(tzinfo=self.zone, fold=1).timestamp())
        return self._first_with_other_offset(late, early)

    def _first_with_other_offset(self, low: int, high: int) -> int:
        """Return the first second behind *low* with the offset of *high*; one change between."""
        wanted = self._offset_s(high)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset_s(middle) == wanted:
                high = middle
            else:
                low = middle
        return high

    def _offset_s(self, at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, self.zone).utcoffset() or timedelta()
        return int(offset.total_seconds())

    def _locals(self, after: int) -> Iterator[int]:
        """Yield local times after one, as seconds since the local 1970."""
        try:
            for found in CronSim(self.fields, datetime.fromtimestamp(after, UTC)):
                yield int(found.timestamp())
        except (OverflowError, ValueError):
            return  # behind the last year there is


def parse_interval(text: str) -> int:
    """Return the milliseconds of ``30s``, ``1h30m`` and the like.

    Raises:
        ValueError: It is no such time, or shorter or longer than an interval may be.
    """
    if not re.fullmatch(rf"(?:{_PARTS.pattern})+", text):
        raise ValueError(f"{text[:32]!r} is no interval such as 30s, 15m, 6h or 1h30m")
    interval_ms = sum(int(count) * _UNIT_MS[unit] for count, unit in _PARTS.findall(text))
    if not INTERVAL_MIN_MS <= interval_ms <= INTERVAL_MAX_MS:
        raise ValueError(f"an interval is from 1s to 366d, not {text[:32]}")
    return interval_ms


def parse_times(expression: str, time_zone: str = "UTC", anchor_ms: int = 0) -> Times:
    """Return the instants that an expression stands for.

    Args:
        anchor_ms: First instant of an interval.
    Raises:
        ValueError: It is no expression, or there is no such time zone here.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise ValueError(f"an expression has at most {EXPRESSION_CHARS_MAX} characters")
    words = expression.split()
    if words and words[0].lower() == "@every":
        if len(words) != 2:
            raise ValueError("an interval is written as @every 30s")
        _zone(time_zone)  # times are shown in it
        return Every(parse_interval(words[1]), anchor_ms)
    return _parse_cron(" ".join(words), time_zone)


@lru_cache(_PARSED_KEPT)
def _parse_cron(text: str, time_zone: str) -> Cron:
    fields = SHORTHANDS.get(text.lower(), text).upper()
    if len(fields.split(" ")) != 5:
        raise ValueError(
            f"{text[:64]!r} has not the five fields minute, hour, day of month, month, day of week"
        )
    cron = Cron(fields, _zone(time_zone))
    try:
        CronSim(fields, datetime.fromtimestamp(0, UTC))
    except (CronSimError, AssertionError, ValueError) as error:
        raise ValueError(f"{text[:64]!r} is no cron expression: {error}") from None
    return cron


def _zone(name: str) -> ZoneInfo:
    try:
        if name not in _ZONES_OF_A_MACHINE:
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise ValueError(f"there is no time zone {name[:64]!r}")


def times_of(config: ScheduleConfig, counts_from_ms: int) -> Times:
    """Return the instants of a schedule, whatever its begin and end.

    Raises:
        ValueError: As `parse_times`.
    """
    return parse_times(config.expression, config.time_zone, config.begin_ms or counts_from_ms)


def next_instant(row: Schedule, times: Times, after_ms: int | None = None) -> int | None:
    """Return the first instant of *row* that is not decided, or after *after_ms*; None: no more.

    Args:
        times: `times_of` it.
    """
    after_ms = row.after_ms if after_ms is None else max(after_ms, row.after_ms)
    due_ms = times.next_after(max(after_ms, row.config.begin_ms - 1))
    end_ms = row.config.end_ms
    return None if due_ms is None or (end_ms and due_ms > end_ms) else due_ms


@dataclass(frozen=True, slots=True)
class DueInstant:
    """The newest instant of a schedule that has come.

    Attributes:
        missed: How many came before it without a message; of a cron expression they are counted
            up to `MISSED_COUNTED_MAX`.
    """

    due_ms: int
    missed: int


def newest_due(row: Schedule, times: Times, now_ms: int) -> DueInstant | None:
    """Return the instant that a message is to be sent for now; None: none is due.

    Args:
        times: `times_of` it.
    """
    due_ms = None if row.config.paused else next_instant(row, times)
    if due_ms is None or due_ms > now_ms:
        return None
    if isinstance(times, Every):
        last_ms = min(now_ms, row.config.end_ms or now_ms)
        steps = (last_ms - due_ms) // times.interval_ms
        return DueInstant(due_ms + steps * times.interval_ms, steps)
    missed = 0
    while missed < MISSED_COUNTED_MAX:
        later_ms = next_instant(row, times, due_ms)
        if later_ms is None or later_ms > now_ms:
            return DueInstant(due_ms, missed)
        due_ms, missed = later_ms, missed + 1
    return DueInstant(_newest_until(row, times, due_ms, now_ms), missed)


def _newest_until(row: Schedule, times: Times, low_ms: int, now_ms: int) -> int:
    """Return the newest instant up to *now_ms*; *low_ms* is one."""
    high_ms, newest_ms = now_ms, low_ms
    while low_ms < high_ms:
        middle_ms = (low_ms + high_ms) // 2
        found_ms = next_instant(row, times, middle_ms)
        if found_ms is None or found_ms > now_ms:
            high_ms = middle_ms
        else:
            low_ms = newest_ms = found_ms
    return newest_ms


def coming_instants(row: Schedule, now_ms: int, count: int) -> list[int]:
    """Return up to *count* instants of *row* after *now_ms*, as if it were not paused.

    Raises:
        ValueError: As `parse_times`.
    """
    times = times_of(row.config, row.counts_from_ms)
    found: list[int] = []
    at_ms = now_ms
    while len(found) < count:
        due_ms = next_instant(row, times, at_ms)
        if due_ms is None:
            break
        found.append(due_ms)
        at_ms = due_ms
    return found
