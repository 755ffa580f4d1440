"""What came in and went out, counted.

Rates and day totals; what a topic got is summed up as it comes, without reading all queues.

Counts over a minute, an hour and a day.
"""

import numpy as np

from dledger.commitlog.queue_unit import UNIT_DTYPE
from dledger.services.throughput import (
    DAY_MS,
    MAX_COUNTERS,
    MAX_KNOWN_LEFT_OUT,
    BrokerStats,
    Count,
    Counters,
    DayCounts,
    Throughput,
    Traffic,
)
from dledger.state.apply import QueueUnits
from dledger.state.tables import QueueBounds, StateTables
from dledger.testing.doubles import ManualClock
from tests.harness.present import present


def units(topic: str, *sizes: int) -> QueueUnits:
    made = np.zeros(len(sizes), UNIT_DTYPE)
    made["size"] = sizes
    return QueueUnits(topic, 0, 0, made)


def test_a_leader_counts_what_it_applies_and_a_follower_does_not() -> None:
    leads = True
    traffic = Traffic(lambda: leads)
    traffic.on_units([units("A", 100, 200), units("B", 7)])
    traffic.on_units([units("A", 1)])
    leads = False
    traffic.on_units([units("A", 1_000)])
    assert traffic.taken.counts == {"A": Count(3, 301), "B": Count(1, 7)}


def test_large_messages_do_not_overflow() -> None:
    traffic = Traffic(lambda: True)
    traffic.on_units([units("A", *[2**31 - 1] * 3)])
    assert traffic.taken.counts["A"].size_bytes == 3 * (2**31 - 1)


def test_traffic_counts_a_bounded_number_of_keys() -> None:
    counters: Counters[int] = Counters()
    for key in range(MAX_COUNTERS + MAX_KNOWN_LEFT_OUT + 5):
        counters.add(key, 1, 10)
        counters.add(key, 1, 10)
    assert len(counters.counts) == MAX_COUNTERS
    assert len(counters.left_out) == MAX_KNOWN_LEFT_OUT
    assert counters.counts[0] == Count(2, 20)


def test_deleted_keys_free_their_place() -> None:
    traffic = Traffic(lambda: True)
    traffic.count_given("T", "unknown", 1, 1)
    traffic.keep(lambda _: True, lambda group: group != "unknown")
    assert list(traffic.given.counts) == [("T", "unknown")], "there is space"
    for number in range(MAX_COUNTERS - 1):
        traffic.count_given(f"T{number}", "g", 1, 1)
    traffic.count_given("T", "g", 1, 1)
    traffic.count_given("T", "gone", 1, 1)
    assert list(traffic.given.left_out) == [("T", "g"), ("T", "gone")]
    traffic.keep(lambda topic: topic != "T0", lambda group: group == "g")
    assert list(traffic.given.left_out) == [("T", "g")]
    assert not {("T0", "g"), ("T", "unknown")} & traffic.given.counts.keys()
    traffic.count_given("T", "g", 2, 5)
    assert traffic.given.counts[("T", "g")] == Count(2, 5)


def test_topic_counts_all_its_queues() -> None:
    tables = StateTables()
    tables.queues |= {("T", 0): QueueBounds(0, 5), ("T", 1): QueueBounds(2, 7)}
    tables.index()
    clock = ManualClock()
    throughput = Throughput(clock, tables)

    throughput.on_applied([("T", 1, 9), ("U", 0, 3), ("T", 4, 2)])

    spans = present(throughput.stats.spans("TOPIC_PUT_NUMS", "T", clock.monotonic()))
    assert {span.count for span in spans} == {4}
    other = present(throughput.stats.spans("TOPIC_PUT_NUMS", "U", clock.monotonic()))
    assert {span.count for span in other} == {3}
    assert throughput.put == 7


def test_recreated_topic_begins_at_zero() -> None:
    clock = ManualClock()
    tables = StateTables()
    tables.queues["T", 0] = QueueBounds(0, 5)
    tables.index()
    throughput = Throughput(clock, tables)
    throughput.on_applied([("T", 0, 2)])
    throughput.on_applied([("T", 0, 6)])
    spans = present(throughput.stats.spans("TOPIC_PUT_NUMS", "T", clock.monotonic()))
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


def test_each_span_counts_from_its_oldest_copy() -> None:
    ends = {"T": 150}
    stats = BrokerStats(lambda: ends)
    for second in range(2 * 3600 + 1):
        stats.copy_counters(float(second))
        ends["T"] += 1
    now = 2 * 3600.0
    minute, hour, day = stats.spans("TOPIC_PUT_NUMS", "T", now) or ()
    assert (minute.count, minute.seconds) == (61, 60.0)
    assert (hour.count, hour.seconds) == (3601, 3600.0)
    assert (day.count, day.seconds) == (7201, 7200.0)
    assert minute.per_second == 61 / 60


def test_recreated_topic_never_counts_backwards() -> None:
    ends = {"T": 100}
    stats = BrokerStats(lambda: ends)
    stats.copy_counters(0.0)
    ends["T"] = 3
    assert [span.count for span in stats.spans("TOPIC_PUT_NUMS", "T", 5.0) or ()] == [0, 0, 0]


def test_pairs_beyond_the_limit_are_not_counted() -> None:
    stats = BrokerStats(dict)
    for number in range(MAX_COUNTERS + 1):
        stats.got.add(("T", f"g{number}"), 1, 0)
    stats.got.add(("T", "g0"), 1, 0)
    assert stats.spans("GROUP_GET_NUMS", f"T@g{MAX_COUNTERS}", 1.0) is None
    present(stats.spans("GROUP_GET_NUMS", "T@g0", 1.0))
    stats.copy_counters(1.0)
    stats.got.add(("T", "g0"), 5, 0)
    assert [span.count for span in stats.spans("GROUP_GET_NUMS", "T@g0", 2.0) or ()] == [5, 5, 5]
