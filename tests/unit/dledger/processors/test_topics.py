"""Topic administration."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.state.state_record import ConsumerOffsetsChange
from tests.harness.broker import Broker, topic_fields


def create(broker: Broker, **changes: Any) -> RemotingCommand:
    return broker.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic_fields(**{"readQueueNums": 8, "writeQueueNums": 4, **changes}),
    )


def send(broker: Broker) -> RemotingCommand:
    ext = {
        "producerGroup": "p", "topic": "T", "defaultTopic": "TBW102", "queueId": "0",
        "defaultTopicQueueNums": "4", "sysFlag": "0", "bornTimestamp": "1", "flag": "0",
        "properties": "", "reconsumeTimes": "0",
    }  # fmt: skip
    return broker.call(RequestCode.SEND_MESSAGE, ext, b"new")


def test_a_topic_is_made_changed_and_shown(broker: Broker) -> None:
    assert create(broker, attributes="+message.type=FIFO,+a=b").code == 0
    config = broker.group.state.topic_config("T")
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums) == (8, 4)
    assert create(broker, perm=4, attributes="-a").code == 0
    response = broker.call(RequestCode.GET_TOPIC_CONFIG, {"topic": "T"})
    assert json.loads(bytes(response.body)) == {
        "topicName": "T",
        "readQueueNums": 8,
        "writeQueueNums": 4,
        "perm": 4,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": {"message.type": "FIFO"},
    }
    assert broker.group.state.topics_counter == 2


def test_change_is_answered_when_name_servers_know(broker: Broker) -> None:
    """RocketMQ's proxy reads the route of a topic right behind the answer."""
    waiting: list[Callable[[], None]] = []
    broker.processors.topics.when_known = waiting.append
    ext = topic_fields()
    assert broker.handle(request(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)) is DEFERRED
    broker.group.settle()
    assert broker.group.state.topic_config("T") is not None
    assert broker.connection.replies == []
    (then,) = waiting
    then()
    assert broker.connection.reply_.code == 0


def test_asking_for_what_is_there_already_makes_no_entry(broker: Broker) -> None:
    create(broker)
    before = broker.group.log.last_index
    assert create(broker).code == 0
    assert broker.group.log.last_index == before


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"topic": "a b"}, "illegal characters"),
        ({"topic": "../../etc/passwd"}, "illegal characters"),
        ({"topic": "t" * 128}, "127"),
        ({"topic": "TBW102"}, "system topic"),
        ({"topic": "RMQ_SYS_DLEDGER_STATE"}, "system topic"),
        ({"topic": "RMQ_SYS_ANY"}, "system topic"),
        ({"topic": "rmq_sys_any"}, "system topic"),
        ({"topic": "Rmq_Sys_Any"}, "system topic"),
        ({"topic": "TRANS_CHECK_MAX_TIME_TOPIC"}, "system topic"),
        ({"topic": "%DLQ%DLEDGER_SET_ASIDE"}, "system topic"),
        ({"readQueueNums": 0}, "readQueueNums 0"),
        ({"writeQueueNums": 70_000}, "writeQueueNums 70000"),
        ({"perm": 99}, "perm 99"),
        ({"topicSysFlag": -1}, "topicSysFlag -1 is not between 0 and 2147483647"),
        ({"attributes": "key"}, "attribute"),
        ({"attributes": "+message.type=WEIRD"}, "message.type is one of UNSPECIFIED, NORMAL"),
        ({"order": None, "readQueueNums": "x"}, "not a number"),
    ],
)
def test_a_topic_that_cannot_be_is_refused(
    broker: Broker, changes: dict[str, Any], remark: str
) -> None:
    response = create(broker, **changes)
    assert (response.code, response.ext["outcome"]) == (1, "not_stored")
    assert remark in (response.remark or "")


def test_deleted_topic_loses_queues_and_offsets(broker: Broker) -> None:
    create(broker)
    broker.group.put("T", 0, b"x")
    broker.group.store(ConsumerOffsetsChange.of((("g", "T", 0, 1),)))
    assert broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert broker.call(RequestCode.GET_TOPIC_CONFIG, {"topic": "T"}).code == 17
    assert broker.group.state.max_offset("T", 0) == 0
    assert broker.group.state.consumer_offset("g", "T", 0) is None
    assert broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0


