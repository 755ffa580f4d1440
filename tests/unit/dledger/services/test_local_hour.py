"""Hours of the local day, over the changes to summer time and back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from commitlog.seams import utc
from dledger.services.retention import HOUR_MS, is_in_hours
from remoting.clock import local_offset_ms

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)
    return int(moment.timestamp() * 1000)


def berlin(wall_ms: int) -> int:
    offset = datetime.fromtimestamp(wall_ms / 1000, BERLIN).utcoffset()
    assert offset is not None
    return int(offset.total_seconds() * 1000)


def hours_of_day(day: str, hour: int) -> list[float]:
    """Return the times of a local day, in hours since its midnight, that count as *hour*."""
    midnight = at(f"{day}T00:00")
    quarters = range(midnight, midnight + 26 * HOUR_MS, HOUR_MS // 4)
    return [
        (now - midnight) / HOUR_MS
        for now in quarters
        if is_in_hours(now, (hour,), berlin)
        and datetime.fromtimestamp(now / 1000, BERLIN).date().isoformat() == day
    ]


def test_four_in_the_morning_is_local() -> None:
    def shanghai(_: int) -> int:
        return 8 * HOUR_MS

    four = at("2026-03-01T04:30", ZoneInfo("Asia/Shanghai"))
    assert is_in_hours(four, (4,), shanghai)
    assert not is_in_hours(four, (4,), utc)
    assert not is_in_hours(four + 8 * HOUR_MS, (4,), shanghai)


def test_an_ordinary_day_has_the_hour_once() -> None:
    assert hours_of_day("2026-03-28", 2) == [2.0, 2.25, 2.5, 2.75]


def test_an_hour_that_summer_time_leaves_out_is_the_one_after_it() -> None:
    assert hours_of_day("2026-03-29", 2) == [2.0, 2.25, 2.5, 2.75]  # shown as three
    assert hours_of_day("2026-03-29", 3) == [2.0, 2.25, 2.5, 2.75]
    assert hours_of_day("2026-03-29", 4) == [3.0, 3.25, 3.5, 3.75]


def test_an_hour_that_comes_twice_counts_twice() -> None:
    assert hours_of_day("2026-10-25", 2) == [2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75]
    assert hours_of_day("2026-10-25", 3) == [4.0, 4.25, 4.5, 4.75]


@pytest.fixture
def in_berlin() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
def test_local_time_offset_is_read_from_the_machine() -> None:
    assert local_offset_ms(at("2026-01-15T12:00")) == HOUR_MS
    assert local_offset_ms(at("2026-07-15T12:00")) == 2 * HOUR_MS
