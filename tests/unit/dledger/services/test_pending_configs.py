"""What the leader has in flight counts until it is applied or lost."""

from __future__ import annotations

from dledger.group_api import Proposed
from dledger.services.pending_configs import PendingConfigs, TopicView
from dledger.state.topic_config import TopicConfig
from tests.harness.fake_group import FakeGroup

OLD, NEW = TopicConfig("T", 1, 1), TopicConfig("T", 2, 2)


def test_the_newest_change_in_flight_wins() -> None:
    pending: PendingConfigs[TopicConfig] = PendingConfigs(lambda: 0)
    first = pending.put("T", OLD)
    second = pending.put("T", NEW)
    assert pending.resolve("T", None) == NEW
    first(Proposed("stored", index=0))
    assert pending.resolve("T", OLD) == NEW
    second(Proposed("unknown"))
    assert pending.resolve("T", OLD) == OLD
    assert len(pending) == 0


def test_a_change_answered_before_its_apply_counts_until_then() -> None:
    applied = 4
    pending: PendingConfigs[TopicConfig] = PendingConfigs(lambda: applied)
    pending.delete("T")(Proposed("stored", index=5))
    assert pending.is_deleting("T")
    assert pending.resolve("T", OLD) is None
    applied = 5
    assert not pending.is_deleting("T")
    assert pending.resolve("T", NEW) == NEW


def test_topics_are_made_after_the_default_topic_only(group: FakeGroup) -> None:
    view = TopicView(group, auto_create_topic_enable=True, auto_create_group_enable=True)
    made = view.to_create("New", "TBW102", 4)
    assert made == TopicConfig("New", 4, 4, 6)
    assert view.to_create("New", "BenchmarkTest", 4) is None
    assert view.to_create("New", "Nowhere", 4) is None
    assert view.to_create("New", "TBW102", -1) == TopicConfig("New", 1, 1, 6)
    view.pending.delete("%RETRY%g")
    assert view.to_create("%RETRY%g", "TBW102", 4) is None
    assert view.to_create("%DLQ%g", "TBW102", 4) == TopicConfig("%DLQ%g", 1, 1, 6)
