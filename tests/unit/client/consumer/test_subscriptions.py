"""What a consumer wants of its topics."""

from __future__ import annotations

import pytest

from dledger.client.consumer.subscriptions import SubscriptionExpression, Subscriptions
from dledger.client.core.errors import SubscriptionIllegalError
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.java_hash import tags_code
from dledger.commitlog.record import encode_record
from dledger.testing.doubles import EPOCH_MS, ManualClock


def test_every_change_is_newer_also_when_the_clock_goes_back() -> None:
    clock = ManualClock()
    subscriptions = Subscriptions(clock)
    subscriptions.put("T", "a || b")
    clock.skew_ms = -500
    subscriptions.put("U", SubscriptionExpression.by_sql("x > 1"))
    first, second = subscriptions.data()
    assert (first.topic, first.tags_set, first.sub_version) == ("T", ["a", "b"], EPOCH_MS)
    assert (second.expression_type, second.sub_version) == ("SQL92", EPOCH_MS + 1)
    subscriptions.put("T")
    (changed, _) = subscriptions.data()
    assert (changed.sub_string, changed.sub_version) == ("*", EPOCH_MS + 2)


def test_what_is_removed_is_not_wanted() -> None:
    subscriptions = Subscriptions(ManualClock())
    subscriptions.put("T")
    assert (list(subscriptions), len(subscriptions)) == (["T"], 1)
    assert subscriptions.get("T") == SubscriptionExpression()
    assert subscriptions.remove("T")
    assert not subscriptions.remove("T")
    assert subscriptions.get("T") is None


def message(tag: str) -> MessageExt:
    properties = f"TAGS\x01{tag}\x02".encode() if tag else b""
    return MessageExt(
        memoryview(encode_record(topic="T", queue_id=0, body=b"x", properties=properties)), 0
    )


@pytest.mark.parametrize("text", ["", "*"])
def test_everything_is_the_default(text: str) -> None:
    assert SubscriptionExpression.by_tag(text) == SubscriptionExpression()
    data = SubscriptionExpression.by_tag(text).subscription_data("T")
    assert (data.sub_string, data.tags_set, data.code_set) == ("*", [], [])
    assert data.expression_type == "TAG"
    assert SubscriptionExpression().admits(message("A"))
    assert SubscriptionExpression().admits(message(""))


def test_tags_are_cut_at_the_bars() -> None:
    wanted = SubscriptionExpression.by_tag(" A||  B b || ")
    assert wanted.tags == {"A", "B b"}
    data = wanted.subscription_data("T", 7)
    assert data.topic == "T"
    assert data.sub_string == "A || B b"
    assert data.tags_set == ["A", "B b"]
    assert data.code_set == [tags_code("A"), tags_code("B b")]
    assert (data.sub_version, data.expression_type, data.class_filter_mode) == (7, "TAG", False)


def test_bars_without_a_tag_are_refused() -> None:
    with pytest.raises(SubscriptionIllegalError, match="no tag"):
        SubscriptionExpression.by_tag(" || ")


def test_the_tag_counts_and_not_its_hash() -> None:
    assert tags_code("Aa") == tags_code("BB")
    wanted = SubscriptionExpression.by_tag("Aa")
    assert [wanted.admits(message(tag)) for tag in ("Aa", "BB", "")] == [True, False, False]


def test_an_sql_expression_is_for_the_broker_to_judge() -> None:
    wanted = SubscriptionExpression.by_sql("a > 5")
    assert wanted.is_sql
    assert not SubscriptionExpression.by_tag("a").is_sql
    assert wanted.admits(message("")), "the broker's word is final"
    data = wanted.subscription_data("T", 3)
    assert (data.sub_string, data.expression_type, data.sub_version) == ("a > 5", "SQL92", 3)
    assert (data.tags_set, data.code_set) == ([], [])


def test_a_blank_sql_expression_is_refused() -> None:
    with pytest.raises(SubscriptionIllegalError, match="blank"):
        SubscriptionExpression.by_sql(" \n")
