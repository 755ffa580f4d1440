"""Messages that a consumer sends back: later, later still, and then to the dead letters."""

from typing import Any

import pytest

from dledger.commitlog.entry import Run
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.commitlog.properties import SCHEDULE_TOPIC
from dledger.commitlog.record import (
    SYS_FLAG_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    Record,
    decode_record,
    encode_record,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.services.delayed_message import queue_of_level
from dledger.state.state_record import SubscriptionGroupsChange
from dledger.state.topics import TOPICS_QUEUE, SubscriptionGroupConfig
from tests.harness.broker import Broker
from tests.harness.fake_group import CLUSTER, FakeGroup, batch_of
from tests.harness.present import present

PROPERTIES = "TAGS\x01TagA\x02KEYS\x01k1\x02UNIQ_KEY\x01ABC\x02"


def sent(broker: Broker, topic: str = "T", properties: str = PROPERTIES, times: int = 0) -> int:
    """Send a message and return its position in the log."""
    ext = {
        "producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "queueId": "0",
        "defaultTopicQueueNums": "4", "sysFlag": "1", "bornTimestamp": "1699999999000",
        "flag": "77", "properties": properties, "reconsumeTimes": str(times),
    }  # fmt: skip
    response = broker.call(RequestCode.SEND_MESSAGE, ext, b"body")
    assert response.code == 0, response.remark
    return decode_offset_message_id(response.ext["msgId"])[-1]


def send_back(broker: Broker, at: int, *, version: int = 407, **ext: Any) -> RemotingCommand:
    header = {"offset": str(at), "group": "g", "delayLevel": "0", **ext}
    return broker.call(RequestCode.CONSUMER_SEND_MSG_BACK, header, version=version)


def only(group: FakeGroup, topic: str, queue_id: int) -> Record:
    assert group.state.max_offset(topic, queue_id) == 1
    unit = group.queues.queue(topic, queue_id).read(0, 1)
    return decode_record(bytes(group.log.record_at(int(unit["phy_offset"][0]))))


def give_up_after(broker: Broker, times: int, queues: int = 1) -> None:
    config = SubscriptionGroupConfig("g", retry_max_times=times, retry_queue_nums=queues)
    broker.group.store(SubscriptionGroupsChange(put=(config,)))


def test_send_back_stores_a_delayed_copy(broker: Broker) -> None:
    broker.make_topic()
    offset = sent(broker)
    response = send_back(broker, offset, originMsgId="whatever", originTopic="T")
    assert (response.code, response.ext, response.body) == (0, {}, b"")
    copy = only(broker.group, SCHEDULE_TOPIC, queue_of_level(3))
    assert copy.reconsume_times == 1
    assert (bytes(copy.body), copy.flag, copy.sys_flag & 1) == (b"body", 77, 1)
    assert copy.born_timestamp_ms == 1699999999000
    properties = copy.property_map
    assert decode_offset_message_id(properties.pop("ORIGIN_MESSAGE_ID"))[-1] == offset
    assert properties == {
        "TAGS": "TagA", "KEYS": "k1", "UNIQ_KEY": "ABC", "CLUSTER": CLUSTER, "RETRY_TOPIC": "T",
        "WAIT": "false", "DELAY": "3", "REAL_TOPIC": "%RETRY%g", "REAL_QID": "0",
    }  # fmt: skip
    retry = present(broker.group.state.topic_config("%RETRY%g"))
    assert retry.read_queue_nums == 1


@pytest.mark.parametrize("level", ["0", "-1"])
def test_copy_of_a_committed_message_is_no_part_of_a_transaction(
    broker: Broker, level: str
) -> None:
    broker.make_topic()
    record = encode_record(
        topic="T",
        queue_id=0,
        body=b"body",
        properties=PROPERTIES.encode(),
        sys_flag=SYS_FLAG_COMMIT | 1,
        prepared_transaction_offset=77,
    )
    broker.group.propose(batch_of([record], Run("T", 0, 1)), lambda _: None)
    broker.group.settle()
    (unit,) = broker.group.queues.queue("T", 0).read(0, 1)
    assert send_back(broker, int(unit["phy_offset"]), delayLevel=level).code == 0
    where = (SCHEDULE_TOPIC, queue_of_level(3)) if level == "0" else ("%DLQ%g", 0)
    copy = only(broker.group, *where)
    assert (copy.sys_flag & SYS_FLAG_TRANSACTION_MASK, copy.sys_flag & 1) == (0, 1)
    assert copy.prepared_transaction_offset == 0


@pytest.mark.parametrize(
    ("times", "asked", "level"), [(0, 0, 3), (1, 0, 4), (15, 0, 18), (4, 7, 7), (0, 40, 18)]
)
def test_send_back_delays_grow_unless_given(
    broker: Broker, times: int, asked: int, level: int
) -> None:
    broker.make_topic("%RETRY%g", 1)
    offset = sent(broker, "%RETRY%g", times=times)
    assert send_back(broker, offset, delayLevel=str(asked)).code == 0
    copy = only(broker.group, SCHEDULE_TOPIC, queue_of_level(level))
    assert copy.reconsume_times == times + 1
    assert copy.property_map["DELAY"] == str(level)


def test_copy_of_a_copy_names_the_first_message(broker: Broker) -> None:
    broker.make_topic("%RETRY%g", 1)
    reported = (
        "RETRY_TOPIC\x01T\x02ORIGIN_MESSAGE_ID\x01FIRST\x02"
        "REAL_TOPIC\x01%RETRY%g\x02REAL_QID\x010\x02"
    )
    offset = sent(broker, "%RETRY%g", PROPERTIES + reported, times=1)
    assert send_back(broker, offset).code == 0
    copy = only(broker.group, SCHEDULE_TOPIC, queue_of_level(4))
    properties = copy.property_map
    assert (properties["RETRY_TOPIC"], properties["ORIGIN_MESSAGE_ID"]) == ("T", "FIRST")
    assert copy.properties.count(b"REAL_TOPIC\x01") == 1


@pytest.mark.parametrize(
    ("times", "ext", "version", "is_dead"),
    [
        (1, {}, 407, False),
        (2, {}, 407, True),
        (0, {"delayLevel": "-1"}, 407, True),
        (2, {"maxReconsumeTimes": "9"}, 407, False),
        (2, {"maxReconsumeTimes": "9"}, 120, True),
        (1, {"maxReconsumeTimes": "1"}, 407, True),
    ],
)
def test_what_was_tried_too_often_goes_to_the_dead_letters(
    broker: Broker, times: int, ext: dict[str, Any], version: int, is_dead: bool
) -> None:
    give_up_after(broker, 2)
    broker.make_topic()
    reported = "RETRY_TOPIC\x01T\x02ORIGIN_MESSAGE_ID\x01FIRST\x02"
    offset = sent(broker, properties=PROPERTIES + reported, times=times)
    assert send_back(broker, offset, version=version, **ext).code == 0
    state = broker.group.state
    assert state.max_offset("%DLQ%g", 0) == int(is_dead)
    assert sum(state.max_offset(SCHEDULE_TOPIC, queue) for queue in range(18)) == int(not is_dead)
    if is_dead:
        dead = only(broker.group, "%DLQ%g", 0)
        assert dead.reconsume_times == times + 1
        properties = dead.property_map
        assert properties["DLQ_ORIGIN_TOPIC"] == "T"
        assert properties["DLQ_ORIGIN_MESSAGE_ID"] == "FIRST"
        assert not properties.keys() & {"DELAY", "REAL_TOPIC", "REAL_QID"}


def test_copies_are_spread_over_the_queues_of_the_retry_topic(broker: Broker) -> None:
    give_up_after(broker, 16, queues=4)
    broker.make_topic()
    offset = sent(broker)
    for _ in range(40):
        assert send_back(broker, offset).code == 0
    units = broker.group.queues.queue(SCHEDULE_TOPIC, queue_of_level(3)).read(0, 40)
    records = [bytes(broker.group.log.record_at(int(at))) for at in units["phy_offset"]]
    seen = {decode_record(record).property_map["REAL_QID"] for record in records}
    assert seen == {"0", "1", "2", "3"}
    retry = present(broker.group.state.topic_config("%RETRY%g"))
    assert retry.read_queue_nums == 4


def test_group_without_retries_stores_nothing(broker: Broker) -> None:
    give_up_after(broker, 16, queues=0)
    broker.make_topic()
    offset = sent(broker)
    before = broker.group.state.applied_index
    assert send_back(broker, offset).code == 0
    broker.group.settle()
    assert broker.group.state.applied_index == before


@pytest.mark.parametrize(
    ("ext", "code", "says"),
    [
        ({"offset": "999999"}, ResponseCode.SYSTEM_ERROR, "look message by offset failed"),
        ({"offset": "-1"}, ResponseCode.SYSTEM_ERROR, "look message by offset failed"),
        ({"offset": "3"}, ResponseCode.SYSTEM_ERROR, "look message by offset failed"),
        ({"group": "no/name"}, ResponseCode.SYSTEM_ERROR, "illegal characters"),
    ],
)
def test_what_cannot_be_sent_back_is_refused(
    broker: Broker, ext: dict[str, Any], code: ResponseCode, says: str
) -> None:
    broker.make_topic()
    sent(broker)
    response = send_back(broker, 0, **ext)
    assert response.code == code
    assert says in (response.remark or "")


def test_send_back_copies_no_protected_record(broker: Broker) -> None:
    broker.make_topic()
    unit = broker.group.queues.queue(STATE_TOPIC, TOPICS_QUEUE).read(0, 1)
    response = send_back(broker, int(unit["phy_offset"][0]))
    assert response.code == ResponseCode.NO_PERMISSION
    assert broker.group.state.max_offset("%DLQ%g", 0) == 0


def test_an_unknown_group_is_refused_where_groups_are_not_made(group: FakeGroup) -> None:
    broker = Broker(group, auto_create_subscription_group=False)
    broker.make_topic()
    response = send_back(broker, sent(broker))
    assert response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
