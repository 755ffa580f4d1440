"""Instants of schedules: against an oracle that walks minute by minute, changes of clocks too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dledger.services.schedule_times import (
    EXPRESSION_CHARS_MAX,
    INTERVAL_MAX_MS,
    MISSED_COUNTED_MAX,
    SHORTHANDS,
    DueInstant,
    coming_instants,
    newest_due,
    next_instant,
    parse_interval,
    parse_times,
    times_of,
)
from dledger.state.schedules import Schedule, ScheduleConfig
from tests.harness.extent import examples

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
MOST = 200

ZONES = {
    # Zone, and days with a change of its clocks.
    "Europe/Berlin": ("2025-03-30", "2025-10-26"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2025-10-05", "2026-04-05"),  # by half an hour
    "Africa/Cairo": ("2024-04-26", "2024-10-31"),  # at midnight
    "America/Sao_Paulo": ("2018-11-04", "2018-02-17"),  # at midnight
    "Pacific/Apia": ("2011-12-30", "2011-09-24"),  # a whole day is left out
    "Asia/Kathmandu": ("2026-01-01", "2026-06-01"),
    "UTC": ("2024-02-29", "2026-12-31"),
}


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def text(instant_ms: int, zone: str = "UTC") -> str:
    return datetime.fromtimestamp(instant_ms // 1000, ZoneInfo(zone)).isoformat()


# -- the oracle -------------------------------------------------------------------------------


def field_values(field: str, low: int, high: int) -> set[int]:
    """Return what one field matches, of the forms that are drawn here."""
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            first, last = str(low), str(high)
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


class Oracle:
    """Matches one local minute at a time; knows nothing of zones."""

    def __init__(self, expression: str) -> None:
        minute, hour, day, month, weekday = self.fields = expression.split(" ")
        self.minutes, self.hours = field_values(minute, 0, 59), field_values(hour, 0, 23)
        self.days, self.months = field_values(day, 1, 31), field_values(month, 1, 12)
        self.weekdays = {value % 7 for value in field_values(weekday, 0, 7)}
        self.needs_both = day.startswith("*") or weekday.startswith("*")
        self.by_the_wall = minute.startswith("*") or hour.startswith("*")

    def matches(self, local: datetime) -> bool:
        by_day = local.day in self.days
        by_weekday = local.isoweekday() % 7 in self.weekdays
        return (
            local.minute in self.minutes
            and local.hour in self.hours
            and local.month in self.months
            and ((by_day and by_weekday) if self.needs_both else (by_day or by_weekday))
        )

    def walk(self, zone: str, from_ms: int, until_ms: int) -> Iterator[int]:
        """Yield the instants after *from_ms* up to *until_ms*.

        By the wall: every true minute whose local time matches. Else: the first true minute at
        which the clock has shown a matching local time, or jumped over it.
        """
        info = ZoneInfo(zone)
        at = datetime.fromtimestamp(from_ms // 1000, UTC).replace(second=0) - timedelta(hours=25)
        end = datetime.fromtimestamp(until_ms // 1000, UTC)
        shown = at.astimezone(info).replace(tzinfo=None)
        while (at := at + timedelta(minutes=1)) <= end:
            local = at.astimezone(info).replace(tzinfo=None)
            if self.by_the_wall:
                found = self.matches(local)
            else:
                found = False
                while shown < local:
                    shown += timedelta(minutes=1)
                    found = found or self.matches(shown)
            instant_ms = int(at.timestamp()) * 1000
            if found and instant_ms > from_ms:
                yield instant_ms


def numbers(low: int, high: int) -> st.SearchStrategy[str]:
    one = st.integers(low, high).map(str)
    several = st.lists(st.integers(low, high), min_size=2, max_size=4).map(
        lambda values: ",".join(map(str, values))
    )
    span = st.tuples(st.integers(low, high), st.integers(low, high)).map(
        lambda pair: f"{min(pair)}-{max(pair)}"
    )
    step = st.integers(2, max(2, high // 2)).map(lambda value: f"*/{value}")
    return st.one_of(st.just("*"), one, several, span, step)


expressions = st.tuples(
    numbers(0, 59),
    st.one_of(numbers(0, 23), st.sampled_from(["0", "1", "2", "1-3", "0,2", "23"])),
    st.one_of(st.just("*"), numbers(1, 28)),
    st.just("*"),
    st.one_of(st.just("*"), numbers(0, 6)),
).map(" ".join)
zones = st.sampled_from(sorted(ZONES))


@given(expressions, zones, st.integers(0, 1), st.integers(-1700, 300), st.integers(0, 59_999))
@example("* * */3 * *", "Pacific/Apia", 0, -841, 0)
@example("30 2 * * *", "Europe/Berlin", 0, 0, 0)
@example("30 2 * * *", "Europe/Berlin", 1, 0, 0)
@example("*/30 * * * *", "Australia/Lord_Howe", 1, 700, 0)
@example("15,45 0-2 * * *", "Africa/Cairo", 0, -60, 0)
@example("* 2 * * *", "America/New_York", 1, 300, 0)
@example("0 12 * * *", "Pacific/Apia", 0, -1440, 0)
@settings(max_examples=examples(240))
def test_instants_are_those_of_a_walk_by_minutes(
    expression: str, zone: str, which: int, minutes: int, more_ms: int
) -> None:
    from_ms = ms(ZONES[zone][which]) + minutes * MINUTE_MS + more_ms
    until_ms = from_ms + 30 * HOUR_MS
    expected = list(islice(Oracle(expression).walk(zone, from_ms, until_ms), MOST))
    times = parse_times(expression, zone)
    found: list[int] = []
    due = times.next_after(from_ms)
    while due is not None and due <= until_ms and len(found) < MOST:
        found.append(due)
        due = times.next_after(due)
    assert [text(value, zone) for value in found] == [text(value, zone) for value in expected]


@given(expressions, zones, st.integers(0, 1), st.integers(0, 4 * 1440), st.integers(0, 4 * 1440))
@settings(max_examples=examples(150))
def test_an_instant_does_not_depend_on_where_one_begins(
    expression: str, zone: str, which: int, first: int, second: int
) -> None:
    times = parse_times(expression, zone)
    begin_ms = ms(ZONES[zone][which]) - 2 * DAY_MS
    low, high = sorted((begin_ms + first * MINUTE_MS, begin_ms + second * MINUTE_MS))
    due = times.next_after(low)
    if due is not None and due > high:
        assert times.next_after(high) == due
    elif due is not None:
        assert (times.next_after(high) or due + 1) > due


# -- cron -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "zone", "after", "coming"),
    [
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2025-03-29T12:00",
            ["2025-03-30T03:00:00+02:00", "2025-03-31T02:30:00+02:00"],
        ),
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2025-10-25T12:00",
            ["2025-10-26T02:30:00+02:00", "2025-10-27T02:30:00+01:00"],
        ),
        (
            "30 * * * *",
            "Europe/Berlin",
            "2025-10-26T01:40",
            ["2025-10-26T02:30:00+02:00", "2025-10-26T02:30:00+01:00"],
        ),
        ("0 9 29 2 *", "UTC", "2025-01-01", ["2028-02-29T09:00:00+00:00"]),
        ("0 0 13 * 5", "UTC", "2026-01-01", ["2026-01-02T00:00:00+00:00"]),
        ("@daily", "Asia/Tokyo", "2026-01-01T12:00", ["2026-01-02T00:00:00+09:00"]),
        ("0 8 * jan mon-fri", "UTC", "2026-01-30T09:00", ["2027-01-01T08:00:00+00:00"]),
    ],
)
def test_instants_of_expressions(expression: str, zone: str, after: str, coming: list[str]) -> None:
    row = Schedule(ScheduleConfig("s", "T", b"b", expression, time_zone=zone), 0, 0)
    found = coming_instants(row, ms(after, zone), len(coming))
    assert [text(value, zone) for value in found] == coming


@pytest.mark.parametrize("shorthand", sorted(SHORTHANDS))
def test_every_shorthand_has_instants(shorthand: str) -> None:
    assert parse_times(shorthand.upper()).next_after(ms("2026-01-01")) is not None


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("0 * * * * *", "five fields"),
        ("61 * * * *", "Bad minute"),
        ("0 0 31 4,6 *", "Bad day-of-month"),
        ("*/0 * * * *", "Bad minute"),
        ("@every", "@every 30s"),
        ("@every 30s 5s", "@every 30s"),
        ("@every 10", "no interval"),
        ("@every 999ms", "from 1s to 366d"),
        ("@every 367d", "from 1s to 366d"),
        ("@never", "five fields"),
        ("0," * EXPRESSION_CHARS_MAX + " * * * *", "256 characters"),
    ],
)
def test_what_is_no_expression_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_times(expression)


@pytest.mark.parametrize(
    "zone", ["Mars/Olympus", "", "../../etc/passwd", "localtime", "\0", "UTC "]
)
def test_a_time_zone_that_is_none_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        parse_times("0 0 * * *", zone)


@given(st.text(max_size=40) | st.text("0123456789*/,-LW# @everyMONJAN", max_size=40))
def test_no_text_does_more_than_be_refused(expression: str) -> None:
    try:
        times = parse_times(expression)
    except ValueError:
        return
    due = times.next_after(ms("2026-01-01"))
    assert due is None or due > ms("2026-01-01")


def test_an_expression_without_an_instant_has_none() -> None:
    row = Schedule(ScheduleConfig("s", "T", b"b", "* * */20 * 1L"), 0, 0)
    assert coming_instants(row, ms("2026-01-01"), 5) == []


# -- intervals --------------------------------------------------------------------------------


def test_intervals_are_read() -> None:
    assert [parse_interval(text) for text in ("30s", "1h30m", "1500ms", "366d")] == [
        30_000,
        5_400_000,
        1500,
        INTERVAL_MAX_MS,
    ]


def test_an_interval_counts_from_its_begin_or_when_it_was_made() -> None:
    config = ScheduleConfig("s", "T", b"b", "@every 30s")
    assert coming_instants(Schedule(config, 5_000, 5_000), 5_000, 2) == [35_000, 65_000]
    begun = ScheduleConfig("s", "T", b"b", "@every 30s", begin_ms=7_000)
    assert coming_instants(Schedule(begun, 5_000, 5_000), 5_000, 2) == [7_000, 37_000]
    assert coming_instants(Schedule(begun, 70_000, 70_000), 70_000, 2) == [97_000, 127_000]


# -- what is due ------------------------------------------------------------------------------


def row_of(expression: str, after_ms: int, **more: int | bool) -> Schedule:
    config = ScheduleConfig("s", "T", b"b", expression, **more)  # type: ignore[arg-type]  # by name
    return Schedule(config, after_ms, after_ms)


@given(
    st.sampled_from(["@every 1s", "@every 7s", "@every 90s", "* * * * *", "*/7 3 * * *"]),
    st.integers(0, 3 * DAY_MS),
    st.integers(0, 3 * DAY_MS),
    st.integers(0, 3 * DAY_MS),
)
def test_the_newest_due_instant_is_that_of_a_walk(
    expression: str, after_ms: int, passed_ms: int, end_ms: int
) -> None:
    row = row_of(expression, after_ms, end_ms=end_ms)
    times, now_ms = times_of(row.config, after_ms), after_ms + passed_ms // 20
    last, count = None, 0
    at = next_instant(row, times)
    while at is not None and at <= now_ms:
        last, count = at, count + 1
        at = next_instant(row, times, at)
    found = newest_due(row, times, now_ms)
    if last is None:
        assert found is None
    else:
        counted = count - 1 if "@every" in expression else min(count - 1, MISSED_COUNTED_MAX)
        assert found == DueInstant(last, counted)


def test_years_of_missed_instants_cost_no_walk() -> None:
    row = row_of("* * * * *", ms("2020-01-01"))
    now_ms = ms("2026-06-01T12:00:30")
    found = newest_due(row, times_of(row.config, 0), now_ms)
    assert found == DueInstant(ms("2026-06-01T12:00"), MISSED_COUNTED_MAX)


def test_nothing_is_due_before_begin_after_end_or_while_paused() -> None:
    begin_ms, end_ms = ms("2026-01-02"), ms("2026-01-03")
    row = row_of("0 0,12 * * *", ms("2026-01-01"), begin_ms=begin_ms, end_ms=end_ms)
    times = times_of(row.config, 0)
    assert newest_due(row, times, begin_ms - 1) is None
    assert newest_due(row, times, begin_ms) == DueInstant(begin_ms, 0)
    assert newest_due(row, times, end_ms + DAY_MS) == DueInstant(end_ms, 2)
    paused = row_of("0 0,12 * * *", ms("2026-01-01"), paused=True)
    assert newest_due(paused, times_of(paused.config, 0), end_ms) is None


def test_instants_come_in_order_for_years() -> None:
    row = row_of("13 3 * * 1", ms("2020-01-01"))
    times = times_of(row.config, 0)

    def walk() -> Iterator[int]:
        at: int | None = row.after_ms
        while at is not None and (at := times.next_after(at)) is not None:
            yield at

    found = list(islice(walk(), 500))
    assert {later - earlier for earlier, later in pairwise(found)} == {7 * DAY_MS}
