"""Sends: what is checked, in which order, what is stored, what is answered."""

import json
import struct
from typing import Any

import pytest

from dledger.broker_errors import PendingFullError
from dledger.commitlog.errors import DiskFullError
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.record import Record, decode_record
from dledger.commitlog.record_batch import BatchItem, encode_batch
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.topic_names import CLOSED_TOPICS
from dledger.testing.doubles import EPOCH_MS, ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import BROKER, FakeConnection, FakeGroup

_NAMES = (
    "producer_group", "topic", "default_topic", "queues", "queue_id", "sys_flag", "born", "flag",
    "properties", "reconsume_times", "max_reconsume_times", "batch",
)  # fmt: skip
V2 = dict(zip(_NAMES, "abcdefghijlm", strict=True))
LONG = dict(
    zip(
        _NAMES,
        [
            "producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag",
            "bornTimestamp", "flag", "properties", "reconsumeTimes", "maxReconsumeTimes", "batch",
        ],
        strict=True,
    )
)  # fmt: skip


def ext(names: dict[str, str] = V2, /, **changes: Any) -> dict[str, str]:
    values = {
        "producer_group": "p", "topic": "T", "default_topic": "TBW102", "queues": "4",
        "queue_id": "1", "sys_flag": "0", "born": "1699999999000", "flag": "77",
        "properties": "TAGS\x01TagA\x02UNIQ_KEY\x01ABC\x02", **changes,
    }  # fmt: skip
    return {names[name]: value for name, value in values.items()}


def send(broker: Broker, body: bytes = b"hello", **changes: str) -> RemotingCommand:
    return broker.call(RequestCode.SEND_MESSAGE_V2, ext(**changes), body)


def stored(group: FakeGroup, topic: str, queue_id: int, offset: int = 0) -> Record:
    unit = group.queues.queue(topic, queue_id).read(offset, 1)
    return decode_record(bytes(group.log.record_at(int(unit["phy_offset"][0]))))


@pytest.mark.parametrize("host", ["127.0.0.1", "2001:db8::1"])
def test_a_message_is_stored_as_sent_and_answered_with_its_place(broker: Broker, host: str) -> None:
    broker.listen_at(host)
    broker.make_topic()
    response = send(broker)
    record = stored(broker.group, "T", 1)
    assert response.code == 0
    assert response.ext["queueId"] == "1"
    assert response.ext["queueOffset"] == "0"
    assert response.ext["MSG_REGION"] == "DefaultRegion"
    assert response.ext["TRACE_ON"] == "true"
    assert decode_offset_message_id(response.ext["msgId"]) == (host, 10911, record.phy_offset)
    assert (record.topic, record.queue_id, bytes(record.body)) == ("T", 1, b"hello")
    assert (record.flag, record.born_timestamp_ms) == (77, 1699999999000)
    assert record.born_host == ("10.1.2.3", 4567)
    assert record.store_host == (host, 10911)
    assert record.store_timestamp_ms == EPOCH_MS
    assert record.property_map == {"TAGS": "TagA", "UNIQ_KEY": "ABC", "CLUSTER": "DefaultCluster"}
    assert send(broker).ext["queueOffset"] == "1"


def test_properties_without_the_last_separator_are_kept_whole(broker: Broker) -> None:
    broker.make_topic()
    send(broker, properties="UNIQ_KEY\x01K\x02KEYS\x01a b\x02WAIT\x01false")
    assert stored(broker.group, "T", 1).property_map == {
        "UNIQ_KEY": "K", "KEYS": "a b", "WAIT": "false", "CLUSTER": "DefaultCluster",
    }  # fmt: skip


def test_send_adds_uniq_key_and_strips_pop_ck(broker: Broker) -> None:
    broker.make_topic()
    send(broker, properties="POP_CK\x01x\x02A\x01b\x02")
    properties = stored(broker.group, "T", 1).property_map
    assert len(properties["UNIQ_KEY"]) == 32
    assert "POP_CK" not in properties
    assert properties["A"] == "b"


def test_a_negative_queue_is_chosen_at_random(broker: Broker) -> None:
    broker.make_topic()
    chosen = {send(broker, queue_id="-1").ext["queueId"] for _ in range(40)}
    assert chosen == {"0", "1", "2", "3"}


