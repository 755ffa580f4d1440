"""Bodies as real clients send them and as real clients read them.

The JSON dialect of RocketMQ's bodies.
Java properties as RocketMQ's configuration files and requests use them.
"""

from typing import Any

import msgspec
import pytest

from dledger.commitlog.errors import ConfigError
from dledger.remoting.errors import BadRequestError
from dledger.remoting.properties import format_properties, parse_properties, read_properties
from dledger.remoting.protocol import fastjson
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":1,"b":[true,false,null,-1e3]}', {"a": 1, "b": [True, False, None, -1000.0]}),
        ("{0:'x',1:\"y\"}", {"0": "x", "1": "y"}),
        ("{table:{a.b:1,$c:2,_d:3}}", {"table": {"a.b": 1, "$c": 2, "_d": 3}}),
        ('{{"b":2,"a":{"c":1}}:3}', {'{"a":{"c":1},"b":2}': 3}),
        ("[1L,2.5D,3F,4B,5S]", [1, 2.5, 3, 4, 5]),
        ("{,a:1,,b:[,1,,2,],}", {"a": 1, "b": [1, 2]}),
        (r"'\'\"\\\/\b\f\n\r\t\v\0é\x41\ud83d\ude00'", "'\"\\/\b\f\n\r\t\v\0éA😀"),
        ("  {a : 1 }\n", {"a": 1}),
        ("{a:NaN,b:undefined}", {"a": None, "b": None}),
    ],
)  # fmt: skip
def test_reader_takes_the_dialect(text: str, value: Any) -> None:
    assert fastjson.loads(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":{"x":[{"y":1}]},"b":{"$ref":"$.a.x[0]"}}', {"a": {"x": [{"y": 1}]}, "b": {"y": 1}}),
        ('{"a":[{"$ref":"$.b"}],"b":{"y":1}}', {"a": [{"y": 1}], "b": {"y": 1}}),
        ('{"a\\\\.b":1,"a.b":{"y":1},"c":{"$ref":"$.a\\\\.b"}}',
         {"a\\.b": 1, "a.b": {"y": 1}, "c": {"y": 1}}),
        ('{"a":{"$ref":"$.nothing.here"},"b":[{"$ref":"$.a[7]"}]}', {"a": None, "b": [None]}),
        ('{"a":[1],"b":{"$ref":"$.a[\u0660]"}}', {"a": [1], "b": None}),
        ('{"a":[1],"b":{"$ref":"$.a[' + "0" * 5_000 + ']"}}', {"a": [1], "b": None}),
        ('{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}', {"a": None, "b": None}),
        ('{"a":{"$ref":5}}', {"a": {"$ref": 5}}),
        ('{"$ref":"$"}', None),
    ],
)  # fmt: skip
def test_references_are_resolved(text: str, value: Any) -> None:
    assert fastjson.loads(text.encode()) == value


def test_references_to_what_is_around_them() -> None:
    root = fastjson.loads(b'{"a":{"up":{"$ref":".."},"self":{"$ref":"@"},"top":{"$ref":"$"}}}')
    assert root["a"]["up"] is root
    assert root["a"]["self"] is root["a"]
    assert root["a"]["top"] is root


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{a}",
        b"{a:}",
        b"{a:1 b:2}",
        b"[1 2]",
        b"{:1}",
        b"'x",
        b"'\\q'",
        b"'\\u12'",
        b"'\\ud800'",
        b"{a:bare}",
        b"{}{}",
        b"\xff",
        b"[" * 70 + b"]" * 70 + b"x",
        b"{" * 100_000,
        b"{" * 40 + b"a:1" + b"}:1" * 39 + b"}",
        b"{[1]:2}",
        b"{a:" + b"9" * 5000 + b"}",
        "{a:\u0661}".encode(),
        b"{a:1%b}" % (b" " * fastjson.DIALECT_BYTES_MAX),
    ],
)
def test_reader_refuses_what_is_neither(text: bytes) -> None:
    with pytest.raises(BadRequestError):
        fastjson.loads(text)


