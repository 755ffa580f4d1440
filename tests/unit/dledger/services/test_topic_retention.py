"""A topic that keeps its messages for a time of its own: its queues begin later."""

from __future__ import annotations

import pytest

from commitlog.errors import InvariantBroken
from dledger.services.retention import RetentionService, RetentionSettings
from dledger.services.topic_retention import queue_floors, retention_ms
from dledger.state.state_record import QueueFloorsChange, TopicsChange, state_batch
from dledger.state.topic_config import TopicConfig
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker
from tests.harness.fake_group import SEGMENT_BYTES, FakeGroup, ManualClock

HOUR_MS = 3_600_000


def make_topic(group: FakeGroup, topic: str, **attributes: str) -> None:
    config = TopicConfig(topic, 2, 2, attributes=attributes)
    group.propose(state_batch(TopicsChange(put=(config,))), lambda _: None)
    group.settle()


def fill(group: FakeGroup, clock: ManualClock, topic: str) -> None:
    """Store a message an hour, five in queue 0 and two in queue 1."""
    for hour in range(5):
        group.put(topic, 0, b"%d" % hour)
        if hour < 2:
            group.put(topic, 1, b"%d" % hour)
        clock.now_s += 3600


@pytest.mark.parametrize(
    ("attributes", "keeps_ms"), [({}, None), ({"retention.ms": "5"}, 5), ({"other": "x"}, None)]
)
def test_what_attributes_say(attributes: dict[str, str], keeps_ms: int | None) -> None:
    assert retention_ms(attributes) == keeps_ms


@pytest.mark.parametrize("value", ["", "0", "-1", "1h", "1.5", "٣", "9" * 20])
def test_what_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"retention\.ms is a number"):
        retention_ms({"retention.ms": value})


def test_queues_begin_with_their_first_message_that_is_new_enough(
    group: FakeGroup, clock: ManualClock
) -> None:
    make_topic(group, "T", **{"retention.ms": str(3 * HOUR_MS)})
    make_topic(group, "kept")
    fill(group, clock, "T")
    fill(group, clock, "kept")
    now_ms = clock.wall_ms() - 5 * HOUR_MS
    assert queue_floors(group, now_ms, is_deleting=lambda _: False) == QueueFloorsChange(
        (("T", 0, 2), ("T", 1, 2)), now_ms, (("T", 3 * HOUR_MS),)
    )
    assert queue_floors(group, now_ms, is_deleting=lambda topic: topic == "T") is None
    assert queue_floors(group, now_ms - 3 * HOUR_MS, is_deleting=lambda _: False) is None


async def test_the_leader_moves_them_and_readers_see_it(
    group: FakeGroup, clock: ManualClock
) -> None:
    make_topic(group, "T", **{"retention.ms": str(3 * HOUR_MS)})
    fill(group, clock, "T")
    service = RetentionService(
        group,
        lambda: group.log,
        RetentionSettings(segment_bytes=SEGMENT_BYTES),
        clock=clock,
        levels=0,
        saved_index=lambda: 0,
        disk_ratio=lambda: 0.0,
    )
    await service.check_topics()
    assert [group.state.min_offset("T", queue) for queue in (0, 1)] == [2, 2]
    index = group.state.applied_index
    await service.check_topics()
    assert group.state.applied_index == index  # nothing new, no entry
    broker = Broker(group, clock)
    pull = {
        "consumerGroup": "g", "topic": "T", "queueId": "0", "queueOffset": "1", "maxMsgNums": "8",
        "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0",
        "subscription": "*",
    }  # fmt: skip
    answer = broker.call(RequestCode.PULL_MESSAGE, pull)
    assert answer.code == 21
    assert answer.ext["minOffset"] == "2"


def test_a_queue_never_begins_behind_its_end(group: FakeGroup) -> None:
    group.put("T", 0, b"x")
    group.propose(state_batch(QueueFloorsChange((("T", 0, 2),))), lambda _: None)
    with pytest.raises(InvariantBroken, match="begin at 2"):
        group.settle()


def test_the_attribute_is_checked_when_it_is_set(group: FakeGroup, clock: ManualClock) -> None:
    broker = Broker(group, clock)
    fields = {
        "topic": "T", "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "order": "false",
    }  # fmt: skip
    refused = broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "attributes": "+retention.ms=soon"}
    )
    assert (refused.code, refused.ext["outcome"]) == (1, "not_stored")
    assert "retention.ms" in (refused.remark or "")
    taken = broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC, {**fields, "attributes": "+retention.ms=1000"}
    )
    assert taken.code == 0