def test_an_unknown_topic_is_made_by_its_first_message(broker: Broker) -> None:
    response = send(broker, topic="New", queues="3", queue_id="2")
    config = broker.group.state.topic_config("New")
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)
    assert response.code == 0
    record = stored(broker.group, "New", 2)
    assert decode_offset_message_id(response.ext["msgId"])[2] == record.phy_offset
    assert broker.group.state.applied_index == 1, "one entry holds the topic and its message"


def test_new_topic_gets_the_default_topics_queues_at_most(broker: Broker) -> None:
    send(broker, topic="New", queues="100", queue_id="0")
    assert broker.group.state.topic_config("New").write_queue_nums == 8  # type: ignore[union-attr]  # None fails the test


def test_sends_behind_a_topic_in_the_making_do_not_make_it_again(broker: Broker) -> None:
    commands = [request(310, ext(topic="New"), b"x") for _ in range(3)]
    for command in commands:
        assert broker.handle(command) is DEFERRED
    broker.group.settle()
    assert [response.code for _, response in broker.connection.replies] == [0, 0, 0]
    assert broker.group.state.topics_counter == 1
    assert broker.group.state.max_offset("New", 1) == 3


def test_a_retry_topic_is_made_with_one_queue(broker: Broker) -> None:
    assert send(broker, topic="%RETRY%g", queue_id="0", reconsume_times="1").code == 0
    assert broker.group.state.topic_config("%RETRY%g").queue_nums == 1  # type: ignore[union-attr]  # None fails the test


@pytest.mark.parametrize("is_there", [True, False])
def test_send_to_a_retry_topic_takes_a_queue_that_it_has(broker: Broker, is_there: bool) -> None:
    """A client takes a topic that it does not see yet for one with as many queues as new ones."""
    if is_there:
        broker.make_topic("%RETRY%g", 1)
    answer = send(broker, topic="%RETRY%g", queue_id="3", reconsume_times="1")
    assert answer.code == 0, answer.remark
    assert answer.ext["queueId"] == "0"
    assert broker.group.state.max_offset("%RETRY%g", 0) == 1
    broker.make_topic("T", 1)
    assert send(broker, queue_id="3").remark == "request queueId[3] is illegal, T has 1 queues"


REFUSALS: list[tuple[dict[str, str], bytes, int, str]] = [
    ({"topic": ""}, b"x", 1, "blank"),
    ({"topic": "a/b"}, b"x", 1, "illegal characters"),
    ({"topic": "t" * 128}, b"x", 1, "longer than 127"),
    ({"topic": "%RETRY%" + "t" * 249}, b"x", 1, "longer than 255"),
    ({"topic": "Nowhere", "default_topic": "None"}, b"x", 17, "not exist"),
    ({"topic": "Nowhere", "default_topic": "BenchmarkTest"}, b"x", 17, "not exist"),
    ({"topic": "ReadOnly"}, b"x", 16, "forbidden"),
    ({"queue_id": "4"}, b"x", 29, "illegal"),
    ({}, b"", 13, "empty"),
    ({}, b"x" * 4097, 13, "at most 4096"),
    ({"properties": "A\x01" + "v" * 32767}, b"x", 13, "properties"),
    ({"properties": "A\x01\ud800\x02"}, b"x", 13, "not text"),
    ({"properties": "TRAN_MSG\x01true\x02DELAY\x011\x02"}, b"x", 13, "transactional"),
    ({"flag": "many"}, b"x", 1, "not a number"),
    ({"properties": "DELAY\x01soon\x02"}, b"x", 13, "DELAY is not a number: 'soon'; nothing"),
    ({"properties": "DELAY\x013\x02TIMER_DELAY_MS\x01x\x02"}, b"x", 13, "TIMER_DELAY_MS is not"),
    ({"properties": "TRAN_MSG\x01truesw8\x01x\x02"}, b"x", 13, "TRAN_MSG is not true or false"),
    (
        {"properties": "TRAN_MSG\x01true\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x01x\x02"},
        b"x",
        13,
        "CHECK_IMMUNITY_TIME_IN_SECONDS is not a number",
    ),
]


