"""Quotas: what passes is bounded by the rate, and a client below its quota never waits."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.services.quota_buckets import (
    BURST_S,
    RECEIVE_DELAY_MAX_S,
    SEND_DELAY_MAX_S,
    Cost,
    QuotaBuckets,
)
from dledger.state.quotas import QuotaConfig
from tests.harness.extent import examples

KEY = "account:orders"

rates = st.one_of(st.none(), st.integers(1, 2_000))
gaps_s = st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.4, 1.0, 3.0, 30.0])
requests = st.lists(
    st.tuples(gaps_s, st.integers(0, 50), st.integers(0, 5_000)), min_size=1, max_size=60
)


def assert_bounded(passed: list[tuple[float, int]], rate: int, delay_max_s: float) -> None:
    """Between any two of them no more passed than the rate, one larger one set apart."""
    for first in range(len(passed)):
        total = 0
        for at_s, cost in passed[first:]:
            spread_s = at_s - passed[first][0]
            allowed = rate * (spread_s + BURST_S + delay_max_s)
            # One that is larger than what may pass at once, the last one here, passes alone.
            beside = cost if cost > rate * (BURST_S + delay_max_s) else 0
            total += cost
            assert total <= (allowed + beside) * (1 + 1e-9) + 1e-6


@given(rates, rates, requests)
@settings(max_examples=examples(300))
def test_no_more_is_sent_than_rate_times_time_and_burst(
    messages_per_s: int | None, bytes_per_s: int | None, sent: list[tuple[float, int, int]]
) -> None:
    quota = QuotaConfig("account", "orders", messages_per_s, bytes_per_s)
    buckets, now_s = QuotaBuckets(), 0.0
    messages: list[tuple[float, int]] = []
    sizes: list[tuple[float, int]] = []
    for gap_s, count, size in sent:
        now_s += gap_s
        verdict = buckets.send(KEY, quota, Cost(count, size), now_s)
        assert 0 <= verdict.delay_s <= SEND_DELAY_MAX_S
        if verdict.passes:
            messages.append((now_s, count))
            sizes.append((now_s, size))
    # A request that is too large by one of the limits counts against the other one, too.
    if messages_per_s is not None and bytes_per_s is None:
        assert_bounded(messages, messages_per_s, SEND_DELAY_MAX_S)
    if bytes_per_s is not None and messages_per_s is None:
        assert_bounded(sizes, bytes_per_s, SEND_DELAY_MAX_S)
    if messages_per_s is not None and bytes_per_s is not None:
        small = [
            (at_s, count)
            for (at_s, count), (_, size) in zip(messages, sizes, strict=True)
            if size <= bytes_per_s * (BURST_S + SEND_DELAY_MAX_S)
        ]
        assert_bounded(small, messages_per_s, SEND_DELAY_MAX_S)


@given(st.integers(1, 2_000), requests)
@settings(max_examples=examples(300))
def test_a_client_below_its_quota_never_waits(
    rate: int, sent: list[tuple[float, int, int]]
) -> None:
    """A bucket of tokens that is never empty: then there is nothing to wait for."""
    quota = QuotaConfig("account", "orders", rate, None, rate)
    buckets, now_s, tokens = QuotaBuckets(), 0.0, rate * BURST_S
    for gap_s, count, _ in sent:
        now_s += gap_s
        tokens = min(rate * BURST_S, tokens + gap_s * rate)
        cost = Cost(min(count, max(0, math.floor(tokens - 1e-6))), 0)
        tokens -= cost.messages
        verdict = buckets.send(KEY, quota, cost, now_s)
        assert verdict.passes
        assert verdict.delay_s < 1e-9
        assert buckets.receive(KEY, quota, now_s).delay_s < 1e-9
        buckets.received(KEY, quota, cost, now_s)


@given(st.integers(1, 500), st.lists(st.integers(0, 400), min_size=2, max_size=40))
@settings(max_examples=examples(200))
def test_a_puller_that_waits_gets_no_more_than_the_rate(rate: int, answers: list[int]) -> None:
    """One pull at a time: each waits until what was given before has had its share."""
    quota = QuotaConfig("client", "", None, None, rate)
    buckets, now_s = QuotaBuckets(), 0.0
    got: list[tuple[float, int]] = []
    for count in answers:
        verdict = buckets.receive(KEY, quota, now_s)
        while not verdict.passes:
            assert verdict.delay_s == RECEIVE_DELAY_MAX_S
            now_s += verdict.delay_s + verdict.retry_after_s + 1e-6
            verdict = buckets.receive(KEY, quota, now_s)
        now_s += verdict.delay_s
        buckets.received(KEY, quota, Cost(count, 0), now_s)
        got.append((now_s, count))
    for (_, before), (at_s, _) in pairwise(got):
        assert at_s - got[0][0] >= (before / rate) - BURST_S - 1e-6
    total = sum(count for _, count in got[:-1])
    assert total <= rate * (now_s + BURST_S) * (1 + 1e-9) + 1e-6


@given(
    st.integers(1, 100),
    st.lists(st.tuples(gaps_s, st.integers(1, 400)), min_size=1, max_size=40),
)
@settings(max_examples=examples(200))
def test_a_refused_send_passes_when_its_time_is_over(
    rate: int, sent: list[tuple[float, int]]
) -> None:
    quota = QuotaConfig("account", "orders", rate)
    buckets, now_s = QuotaBuckets(), 0.0
    for gap_s, count in sent:
        now_s += gap_s
        verdict = buckets.send(KEY, quota, Cost(count, 0), now_s)
        if not verdict.passes:
            now_s += verdict.delay_s + verdict.retry_after_s + 1e-6
            assert buckets.send(KEY, quota, Cost(count, 0), now_s).passes
