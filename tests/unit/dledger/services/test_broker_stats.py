"""Counts over a minute, an hour and a day."""

from __future__ import annotations

from dledger.services.throughput import MAX_PAIRS, BrokerStats


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
    for number in range(MAX_PAIRS + 1):
        stats.count_got("T", f"g{number}", 1)
    stats.count_got("T", "g0", 1)
    assert stats.spans("GROUP_GET_NUMS", f"T@g{MAX_PAIRS}", 1.0) is None
    first = stats.spans("GROUP_GET_NUMS", "T@g0", 1.0)
    assert first is not None
    stats.copy_counters(1.0)
    stats.count_got("T", "g0", 5)
    assert [span.count for span in stats.spans("GROUP_GET_NUMS", "T@g0", 2.0) or ()] == [5, 5, 5]