@pytest.mark.parametrize(("changes", "body", "code", "remark"), REFUSALS)
def test_refused_send_names_its_reason_and_stores_nothing(
    broker: Broker, changes: dict[str, str], body: bytes, code: int, remark: str
) -> None:
    broker.make_topic()
    broker.make_topic("ReadOnly", perm=4)
    before = broker.group.log.last_index
    response = send(broker, body, **changes)
    assert (response.code, response.ext["outcome"]) == (code, "not_stored")
    assert remark in (response.remark or "")
    assert response.ext["MSG_REGION"] == "DefaultRegion"
    assert response.ext["TRACE_ON"] == "true"
    broker.group.settle()
    assert broker.group.log.last_index == before


@pytest.mark.parametrize("topic", sorted(CLOSED_TOPICS))
def test_topics_of_the_broker_are_not_for_clients(broker: Broker, topic: str) -> None:
    assert send(broker, topic=topic, queue_id="0").code == 16


@pytest.mark.parametrize(
    ("topic", "code"), [("rmq_sys_any", 17), ("RMQ_SYS_ANY", 17), ("RMQ_SYS_TRACE_TOPIC", 0)]
)
def test_no_send_makes_a_topic_of_a_reserved_name(broker: Broker, topic: str, code: int) -> None:
    assert send(broker, topic=topic, queue_id="0").code == code
    assert (broker.group.state.topic_config(topic) is None) == (code != 0)


ORDER: list[tuple[dict[str, str], bytes, int]] = [
    # each line breaks one check more than the line after it: the earliest decides
    ({"topic": "a/b", "queue_id": "99", "properties": "A\x01" + "v" * 32767}, b"", 1),
    ({"topic": SCHEDULE_TOPIC, "queue_id": "99", "properties": "A\x01" + "v" * 32767}, b"", 16),
    ({"topic": "X", "default_topic": "", "queue_id": "99"}, b"", 17),
    ({"queue_id": "99", "properties": "TRAN_MSG\x01true\x02DELAY\x011\x02"}, b"", 29),
    ({"properties": "TRAN_MSG\x01true\x02DELAY\x011\x02"}, b"", 13),
    ({}, b"", 13),
]


@pytest.mark.parametrize(("changes", "body", "code"), ORDER)
def test_checks_come_in_rocketmq_order(
    broker: Broker, changes: dict[str, str], body: bytes, code: int
) -> None:
    broker.make_topic()
    assert send(broker, body, **changes).code == code


def test_send_checks_leadership_first(broker: Broker) -> None:
    broker.group.step_down("10.0.0.9:10911")
    response = send(broker, topic="a/b")
    assert response.code == 14
    assert response.ext["leaderAddr"] == "10.0.0.9:10911"
    assert response.ext["term"] == "1"
    assert response.ext["outcome"] == "not_stored"
    assert response.ext["TRACE_ON"] == "true"


def test_a_broker_without_write_permission_refuses(group: FakeGroup) -> None:
    broker = Broker(group, broker_permission=4)
    assert send(broker).code == 16


def test_without_auto_creation_an_unknown_topic_is_refused(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_topic_enable=False)
    assert send(broker, topic="New").code == 17


@pytest.mark.parametrize(
    ("error", "code"), [(PendingFullError("full"), 2), (DiskFullError("no space"), 14)]
)
def test_full_group_refuses_with_its_reason(broker: Broker, error: Any, code: int) -> None:
    broker.make_topic()
    broker.group.refuse = error
    response = send(broker, topic="New")
    assert (response.code, response.ext["outcome"]) == (code, "not_stored")
    broker.group.refuse = None
    assert send(broker, topic="New").code == 0, "the topic was not taken for made"
    assert broker.group.state.topic_config("New") is not None


