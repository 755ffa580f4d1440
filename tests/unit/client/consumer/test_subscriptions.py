"""Subscriptions have versions that only grow, whatever the clock does."""

from __future__ import annotations

import trio

from client.consumer.subscriptions import SubscriptionExpression, Subscriptions


class Clock:
    """A date that is set."""

    def __init__(self) -> None:
        self.now_ms = 1000

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError

    def time_out(self, seconds: float) -> trio.CancelScope:
        raise AssertionError


def test_every_change_is_newer_also_when_the_clock_goes_back() -> None:
    clock = Clock()
    subscriptions = Subscriptions(clock)
    subscriptions.put("T", "a || b")
    clock.now_ms = 500
    subscriptions.put("U", SubscriptionExpression.by_sql("x > 1"))
    first, second = subscriptions.data()
    assert (first.topic, first.tags_set, first.sub_version) == ("T", ["a", "b"], 1000)
    assert (second.expression_type, second.sub_version) == ("SQL92", 1001)
    subscriptions.put("T")
    (changed, _) = subscriptions.data()
    assert (changed.sub_string, changed.sub_version) == ("*", 1002)


def test_what_is_removed_is_not_wanted() -> None:
    subscriptions = Subscriptions(Clock())
    subscriptions.put("T")
    assert (list(subscriptions), len(subscriptions)) == (["T"], 1)
    assert subscriptions.get("T") == SubscriptionExpression()
    assert subscriptions.remove("T")
    assert not subscriptions.remove("T")
    assert subscriptions.get("T") is None
