"""What came in and went out, counted."""

from __future__ import annotations

import numpy as np

from commitlog.queue_unit import UNIT_DTYPE
from dledger.metrics.traffic import MAX_COUNTERS, MAX_KNOWN_LEFT_OUT, Count, Counters, Traffic
from dledger.state.apply import QueueUnits


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
    assert list(traffic.given.counts) == [("T", "unknown")], "there is room"
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
