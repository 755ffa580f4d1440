"""Subscription groups are made, changed, shown and removed through the log; their progress.

Topic administration.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import (
    ConsumerData,
    ConsumeStats,
    ConsumeStatsList,
    GroupRetryPolicy,
    HeartbeatData,
    MessageQueue,
    QueryConsumeTimeSpanBody,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupConfigList,
    SubscriptionGroupWrapper,
)
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD
from dledger.state.state_record import ConsumerOffsetsChange, TopicsChange
from dledger.state.table import Table
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.broker import Broker, topic_fields
from tests.harness.fake_group import BROKER, LEADER, FakeConnection, FakeGroup
from tests.harness.pops import fields


def put(broker: Broker, name: str = "g", **changes: Any) -> RemotingCommand:
    body = SubscriptionGroupConfig(name, **changes).encode()
    return broker.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)


def shown(broker: Broker, name: str = "g") -> SubscriptionGroupConfig:
    response = broker.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": name})
    assert response.code == 0, response
    return SubscriptionGroupConfig.decode(response.body)


def test_a_group_is_shown_as_it_was_made(broker: Broker) -> None:
    changes: dict[str, Any] = {
        "consume_enable": False,
        "consume_broadcast_enable": False,
        "consume_message_orderly": True,
        "retry_queue_nums": 3,
        "retry_max_times": 5,
        "notify_consumer_ids_changed_enable": False,
        "consume_timeout_minute": 7,
        "attributes": {"a": "b"},
        "group_retry_policy": GroupRetryPolicy("EXPONENTIAL", {"initial": 1, "max": 9}),
    }
    assert put(broker, **changes).code == 0
    assert shown(broker) == SubscriptionGroupConfig("g", **changes)
    assert put(broker).code == 0
    assert shown(broker) == SubscriptionGroupConfig("g")


def test_what_is_as_asked_for_takes_no_entry(broker: Broker) -> None:
    put(broker, retry_max_times=5)
    index = broker.group.state.applied_index
    assert put(broker, retry_max_times=5).code == 0
    assert broker.group.state.applied_index == index


def test_many_groups_change_by_one_entry(broker: Broker) -> None:
    body = SubscriptionGroupConfigList(
        [SubscriptionGroupConfig(name, retry_max_times=4) for name in "abc"]
    ).encode()
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    assert broker.call(code, {}, body).code == 0
    assert broker.group.state.applied_index == 1
    assert [shown(broker, name).retry_max_times for name in "abc"] == [4, 4, 4]


def test_all_groups_are_shown_built_in_ones_too(broker: Broker) -> None:
    put(broker, "z", retry_max_times=2)
    response = broker.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    wrapper = SubscriptionGroupWrapper.decode(response.body)
    assert wrapper.subscription_group_table["z"].retry_max_times == 2
    assert "TOOLS_CONSUMER" in wrapper.subscription_group_table
    assert response.ext["totalGroupNum"] == str(len(wrapper.subscription_group_table))
    assert wrapper.data_version.counter == 1


def test_group_to_be_made_is_shown_and_not_made(broker: Broker) -> None:
    """RocketMQ's proxy 5.5.0 asks for a group before anything else uses it."""
    before = broker.group.log.last_index
    response = broker.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "young"})
    assert (response.code, response.ext[NOT_MADE_FIELD]) == (0, "true")
    assert SubscriptionGroupConfig.decode(response.body) == SubscriptionGroupConfig("young")
    assert broker.group.log.last_index == before
    assert broker.group.state.subscription_group("young") is None


def test_group_that_may_not_be_made_is_code_26(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_subscription_group=False)
    response = broker.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "nobody"})
    assert response.code == 26


@pytest.mark.parametrize("field", ["cleanOffset", "removeOffset"])
def test_a_group_goes_with_its_offsets_if_asked(broker: Broker, field: str) -> None:
    broker.make_topic("T")
    put(broker)
    broker.group.store(ConsumerOffsetsChange.of((("g", "T", 0, 5), ("h", "T", 0, 6))))
    broker.processors.offsets.commit("g", "T", 1, 8)
    ext = {"groupName": "g", field: "true"}
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, ext).code == 0
    broker.processors.offsets.flush()
    broker.group.settle()
    state = broker.group.state
    assert (state.subscription_group("g"), state.consumer_offset("g", "T", 0)) == (None, None)
    assert state.consumer_offset("g", "T", 1) is None, "what waited for the next flush is dropped"
    assert state.consumer_offset("h", "T", 0) == 6


def test_a_group_goes_and_its_offsets_stay_if_not(broker: Broker) -> None:
    broker.make_topic("T")
    put(broker)
    broker.group.store(ConsumerOffsetsChange.of((("g", "T", 0, 5),)))
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}).code == 0
    assert broker.group.state.consumer_offset("g", "T", 0) == 5
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}).code == 0


