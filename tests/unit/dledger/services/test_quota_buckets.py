"""Buckets of quotas: what one request does to the next, and what is kept of how many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.services import quota_buckets
from dledger.services.quota_buckets import (
    PASSES,
    RECEIVE_DELAY_MAX_S,
    SEND_DELAY_MAX_S,
    Cost,
    QuotaBuckets,
    Verdict,
)
from dledger.state.quotas import QuotaConfig

KEY = "account:orders"
TEN = QuotaConfig("account", "orders", sent_messages_per_s=10)


def send(buckets: QuotaBuckets, messages: int, now_s: float, key: str = KEY) -> Verdict:
    return buckets.send(key, TEN, Cost(messages, 0), now_s)


def test_a_burst_passes_then_answers_wait_then_sends_are_refused() -> None:
    buckets = QuotaBuckets()
    assert [send(buckets, 1, 5.0) for _ in range(10)] == [PASSES] * 10
    delays = [send(buckets, 1, 5.0).delay_s for _ in range(10)]
    assert delays == pytest.approx([number / 10 for number in range(1, 11)])
    refused = send(buckets, 1, 5.0)
    assert not refused.passes
    assert refused.delay_s == SEND_DELAY_MAX_S
    assert refused.retry_after_s == 0, "at the end of its delay it would pass"
    assert send(buckets, 1, 5.101).passes
    figures = buckets.figures[KEY]
    assert figures.refused == 1
    assert figures.throttled_s == pytest.approx(5.5 + 2 * SEND_DELAY_MAX_S, abs=0.01)


def test_a_refused_send_is_not_counted() -> None:
    buckets = QuotaBuckets()
    send(buckets, 20, 0.0)
    for _ in range(50):
        assert not send(buckets, 5, 0.0).passes
    assert send(buckets, 5, 0.5).passes


def test_a_rate_after_idle_time_begins_with_one_burst() -> None:
    buckets = QuotaBuckets()
    send(buckets, 10, 0.0)
    assert send(buckets, 10, 3600.0) == PASSES
    assert send(buckets, 1, 3600.0).delay_s == pytest.approx(0.1)


def test_a_batch_larger_than_the_quota_passes_once() -> None:
    buckets = QuotaBuckets()
    assert send(buckets, 100, 0.0) == Verdict(True, SEND_DELAY_MAX_S)
    again = send(buckets, 100, 0.0)
    assert not again.passes
    at_s = again.delay_s + again.retry_after_s
    assert at_s == pytest.approx(10.0), "when the first one has had its share"
    assert not send(buckets, 100, at_s - 0.01).passes
    assert send(buckets, 100, at_s + 0.01).passes


def test_the_slower_limit_decides() -> None:
    quota = QuotaConfig("client", "", sent_messages_per_s=100, sent_bytes_per_s=1000)
    buckets = QuotaBuckets()
    assert buckets.send(KEY, quota, Cost(1, 1500), 0.0).delay_s == pytest.approx(0.5)
    assert not buckets.send(KEY, quota, Cost(1, 1500), 0.0).passes
    only_messages = QuotaConfig("client", "", sent_messages_per_s=100)
    assert buckets.send(KEY, only_messages, Cost(1, 1500), 0.0) == PASSES


def test_a_limit_that_is_not_set_costs_no_bucket() -> None:
    buckets = QuotaBuckets()
    quota = QuotaConfig("client", "", received_bytes_per_s=5)
    assert buckets.send(KEY, quota, Cost(10**6, 10**9), 0.0) == PASSES
    assert buckets.receive(KEY, TEN, 0.0) == PASSES
    assert (len(buckets), buckets.figures) == (0, {})


def test_a_changed_rate_counts_from_the_next_request_on() -> None:
    """A batch under a quota of one a second would have to wait for half an hour."""
    buckets = QuotaBuckets()
    slower = QuotaConfig("account", "orders", sent_messages_per_s=1)
    assert buckets.send(KEY, slower, Cost(2000, 0), 0.0).passes
    assert not buckets.send(KEY, slower, Cost(1, 0), 1.0).passes
    assert not buckets.send(KEY, replace(slower), Cost(1, 0), 1.0).passes, "the same again"
    faster = QuotaConfig("account", "orders", sent_messages_per_s=1000)
    assert buckets.send(KEY, faster, Cost(100, 0), 1.0).delay_s == pytest.approx(0.1)
    assert buckets.send(KEY, faster, Cost(100, 0), 1.0).delay_s == pytest.approx(0.2)


def test_pulls_wait_for_what_was_given_before() -> None:
    quota = QuotaConfig("client", "", received_messages_per_s=10)
    buckets = QuotaBuckets()
    assert buckets.receive(KEY, quota, 0.0) == PASSES
    buckets.received(KEY, quota, Cost(32, 3200), 0.0)
    refused = buckets.receive(KEY, quota, 0.0)
    assert (refused.passes, refused.delay_s) == (False, RECEIVE_DELAY_MAX_S)
    held = buckets.receive(KEY, quota, 1.0)
    assert held.passes
    assert held.delay_s == pytest.approx(1.2)
    assert buckets.receive(KEY, quota, 2.3) == PASSES


def test_the_bucket_used_longest_ago_is_forgotten() -> None:
    buckets = QuotaBuckets(buckets_max=2)
    send(buckets, 20, 0.0, "client:a")
    send(buckets, 20, 0.0, "client:b")
    assert send(buckets, 1, 0.0, "client:a").passes is False
    send(buckets, 20, 0.0, "client:c")
    assert len(buckets) == 2
    assert send(buckets, 1, 0.0, "client:a").passes is False, "used after b"
    assert send(buckets, 1, 0.0, "client:b") == PASSES, "was forgotten"


def test_figures_of_later_names_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_buckets, "NAMES_COUNTED_MAX", 2)
    buckets = QuotaBuckets()
    for name in ("a", "b", "c", "d"):
        send(buckets, 20, 0.0, f"client:{name}")
        send(buckets, 20, 0.0, f"client:{name}")
    assert {key: found.refused for key, found in buckets.figures.items()} == {
        "client:a": 1,
        "client:b": 1,
        "": 2,
    }


def test_connections_are_counted_up_to_the_limit() -> None:
    quota = QuotaConfig("account", "orders", connections=2)
    buckets = QuotaBuckets()
    assert [buckets.connect(KEY, quota) for _ in range(3)] == [True, True, False]
    assert dict(buckets.connections) == {KEY: 2}
    buckets.disconnect(KEY)
    assert buckets.connect(KEY, quota)
    buckets.disconnect(KEY)
    buckets.disconnect(KEY)
    assert dict(buckets.connections) == {}, "nothing is kept of what has ended"
    assert buckets.figures[KEY].refused == 1