def test_lost_leadership_answers_the_known_outcome(broker: Broker) -> None:
    broker.make_topic()
    appended, waiting = (request(310, ext(), b"x") for _ in range(2))
    broker.handle(appended)
    broker.group.append()
    broker.handle(waiting)
    broker.group.step_down("10.0.0.9:10911")
    answers = {id(asked): response for asked, response in broker.connection.replies}
    assert answers[id(waiting)].code == 14
    assert answers[id(waiting)].ext["outcome"] == "not_stored"
    assert answers[id(waiting)].ext["leaderAddr"] == "10.0.0.9:10911"
    assert answers[id(appended)].code == 1
    assert answers[id(appended)].ext["outcome"] == "unknown"
    assert answers[id(appended)].ext["MSG_REGION"] == "DefaultRegion"


@pytest.mark.parametrize(("asked", "level"), [("1", 1), ("18", 18), ("99", 18)])
def test_a_delayed_message_waits_in_the_schedule_topic(
    broker: Broker, asked: str, level: int
) -> None:
    broker.make_topic()
    response = send(broker, properties=f"UNIQ_KEY\x01K\x02DELAY\x01{asked}\x02")
    assert response.code == 0
    assert response.ext["queueId"] == "1"
    record = stored(broker.group, SCHEDULE_TOPIC, level - 1)
    assert record.property_map == {
        "UNIQ_KEY": "K", "DELAY": asked, "CLUSTER": "DefaultCluster", "REAL_TOPIC": "T",
        "REAL_QID": "1",
    }  # fmt: skip
    assert broker.group.state.max_offset("T", 1) == 0


@pytest.mark.parametrize("asked", ["0", "-3"])
def test_a_delay_that_is_none_is_no_delay(broker: Broker, asked: str) -> None:
    broker.make_topic()
    send(broker, properties=f"DELAY\x01{asked}\x02")
    assert broker.group.state.max_offset("T", 1) == 1


def test_transaction_bits_are_not_the_clients_to_set(broker: Broker) -> None:
    broker.make_topic()
    send(broker, sys_flag=str(4 | 8 | 128 | 0x301))
    assert stored(broker.group, "T", 1).sys_flag == 0x301


@pytest.mark.parametrize(
    ("times", "own_limit", "version", "topic"),
    [
        ("16", None, 407, "%RETRY%g"),
        ("17", None, 407, "%DLQ%g"),
        ("4", "3", 407, "%DLQ%g"),
        ("3", "3", 407, "%RETRY%g"),
        ("3", "3", 120, "%RETRY%g"),
    ],
)
def test_message_retried_too_often_is_a_dead_letter(
    broker: Broker, times: str, own_limit: str | None, version: int, topic: str
) -> None:
    changes = {"max_reconsume_times": own_limit} if own_limit else {}
    broker.make_topic("%RETRY%g", 1)
    response = broker.call(
        310,
        ext(
            topic="%RETRY%g",
            queue_id="0",
            reconsume_times=times,
            properties="DELAY\x013\x02" if topic.startswith("%DLQ") else "A\x01b\x02",
            **changes,
        ),
        b"x",
        version=version,
    )
    assert response.code == 0
    record = stored(broker.group, topic, 0)
    assert record.reconsume_times == int(times)
    assert "DELAY" not in record.property_map
    assert broker.group.state.topic_config(topic) is not None


@pytest.mark.parametrize(
    ("holder", "times", "later_s", "topic"),
    [
        ("g", "15", 0, "%RETRY%g"),
        ("g", "16", 0, "%DLQ%g"),
        ("g", "16", 3600, "%RETRY%g"),
        ("other", "16", 0, "%RETRY%g"),
    ],
)
def test_send_to_retry_topic_counts_tries_of_lock_holders(
    broker: Broker, clock: ManualClock, holder: str, times: str, later_s: int, topic: str
) -> None:
    broker.make_topic()
    body = {
        "consumerGroup": holder,
        "clientId": "c",
        "mqSet": [{"topic": "T", "brokerName": BROKER, "queueId": 1}],
    }
    assert broker.call(RequestCode.LOCK_BATCH_MQ, {}, json.dumps(body).encode()).code == 0
    assert [key[0] for key in broker.group.state.queue_locks] == [holder]
    clock.now_s += later_s
    broker.make_topic("%RETRY%g", 1)
    asked = ext(topic="%RETRY%g", queue_id="0", reconsume_times=times)
    assert broker.call(310, asked, b"x").code == 0
    assert stored(broker.group, topic, 0).reconsume_times == int(times)