def test_a_change_in_flight_is_seen_by_the_next(broker: Broker) -> None:
    connection = FakeConnection()
    body = SubscriptionGroupConfig("g", consume_enable=False).encode()
    asked = request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    assert broker.handle(asked, connection) is DEFERRED
    assert not shown(broker).consume_enable
    delete = request(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})
    assert broker.handle(delete, connection) is DEFERRED
    broker.group.settle()
    assert [response.code for _, response in connection.replies] == [0, 0]
    assert broker.group.state.subscription_group("g") is None


@pytest.mark.parametrize(
    "body", [{"groupName": "a/b"}, {"groupName": ""}, {"groupName": "g", "retryQueueNums": 65_537}]
)
def test_what_cannot_be_is_refused(broker: Broker, body: dict[str, Any]) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert broker.call(code, {}, json.dumps(body).encode()).code == 1
    assert broker.group.waiting == 0


Q0, Q1 = MessageQueue("T", BROKER, 0), MessageQueue("T", BROKER, 1)


@pytest.fixture
def filled(broker: Broker) -> Broker:
    assert isinstance(broker.clock, ManualClock)
    broker.make_topic("T", 2)
    broker.make_topic("U", 1)
    for _ in range(4):
        broker.group.put("T", 0, b"x")
        broker.clock.now_s += 10
    offsets = (("g", "T", 0, 2), ("g", "U", 0, 0), ("h", "T", 0, 4), ("h", "T", 1, 0))
    broker.group.store(ConsumerOffsetsChange.of(offsets))
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


class Watched(Table[Any, Any]):
    """Counts the passes over all of it."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()

    def values(self) -> Any:
        self.passes += 1
        return super().values()


WATCHED = ("consumer_offsets", "queue_locks", "pops", "request_modes")


def test_requests_for_a_name_cost_no_look_at_others(filled: Broker) -> None:
    """A broker may have a million rows, and each request is one turn of its event loop."""
    state, processors, code = filled.group.state, filled.processors, RequestCode
    tables = {name: Watched(getattr(state, name).form) for name in WATCHED}
    for name, table in tables.items():
        table.load([(key, row) for key, row in getattr(state, name).items()])
        table.passes = 0
        setattr(state, name, table)
    assert len(stats(filled).offset_table) == 3
    answer = filled.call(code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
    assert len(ConsumeStatsList.decode(answer.body).consume_stats_list) == 2
    assert processors.offsets.topics_of("h") == ["T"]
    assert filled.handle(request(code.POP_MESSAGE, fields(consumerGroup="p"))) is DEFERRED
    filled.group.settle()
    assert state.pops.total == 4
    processors.locks.lock("c", [("p", "U", 0)], lambda _: None)
    filled.group.settle()
    assert (processors.locks.holds_any("p"), processors.locks.holds_any("h")) == (True, False)
    reset = {"group": "p", "topic": "T", "timestamp": "0", "isForce": "true"}
    assert filled.call(code.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 0
    asked = {"groupName": "p", "cleanOffset": "true", "removeOffset": "true"}
    assert filled.call(code.DELETE_SUBSCRIPTIONGROUP, asked).code == 0
    assert not state.queue_locks
    filled.group.store(TopicsChange(delete=("T",)))
    assert {**state.consumer_offsets} == {("g", "U"): {0: 0}}
    # That one is of the leases: of their keys, once a minute.
    assert [table.passes for table in tables.values()] == [0, 1, 0, 0]


def test_topics_an_online_group_no_longer_wants_are_left_out(filled: Broker) -> None:
    data = ConsumerData("g", subscription_data_set=[SubscriptionData("U")])
    body = HeartbeatData(client_id="c", consumer_data_set=[data])
    filled.call(RequestCode.HEART_BEAT, {}, body.encode())
    filled.group.settle()
    assert {queue.topic for queue in stats(filled).offset_table} == {"U"}


def test_all_groups_of_a_broker_are_shown(filled: Broker) -> None:
    answer = filled.call(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
    body = ConsumeStatsList.decode(answer.body)
    assert [list(item) for item in body.consume_stats_list] == [["g"], ["h"]]
    assert len(body.consume_stats_list[0]["g"]) == 2, "one for each topic"
    assert (body.broker_addr, body.total_diff) == (LEADER, 2)
    answer = filled.call(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "true"})
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


def test_unknown_topic_is_answered_with_its_reason(filled: Broker) -> None:
    ext = {"topic": "nowhere", "group": "g"}
    assert filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, ext).code == 17


def test_only_the_leader_answers_it(filled: Broker) -> None:
    filled.group.step_down("10.0.0.2:10911")
    answers = [
        filled.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"}),
        filled.call(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "g"}),
        filled.call(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}),
    ]
    assert [answer.code for answer in answers] == [14, 14, 14]


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
