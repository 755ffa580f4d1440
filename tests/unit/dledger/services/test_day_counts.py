"""Totals at the beginning of yesterday and of today."""

from __future__ import annotations

from dledger.services.throughput import DAY_MS, DayCounts


def test_totals_are_kept_when_a_day_begins() -> None:
    counts = DayCounts()
    counts.update(10 * DAY_MS + 5, put=3, got=1)
    counts.update(10 * DAY_MS + 9, put=7, got=2)
    assert (counts.put_today_morning, counts.put_yesterday_morning) == (0, 0)
    counts.update(11 * DAY_MS, put=10, got=4)
    counts.update(11 * DAY_MS + 1, put=12, got=5)
    assert (counts.put_today_morning, counts.got_today_morning) == (10, 4)
    counts.update(12 * DAY_MS, put=20, got=9)
    assert (counts.put_yesterday_morning, counts.got_yesterday_morning) == (10, 4)
    assert (counts.put_today_morning, counts.got_today_morning) == (20, 9)