@pytest.mark.parametrize(
    ("code", "names", "changes"),
    [
        (RequestCode.SEND_BATCH_MESSAGE, V2, {}),
        (RequestCode.SEND_MESSAGE, LONG, {"batch": "true"}),
        (RequestCode.SEND_MESSAGE, LONG, {"batch": "1"}),
    ],
)
def test_a_batch_is_stored_item_by_item(
    broker: Broker, code: int, names: dict[str, str], changes: dict[str, str]
) -> None:
    broker.listen_at("2001:db8::1")
    broker.make_topic()
    items = [
        BatchItem(b"one", b"UNIQ_KEY\x01K1\x02TAGS\x01A\x02", 5),
        BatchItem(b"two", b"UNIQ_KEY\x01K2"),
        BatchItem(b"three"),
    ]
    response = broker.call(
        code, ext(names, properties="UNIQ_KEY\x01BATCH\x02", **changes), encode_batch(items)
    )
    assert response.code == 0
    assert response.ext["queueOffset"] == "0"
    records = [stored(broker.group, "T", 1, i) for i in range(3)]
    assert [bytes(record.body) for record in records] == [b"one", b"two", b"three"]
    assert [record.flag for record in records] == [5, 0, 0]
    assert [record.queue_offset for record in records] == [0, 1, 2]
    keys = [record.property_map["UNIQ_KEY"] for record in records]
    assert keys[:2] == ["K1", "K2"]
    assert len(keys[2]) == 32, "an item never gets the batch's key"
    ids = response.ext["msgId"].split(",")
    assert [decode_offset_message_id(item)[2] for item in ids] == [
        record.phy_offset for record in records
    ]


@pytest.mark.parametrize(
    ("body", "changes", "remark"),
    [
        (encode_batch([BatchItem(b"x", b"DELAY\x011\x02")]), {}, "delayed"),
        (encode_batch([BatchItem(b"x"), BatchItem(b"")]), {}, "empty"),
        (encode_batch([BatchItem(b"x", b"TRAN_MSG\x01yes\x02")]), {}, "TRAN_MSG is not true"),
        (encode_batch([BatchItem(b"x")]) + b"\0", {}, "cut short"),
        (b"", {}, "empty"),
        (encode_batch([BatchItem(b"x" * 3000)] * 2), {}, "at most 4096"),
        (encode_batch([BatchItem(b"x")]), {"topic": "%RETRY%g", "queue_id": "0"}, "retry"),
        (struct.pack(">i", -1) * 8, {}, "claims"),
        (struct.pack(">i", 1 << 30), {}, "cut short"),
        (b"\0\0", {}, "cut short"),
    ],
)
def test_a_bad_batch_is_refused_whole(
    broker: Broker, body: bytes, changes: dict[str, str], remark: str
) -> None:
    broker.make_topic()
    before = broker.group.log.last_index
    response = broker.call(RequestCode.SEND_BATCH_MESSAGE, ext(**changes), body)
    assert (response.code, response.ext["outcome"]) == (13, "not_stored")
    assert remark in (response.remark or "")
    broker.group.settle()
    assert broker.group.log.last_index == before


def test_an_ipv6_client_is_stored_with_its_address(broker: Broker) -> None:
    broker.make_topic()
    connection = FakeConnection(peer_address=("2001:db8::1", 99))
    broker.call(310, ext(), b"x", connection=connection)
    assert stored(broker.group, "T", 1).born_host == ("2001:db8::1", 99)
    mapped = FakeConnection(peer_address=("::ffff:10.0.0.7", 99))
    broker.call(310, ext(), b"x", connection=mapped)
    assert stored(broker.group, "T", 1, 1).born_host == ("10.0.0.7", 99)


def test_nothing_is_sent_to_a_topic_that_is_being_deleted(broker: Broker) -> None:
    broker.make_topic()
    deleting = request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert broker.handle(deleting) is DEFERRED
    assert send(broker).code == 17
    broker.group.settle()
    assert send(broker).code == 0, "made again, from offset 0"
    assert broker.group.state.max_offset("T", 1) == 1
