"""How far groups are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dledger.state.state_record import ConsumerOffsetsChange, state_batch
from dledger.testing.clocks import EPOCH_MS, ManualClock
from remoting.protocol.bodies import (
    ConsumerData,
    ConsumeStats,
    ConsumeStatsList,
    HeartbeatData,
    MessageQueue,
    QueryConsumeTimeSpanBody,
    SubscriptionData,
)
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, LEADER

Q0, Q1 = MessageQueue("T", BROKER, 0), MessageQueue("T", BROKER, 1)


@pytest.fixture
def filled(broker: Broker) -> Broker:
    assert isinstance(broker.clock, ManualClock)
    broker.make_topic("T", 2)
    broker.make_topic("U", 1)
    for _ in range(4):
        broker.group.put("T", 0, b"x")
        broker.clock.now_s += 10
    offsets = (
        ("g", "T", 0, 2),
        ("g", "U", 0, 0),
        ("h", "T", 0, 4),
        ("h", "T", 1, 0),
    )
    broker.group.propose(state_batch(ConsumerOffsetsChange(offsets)), lambda _: None)
    broker.group.settle()
    return broker


def stats(broker: Broker, group: str = "g", **more: Any) -> ConsumeStats:
    answer = broker.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": group, **more})
    assert answer.code == 0, answer.remark
    return ConsumeStats.decode(answer.body)


def test_a_groups_progress_is_shown_for_every_queue(filled: Broker) -> None:
    table = stats(filled).offset_table
    assert set(table) == {Q0, Q1, MessageQueue("U", BROKER, 0)}
    progress = table[Q0]
    assert (progress.broker_offset, progress.consumer_offset) == (4, 2)
    assert progress.last_timestamp == EPOCH_MS + 10_000
    assert (table[Q1].broker_offset, table[Q1].consumer_offset) == (0, 0)
    assert table[Q1].last_timestamp == 0


def test_pending_commits_of_this_leader_count(filled: Broker) -> None:
    filled.processors.offsets.commit("g", "T", 0, 3)
    assert stats(filled).offset_table[Q0].consumer_offset == 3


def test_topics_are_chosen(filled: Broker) -> None:
    assert set(stats(filled, topic="T").offset_table) == {Q0, Q1}
    assert set(stats(filled, topicList="T;nowhere;").offset_table) == {Q0, Q1}
    assert stats(filled, topic="nowhere").offset_table == {}
    assert stats(filled, group="nobody").offset_table == {}
    assert set(stats(filled, group="nobody", topic="T").offset_table) == {Q0, Q1}


def test_topics_an_online_group_no_longer_wants_are_left_out(filled: Broker) -> None:
    data = ConsumerData("g", subscription_data_set=[SubscriptionData("U")])
    body = HeartbeatData(client_id="c", consumer_data_set=[data])
    filled.call(RequestCode.HEART_BEAT, {}, body.encode())
    filled.group.settle()
    assert {queue.topic for queue in stats(filled).offset_table} == {"U"}


async def test_all_groups_of_a_broker_are_shown(filled: Broker) -> None:
    asked = request(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
    answer = await filled.handle(asked)
    assert isinstance(answer, RemotingCommand)
    body = ConsumeStatsList.decode(answer.body)
    assert [list(item) for item in body.consume_stats_list] == [["g"], ["h"]]
    assert len(body.consume_stats_list[0]["g"]) == 2, "one for each topic"
    assert (body.broker_addr, body.total_diff) == (LEADER, 2)
    answer = await filled.handle(request(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "true"}))
    assert ConsumeStatsList.decode(answer.body).consume_stats_list == []


def test_how_late_a_group_is(filled: Broker) -> None:
    answer = filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "g"})
    spans = QueryConsumeTimeSpanBody.decode(answer.body).consume_time_span_set
    assert [span.message_queue for span in spans] == [Q0, Q1]
    full, empty = spans
    assert (full.min_time_stamp, full.max_time_stamp) == (EPOCH_MS, EPOCH_MS + 30_000)
    assert (full.consume_time_stamp, full.delay_time) == (EPOCH_MS + 10_000, 20_000)
    assert (empty.min_time_stamp, empty.max_time_stamp, empty.delay_time) == (0, 0, 0)
    names = set(json.loads(bytes(answer.body))["consumeTimeSpanSet"][0])
    assert names == {
        "messageQueue", "minTimeStamp", "maxTimeStamp", "consumeTimeStamp", "delayTime"
    }  # fmt: skip
    late = filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "h"})
    caught_up = QueryConsumeTimeSpanBody.decode(late.body).consume_time_span_set[0]
    assert (caught_up.consume_time_stamp, caught_up.delay_time) == (EPOCH_MS + 30_000, 0)


def test_an_unknown_topic_is_told(filled: Broker) -> None:
    ext = {"topic": "nowhere", "group": "g"}
    assert filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, ext).code == 17


async def test_only_the_leader_says_so(filled: Broker) -> None:
    filled.group.step_down("10.0.0.2:10911")
    answers = [
        filled.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"}),
        filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "g"}),
        await filled.handle(request(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})),
    ]
    assert [answer.code for answer in answers] == [14, 14, 14]