def test_topic_made_again_takes_messages_once_it_is_there(broker: Broker) -> None:
    """Until then an offset of the former topic would be given out, which no member can apply."""
    create(broker)
    broker.group.put("T", 0, b"former")
    for code, ext in (
        (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
        (RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(attributes="+b=1")),
        (RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(attributes="+a=1")),
    ):
        assert broker.handle(request(code, ext)) is DEFERRED
        broker.group.append()
    assert send(broker).code == 17
    broker.group.settle()
    answer = send(broker)
    assert (answer.code, answer.ext["queueOffset"]) == (0, "0")
    assert broker.group.state.topics["T"].attributes == {"a": "1", "b": "1"}


@pytest.mark.parametrize("topic", ["TBW102", "RMQ_SYS_DLEDGER_STATE", "rmq_sys_any", " "])
def test_system_topics_stay(broker: Broker, topic: str) -> None:
    assert broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}).code == 1


def test_change_with_an_unknown_end_is_reported(broker: Broker) -> None:
    ext = topic_fields()
    assert broker.handle(request(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)) is DEFERRED
    broker.group.append()
    broker.group.step_down()
    assert broker.connection.reply_.ext["outcome"] == "unknown"


def test_all_topics_are_listed_with_their_version(broker: Broker) -> None:
    create(broker)
    response = broker.call(RequestCode.GET_ALL_TOPIC_CONFIG, {})
    wrapper = bodies.TopicConfigSerializeWrapper.decode(response.body)
    assert wrapper.topic_config_table["T"].read_queue_nums == 8
    assert wrapper.topic_config_table["SCHEDULE_TOPIC_XXXX"].read_queue_nums == 18
    assert response.ext["totalTopicNum"] == str(len(wrapper.topic_config_table))
    assert wrapper.data_version.counter == 1
    assert wrapper.data_version.state_version == 1
    assert wrapper.data_version.timestamp == broker.clock.wall_ms()


def test_topic_stats_show_each_queue(broker: Broker) -> None:
    create(broker)
    broker.group.put("T", 1, b"x", b"y")
    response = broker.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
    table = bodies.TopicStatsTable.decode(response.body).offset_table
    assert len(table) == 8, "to write 4, to read 8"
    one = table[bodies.MessageQueue("T", "broker-a", 1)]
    assert (one.min_offset, one.max_offset) == (0, 2)
    assert one.last_update_timestamp == broker.clock.wall_ms()
    assert table[bodies.MessageQueue("T", "broker-a", 0)].last_update_timestamp == 0
    assert broker.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "X"}).code == 17


def create_all(broker: Broker, *configs: bodies.TopicConfig) -> RemotingCommand:
    body = bodies.TopicConfigList(topic_config_list=list(configs)).encode()
    return broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body)


def test_a_list_of_topics_is_one_entry(broker: Broker) -> None:
    before = broker.group.log.last_index
    attributes = {"message.type": "FIFO"}
    first = bodies.TopicConfig(topic_name="A", read_queue_nums=2, attributes=attributes)
    assert create_all(broker, first, bodies.TopicConfig(topic_name="B", perm=4)).code == 0
    assert broker.group.log.last_index == before + 1
    a, b = broker.group.state.topic_config("A"), broker.group.state.topic_config("B")
    assert a is not None
    assert b is not None
    assert (a.read_queue_nums, dict(a.attributes), b.perm) == (2, attributes, 4)


def test_one_bad_topic_keeps_the_whole_list_out(broker: Broker) -> None:
    good, bad = bodies.TopicConfig(topic_name="A"), bodies.TopicConfig(topic_name="a b")
    assert create_all(broker, good, bad).code == 1
    assert broker.group.state.topic_config("A") is None
    assert create_all(broker).code == 1
    broker.group.step_down("elsewhere:1")
    assert create_all(broker, good).code == 14


def test_system_topics_are_those_every_broker_has(broker: Broker) -> None:
    broker.make_topic("T")
    response = broker.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    names = bodies.TopicList.decode(response.body).topic_list
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "broker-a", "DefaultCluster"} <= set(names)
    assert "T" not in names
