"""What the leader has in flight counts until it is applied or lost."""

from operator import attrgetter

import pytest

from dledger.group_api import Proposed
from dledger.services.pending_configs import PendingConfigs, TopicView
from dledger.settings.tables import BrokerTable
from dledger.state.state_record import TopicsChange
from dledger.state.topics import TopicConfig
from tests.harness.fake_group import FakeGroup

OLD, NEW = TopicConfig("T", 1, 1), TopicConfig("T", 2, 2)


@pytest.fixture
def pending(group: FakeGroup) -> PendingConfigs[TopicConfig]:
    return PendingConfigs(group, group.state.topic_config, attrgetter("topic"))


def test_the_newest_change_in_flight_wins(
    group: FakeGroup, pending: PendingConfigs[TopicConfig]
) -> None:
    first = pending.put("T", OLD)
    second = pending.put("T", NEW)
    assert pending.resolve("T") == NEW
    group.store(TopicsChange(put=(OLD,)))
    first(Proposed("stored", index=1))
    assert pending.resolve("T") == NEW
    second(Proposed("not_stored"))
    assert pending.resolve("T") == OLD
    assert len(pending) == 0


def test_what_is_applied_is_in_flight_no_more(
    group: FakeGroup, pending: PendingConfigs[TopicConfig]
) -> None:
    """The limit of a table counts it: a name that is never asked about again must not stay."""
    first, _ = pending.put("T", OLD), pending.put("U", TopicConfig("U", 1, 1))
    assert len(pending) == 2
    group.store(TopicsChange(put=(OLD,)))
    first(Proposed("stored", index=1))
    assert len(pending) == 1
    assert pending.resolve("U") == TopicConfig("U", 1, 1)


def test_removal_counts_until_applied_though_made_again(
    group: FakeGroup, pending: PendingConfigs[TopicConfig]
) -> None:
    group.store(TopicsChange(put=(OLD,)))
    removed, made = pending.put("T", None), pending.put("T", OLD)
    assert (pending.removes("T"), pending.resolve("T")) == (True, OLD)
    group.store(TopicsChange(delete=("T",)))
    removed(Proposed("stored", index=2))
    assert (pending.removes("T"), len(pending)) == (False, 1)
    made(Proposed("stored", index=3))
    assert len(pending) == 0


def test_change_that_is_not_stored_forgets_none_before_it(
    group: FakeGroup, pending: PendingConfigs[TopicConfig]
) -> None:
    group.store(TopicsChange(put=(OLD,)))
    removed, made = pending.put("T", None), pending.put("T", NEW)
    made(Proposed("not_stored"))
    assert (pending.removes("T"), pending.resolve("T")) == (True, None)
    removed(Proposed("not_stored"))
    assert (len(pending), pending.resolve("T")) == (0, OLD)


def test_only_a_leader_has_changes_in_flight(
    group: FakeGroup, pending: PendingConfigs[TopicConfig]
) -> None:
    group.store(TopicsChange(put=(OLD,)))
    pending.put("T", None)
    group.step_down()
    assert not pending.removes("T")
    assert pending.resolve("T") == OLD


def test_topics_are_made_after_the_default_topic_only(group: FakeGroup) -> None:
    view = TopicView(group, BrokerTable())
    made = view.to_create("New", "TBW102", 4)
    assert made == TopicConfig("New", 4, 4, 6)
    assert view.to_create("New", "BenchmarkTest", 4) is None
    assert view.to_create("New", "Nowhere", 4) is None
    assert view.to_create("New", "TBW102", -1) == TopicConfig("New", 1, 1, 6)
    view.pending.put("%RETRY%g", None)
    assert view.to_create("%RETRY%g", "TBW102", 4) is None
    assert view.to_create("%DLQ%g", "TBW102", 4) == TopicConfig("%DLQ%g", 1, 1, 6)
