"""The units of a queue, and who would get them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commitlog.properties import encode_properties
from dledger.processors import queries
from remoting.protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    QueryConsumeQueueResponseBody,
    SubscriptionData,
)
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker


def view(broker: Broker, **changes: Any) -> QueryConsumeQueueResponseBody:
    ext = {"topic": "T", "queueId": "0", "index": "0", "count": "10", **changes}
    answer = broker.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert answer.code == 0, answer.remark
    return QueryConsumeQueueResponseBody.decode(answer.body)


def subscribe(broker: Broker, data: SubscriptionData) -> None:
    body = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData("g", subscription_data_set=[data])]
    )
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode()).code == 0
    broker.group.settle()


@pytest.fixture
def filled(broker: Broker) -> Broker:
    broker.make_topic("T", 4)
    for i in range(5):
        properties = encode_properties({"n": str(i), "TAGS": "AB"[i % 2]})
        broker.group.put("T", 0, b"m%d" % i, properties=properties)
    return broker


def test_units_are_shown_as_they_stand(filled: Broker) -> None:
    body = view(filled, index="1", count="2")
    units = filled.group.queues.queue("T", 0).read(1, 2)
    assert [(u.physic_offset, u.physic_size, u.tags_code) for u in body.queue_data] == [
        tuple(unit) for unit in units.tolist()
    ]
    assert (body.min_queue_index, body.max_queue_index) == (0, 5)
    assert body.subscription_data is None
    assert all(unit.eval for unit in body.queue_data)


def test_ranges_outside_the_queue_give_what_there_is(filled: Broker) -> None:
    assert len(view(filled, index="-5", count="100").queue_data) == 5
    assert view(filled, index="5").queue_data == []
    assert view(filled, index="9").queue_data == []
    assert view(filled, count="0").queue_data == []
    assert view(filled, count="-1").queue_data == []


def test_the_number_of_units_is_limited(filled: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_UNITS", 3)
    assert len(view(filled).queue_data) == 3


def test_a_group_with_tags_is_asked(filled: Broker) -> None:
    subscribe(filled, SubscriptionData("T", "A"))
    body = view(filled, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [True, False, True, False, True]
    assert body.subscription_data is not None
    assert body.subscription_data.sub_string == "A"
    assert body.filter_data is None


def test_a_group_with_an_expression_is_asked(filled: Broker) -> None:
    subscribe(filled, SubscriptionData("T", "n > 2", expression_type="SQL92"))
    body = view(filled, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [False, False, False, True, True]
    assert body.filter_data == "n > 2"


def test_an_expression_that_is_none_is_said_with_each_unit(filled: Broker) -> None:
    subscribe(filled, SubscriptionData("T", "n >", expression_type="SQL92"))
    body = view(filled, consumerGroup="g")
    assert [unit.eval for unit in body.queue_data] == [False] * 5
    assert "ends too early" in (body.queue_data[0].msg or "")


def test_the_body_is_rocketmqs(filled: Broker) -> None:
    ext = {"topic": "T", "queueId": "0", "index": "0", "count": "1"}
    body = json.loads(bytes(filled.call(RequestCode.QUERY_CONSUME_QUEUE, ext).body))
    assert set(body) == {"queueData", "minQueueIndex", "maxQueueIndex"}
    assert set(body["queueData"][0]) == {"physicOffset", "physicSize", "tagsCode", "eval"}


def test_a_queue_nobody_has_is_told(filled: Broker) -> None:
    ext = {"topic": "T", "queueId": "3", "index": "0", "count": "1"}
    answer = filled.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert (answer.code, answer.remark) == (1, "3@T is not exist!")
    filled.group.step_down("10.0.0.2:10911")
    answer = filled.call(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert (answer.code, answer.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
