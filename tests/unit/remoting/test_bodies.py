"""Bodies as real clients send them and as real clients read them."""

from __future__ import annotations

import pytest

from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.bodies import (
    BrokerData,
    ConsumeFromWhere,
    ConsumerConnection,
    ConsumerOffsetSerializeWrapper,
    ConsumeType,
    DataVersion,
    HeartbeatData,
    LockBatchResponseBody,
    MessageModel,
    MessageQueue,
    QueueData,
    RegisterBrokerBody,
    ResetOffsetBody,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicOffset,
    TopicRouteData,
    TopicStatsTable,
)
from dledger.remoting.protocol.fastjson import Dialect

ROUTE = TopicRouteData(
    queue_datas=[QueueData("b", 4, 4, 6, 0)],
    broker_datas=[BrokerData("c", "b", {0: "127.0.0.1:10911", 2: "127.0.0.1:10921"})],
)


def test_route_in_standard_json() -> None:
    assert ROUTE.encode() == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911","2":"127.0.0.1:10921"},'
        b'"brokerName":"b","cluster":"c"}],"filterServerTable":{},'
        b'"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )


def test_route_for_old_clients_has_bare_numbers_as_keys() -> None:
    old = ROUTE.encode(Dialect.FASTJSON)
    assert b'"brokerAddrs":{0:"127.0.0.1:10911",2:"127.0.0.1:10921"}' in old
    assert TopicRouteData.decode(old) == TopicRouteData.decode(ROUTE.encode()) == ROUTE


def test_topic_stats_as_a_4_9_7_broker_sends_them() -> None:
    body = (
        b'{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"T1"}:'
        b'{"lastUpdateTimestamp":1795147871927,"maxOffset":5,"minOffset":0}}}'
    )
    table = TopicStatsTable.decode(body)
    assert table.offset_table == {
        MessageQueue("T1", "broker-a", 1): TopicOffset(0, 5, 1_795_147_871_927)
    }
    assert body[:-1] in table.encode()


def test_message_queue_key_may_be_a_string_holding_an_object() -> None:
    body = rb'{"offsetTable":{"{\"brokerName\":\"b\",\"queueId\":\"3\",\"topic\":\"T\"}":"9"}}'
    assert ResetOffsetBody.decode(body).offset_table == {MessageQueue("T", "b", 3): 9}


def test_heartbeat_of_the_cpp_client() -> None:
    heartbeat = HeartbeatData.decode(
        b'{"clientID":"1.2.3.4@5","consumerDataSet":[{"consumeFromWhere":0,"consumeType":1,'
        b'"groupName":"g","messageModel":1,"subscriptionDataSet":[{"codeSet":[],'
        b'"subString":"*","subVersion":"1795147871927","tagsSet":[],"topic":"T"}]}],'
        b'"producerDataSet":[]}\n'
    )
    [consumer] = heartbeat.consumer_data_set
    assert heartbeat.client_id == "1.2.3.4@5"
    assert consumer.consume_type is ConsumeType.CONSUME_PASSIVELY
    assert consumer.message_model is MessageModel.CLUSTERING
    assert consumer.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    [subscription] = consumer.subscription_data_set
    assert subscription.sub_version == 1_795_147_871_927
    assert subscription.expression_type is None


def test_heartbeat_of_the_go_client() -> None:
    heartbeat = HeartbeatData.decode(
        b'{"clientID":"c","producerDataSet":[{"groupName":"p"}],"consumerDataSet":[{'
        b'"groupName":"g","consumeType":"CONSUME_PASSIVELY","messageModel":"BROADCASTING",'
        b'"consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET","unitMode":false,'
        b'"subscriptionDataSet":[{"topic":"T","subString":"TagA","codeSet":["2598919"],'
        b'"tagsSet":["TagA"],"subVersion":1795147871927000000,"classFilterMode":false}]}]}'
    )
    [consumer] = heartbeat.consumer_data_set
    assert consumer.message_model is MessageModel.BROADCASTING
    assert consumer.subscription_data_set[0].code_set == [2_598_919]


def test_enum_ordinal_out_of_range_is_refused() -> None:
    for ordinal in ("2", "99999"):
        body = (
            f'{{"clientID":"c","consumerDataSet":[{{"groupName":"g","messageModel":{ordinal}}}]}}'
        )
        with pytest.raises(BadRequestError):
            HeartbeatData.decode(body.encode())


def test_object_that_occurs_twice_is_resolved() -> None:
    connection = ConsumerConnection.decode(
        b'{"subscriptionTable":{"A":{"topic":"A","subVersion":1},"B":{"$ref":'
        b'"$.subscriptionTable.A"}}}'
    )
    assert connection.subscription_table["B"] == connection.subscription_table["A"]


def test_consumer_offsets_with_numeric_keys() -> None:
    wrapper = ConsumerOffsetSerializeWrapper.decode(b'{"offsetTable":{"T@g":{0:5,1:7}}}')
    assert wrapper.offset_table == {"T@g": {0: 5, 1: 7}}
    assert wrapper.encode() == b'{"offsetTable":{"T@g":{"0":5,"1":7}}}'
    assert wrapper.encode(Dialect.FASTJSON) == b'{"offsetTable":{"T@g":{0:5,1:7}}}'


def test_registration_round_trips() -> None:
    body = RegisterBrokerBody(
        TopicConfigSerializeWrapper({"T": TopicConfig("T", 8, 8, perm=6)}, DataVersion(1, 2, 3)),
        ["127.0.0.1:1"],
    )
    assert RegisterBrokerBody.decode(body.encode()) == body


def test_group_of_a_4_x_broker_gets_the_defaults_of_5_x() -> None:
    group = SubscriptionGroupConfig.decode(b'{"groupName":"g","retryMaxTimes":"3","brokerId":0}')
    assert (group.retry_max_times, group.consume_timeout_minute) == (3, 15)


def test_odd_spelling_is_kept() -> None:
    assert LockBatchResponseBody([MessageQueue("T", "b", 1)]).encode() == (
        b'{"lockOKMQSet":[{"brokerName":"b","queueId":1,"topic":"T"}]}'
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"clientID":5}', b'{"clientID":"x"'])
def test_body_of_another_kind_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        HeartbeatData.decode(body)


def test_references_cannot_multiply_the_work() -> None:
    """Each level refers to the one before twice: 2**40 values if they were walked."""
    levels = ",".join(
        f'"l{n}":[{{"$ref":"$.l{n - 1}"}},{{"$ref":"$.l{n - 1}"}}]' for n in range(1, 41)
    )
    with pytest.raises(BadRequestError, match="too often"):
        HeartbeatData.decode(f'{{"clientID":"c","l0":[1],{levels}}}'.encode())


def test_references_to_oneself_are_refused_where_they_matter() -> None:
    with pytest.raises(BadRequestError):
        HeartbeatData.decode(b'{"clientID":"c","x":{"$ref":"$"}}')


def test_deep_nesting_is_refused() -> None:
    deep = b"[" * 900 + b'{"$ref":"$"}' + b"]" * 900
    with pytest.raises(BadRequestError):
        HeartbeatData.decode(b'{"clientID":"c","x":' + deep + b"}")
