"""Who is connected, as operators are told."""

from __future__ import annotations

import json
from typing import Any

from dledger.state.state_record import ConsumerOffsetsChange, state_batch
from remoting.protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection


def beat(broker: Broker, client_id: str, *topics: str, port: int = 1, group: str = "g") -> None:
    data = [SubscriptionData(topic, "A || B") for topic in topics]
    body = HeartbeatData(
        client_id=client_id,
        producer_data_set=[ProducerData("p")],
        consumer_data_set=[ConsumerData(group, subscription_data_set=data)],
    )
    connection = FakeConnection(peer_address=("10.0.0.7", port))
    assert broker.call(RequestCode.HEART_BEAT, {}, body.encode(), connection=connection).code == 0


def asked(broker: Broker, code: RequestCode, **ext: str) -> Any:
    response = broker.call(code, ext)
    return response.code if response.code else json.loads(bytes(response.body))


def commit(broker: Broker, *offsets: tuple[str, str, int, int]) -> None:
    broker.group.propose(state_batch(ConsumerOffsetsChange(offsets)), lambda _: None)
    broker.group.settle()


def test_the_consumers_of_a_group(broker: Broker) -> None:
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    assert asked(broker, code, consumerGroup="g") == 206
    beat(broker, "c1", "T", port=5)
    body = asked(broker, code, consumerGroup="g")
    assert body["connectionSet"] == [
        {"clientAddr": "10.0.0.7:5", "clientId": "c1", "language": "PYTHON", "version": 407}
    ]
    assert body["subscriptionTable"]["T"]["subString"] == "A || B"
    assert (body["consumeType"], body["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")


def test_the_producers_of_a_group(broker: Broker) -> None:
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    assert asked(broker, code, producerGroup="p") == 1
    beat(broker, "c1", port=5)
    beat(broker, "c2", port=6)
    body = asked(broker, code, producerGroup="p")
    assert [(c["clientId"], c["clientAddr"]) for c in body["connectionSet"]] == [
        ("c1", "10.0.0.7:5"),
        ("c2", "10.0.0.7:6"),
    ]


def test_groups_of_a_topic_and_topics_of_a_group(broker: Broker) -> None:
    commit(broker, ("away", "T", 0, 5), ("g", "U", 0, 1), ("away", "V", 0, 1))
    beat(broker, "c1", "T", "W")
    assert asked(broker, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T") == {
        "groupList": ["away", "g"]
    }
    topics = asked(broker, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="g")
    assert topics["topicList"] == ["T", "U", "W"]
    away = asked(broker, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="away")
    assert away["topicList"] == ["T", "V"]


def test_what_a_group_wants_of_a_topic(broker: Broker) -> None:
    code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    assert asked(broker, code, group="g", topic="T") == {"group": "g", "topic": "T"}
    beat(broker, "c1", "T")
    body = asked(broker, code, group="g", topic="T")
    assert (body["group"], body["topic"]) == ("g", "T")
    assert body["subscriptionData"]["subString"] == "A || B"


def test_a_follower_answers_from_what_it_was_told(broker: Broker) -> None:
    broker.group.step_down()
    beat(broker, "c1", "T")
    body = asked(broker, RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert [client["clientId"] for client in body["connectionSet"]] == ["c1"]