class Sample(msgspec.Struct, rename="camel"):
    some_name: str
    addrs: dict[int, str]
    absent: int | None = None


def test_writer_sorts_keys_and_leaves_nulls_out() -> None:
    value = Sample("x", {2: "b", 0: "a"})
    assert fastjson.dumps(value) == b'{"addrs":{"0":"a","2":"b"},"someName":"x"}'
    assert fastjson.dumps(value, Dialect.FASTJSON) == b'{"addrs":{0:"a",2:"b"},"someName":"x"}'


@pytest.mark.parametrize("dialect", list(Dialect))
def test_message_queue_keys_are_bare_objects_in_both_dialects(dialect: Dialect) -> None:
    table = {
        MessageQueue("T", "b", 1): 5,
        MessageQueue("T", "b", 0): None,
        MessageQueue("A", "b", 0): 7,
    }
    assert fastjson.dumps({"offsetTable": table}, dialect) == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"A"}:7,'
        b'{"brokerName":"b","queueId":1,"topic":"T"}:5}}'
    )  # fmt: skip


@pytest.mark.parametrize("dialect", list(Dialect))
def test_writer_covers_all_kinds(dialect: Dialect) -> None:
    value: Any = {"b": b"\x00\xff", "l": [1, True, None, 1.5, {}], "e": [], "s": 'q"\n<é>'}
    assert fastjson.dumps(value, dialect) == (
        '{"b":"AP8=","e":[],"l":[1,true,null,1.5,{}],"s":"q\\"\\n<é>"}'.encode()
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listenPort=10911", [(1, "listenPort", "10911")]),
        ("brokerClusterName = RaftCluster ", [(1, "brokerClusterName", "RaftCluster")]),
        ("a: b\nc d\ne", [(1, "a", "b"), (2, "c", "d"), (3, "e", "")]),
        ("# note\n! note\n\n  \nk=v", [(5, "k", "v")]),
        ("k=a=b:c", [(1, "k", "a=b:c")]),
        ("k=a;\\\n   b;\\\n   c\nl=1", [(1, "k", "a;b;c"), (4, "l", "1")]),
        ("k=a\\\\\nl=1", [(1, "k", "a\\"), (2, "l", "1")]),
        ("k=C\\:\\\\store\\u0041\\tx", [(1, "k", "C:\\storeA\tx")]),
        ("a\\ b=c", [(1, "a b", "c")]),
        ("k=1\nk=2", [(1, "k", "1"), (2, "k", "2")]),
        ("k=a\\", [(1, "k", "a")]),
        ("k=a\\\n# part of the value", [(1, "k", "a# part of the value")]),
        ("k=v\r\nl=w\r\n", [(1, "k", "v"), (2, "l", "w")]),
    ],
)
def test_properties_line_is_read_as_in_java(
    text: str, expected: list[tuple[int, str, str]]
) -> None:
    assert parse_properties(text) == expected


def test_properties_bad_escape_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2: bad \\u escape '00g1'"):
        parse_properties("a=1\nb=\\u00g1")


def test_properties_later_line_wins() -> None:
    text = "! c\n# c\na=1\n b : x=y \nlong=one,\\\n   two\nk\\=ey=v\\\\w\na=2\nempty=\n"
    assert read_properties(text) == {
        "a": "2",
        "b": "x=y",
        "long": "one,two",
        "k=ey": "v\\w",
        "empty": "",
    }


def test_properties_value_without_a_key_names_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2: a key is needed before the value '9'"):
        read_properties("a=1\n=9")


def test_properties_are_written_as_in_java() -> None:
    values = {"a": True, "b": 3, "c": "x", "d": "C:\\store\nnext"}
    text = format_properties(values)
    assert text == "a=true\nb=3\nc=x\nd=C:\\\\store\\nnext\n"
    assert read_properties(text) == {"a": "true", "b": "3", "c": "x", "d": "C:\\store\nnext"}
