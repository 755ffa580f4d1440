"""Rates and day totals; what a topic got is summed up as it comes, without reading all queues."""

from __future__ import annotations

from dledger.services.throughput import DAY_MS, DayCounts, Throughput
from dledger.state.tables import QueueBounds, StateTables
from dledger.testing.clocks import ManualClock


def test_topic_counts_all_its_queues() -> None:
    tables = StateTables(queues={("T", 0): QueueBounds(0, 5), ("T", 1): QueueBounds(2, 7)})
    clock = ManualClock()
    throughput = Throughput(clock, tables)

    throughput.on_applied([("T", 1, 9), ("U", 0, 3), ("T", 4, 2)])

    spans = throughput.stats.spans("TOPIC_PUT_NUMS", "T", clock.monotonic())
    assert spans is not None
    assert {span.count for span in spans} == {4}
    other = throughput.stats.spans("TOPIC_PUT_NUMS", "U", clock.monotonic())
    assert other is not None
    assert {span.count for span in other} == {3}
    assert throughput.put == 7


def test_recreated_topic_begins_at_zero() -> None:
    clock = ManualClock()
    throughput = Throughput(clock, StateTables(queues={("T", 0): QueueBounds(0, 5)}))
    throughput.on_applied([("T", 0, 2)])
    throughput.on_applied([("T", 0, 6)])
    spans = throughput.stats.spans("TOPIC_PUT_NUMS", "T", clock.monotonic())
    assert spans is not None
    assert {span.count for span in spans} == {1}


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
