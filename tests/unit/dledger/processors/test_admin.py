"""Runtime figures, statistics, tables and clean-ups of one broker, as tools read them."""

import json

import pytest

from dledger.processors.admin import CleanUpProcessor, _size
from dledger.remoting.protocol.bodies import KVTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.state.state_record import ConsumerOffsetsChange
from dledger.testing.doubles import ManualClock
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup
from tests.harness.pulls import pull

EXPORTER = {
    "long": (
        *("msgPutTotalTodayNow", "msgGetTotalTodayNow", "msgPutTotalTodayMorning"),
        *("msgGetTotalTodayMorning", "msgPutTotalYesterdayMorning", "msgGetTotalYesterdayMorning"),
        *("sendThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueHeadWaitTimeMills"),
        *("pullThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueSize"),
        *("pullThreadPoolQueueSize", "sendThreadPoolQueueSize", "sendThreadPoolQueueCapacity"),
        *("pullThreadPoolQueueCapacity", "queryThreadPoolQueueCapacity", "bootTimestamp"),
        *("commitLogMinOffset", "commitLogMaxOffset", "dispatchMaxBuffer", "brokerVersion"),
        *("pageCacheLockTimeMills", "getMessageEntireTimeMax", "putMessageTimesTotal"),
        *("startAcceptSendRequestTimeStamp", "putMessageEntireTimeMax", "dispatchBehindBytes"),
        *("earliestMessageTimeStamp", "remainTransientStoreBufferNumbs", "putMessageSizeTotal"),
    ),
    "double": ("consumeQueueDiskRatio", "commitLogDiskRatio", "putMessageAverageSize"),
    "rates": ("putTps", "getMissTps", "getTransferedTps", "getTotalTps", "getFoundTps"),
}
"""What apache/rocketmq-exporter parses of 28, and as what: one that is missing ends its round."""


def test_rocketmq_s_exporter_can_parse_all_it_reads(broker: Broker) -> None:
    broker.make_topic("T")
    broker.group.put("T", 0, b"a" * 1000)
    table = KVTable.decode(broker.call(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    for key in EXPORTER["long"]:
        int(table[key])
    for key in EXPORTER["double"]:
        float(table[key])
    for key in EXPORTER["rates"]:
        assert len([float(part) for part in table[key].split(" ")]) == 3
    for part in table["putMessageDistributeTime"].split(" "):
        span, count = part.split(":")
        assert span[0] + span[-1] == "[]"
        int(count)
    words = table["commitLogDirCapacity"].split(" ")
    assert (words[3][-1], words[7][-1]) == (",", ".")
    for number, unit in ((words[2], words[3][:-1]), (words[6], words[7][:-1])):
        assert float(number) >= 0
        assert unit in ("B", "KiB", "MiB", "GiB", "TiB")
    amount, unit = table["remainHowManyDataToFlush"].split(" ")
    assert (float(amount) >= 0, unit) == (True, "B")
    assert table["runtime"]
    assert int(table["putMessageSizeTotal"]) >= 1000
    assert float(table["putMessageAverageSize"]) > 500


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0.0 B"), (1023, "1023.0 B"), (1536, "1.5 KiB"), (95.6 * 2**30, "95.6 GiB")],
)
def test_sizes_are_written_as_rocketmq_does(size_bytes: float, text: str) -> None:
    assert _size(size_bytes) == text


def view(broker: Broker, name: str, key: str) -> RemotingCommand:
    ext = {"statsName": name, "statsKey": key}
    return broker.call(RequestCode.VIEW_BROKER_STATS_DATA, ext)


def test_what_a_topic_took_and_a_group_got_in_the_last_minute(
    broker: Broker, clock: ManualClock
) -> None:
    broker.make_topic("T")
    broker.processors.throughput.stats.copy_counters(clock.monotonic())
    broker.group.put("T", 0, b"a", b"b", b"c")
    pull(broker)
    pull(broker)
    clock.now_s += 30
    for name, key, count in (
        *(("TOPIC_PUT_NUMS", "T", 3), ("GROUP_GET_NUMS", "T@g", 6)),
        *(("BROKER_PUT_NUMS", "DefaultCluster", 3), ("BROKER_GET_NUMS", "DefaultCluster", 6)),
    ):
        body = json.loads(bytes(view(broker, name, key).body))
        assert body["statsMinute"] == {"sum": count, "tps": count / 30, "avgpt": 0.0}
        assert body["statsHour"]["sum"] == body["statsDay"]["sum"] == count


def test_what_a_group_got_in_bytes(broker: Broker, clock: ManualClock) -> None:
    broker.make_topic("T")
    broker.group.put("T", 0, b"x" * 1000)
    pull(broker)
    clock.now_s += 30
    body = json.loads(bytes(view(broker, "GROUP_GET_SIZE", "T@g").body))
    assert 1000 < body["statsDay"]["sum"] < 1200


def test_what_was_never_counted_is_code_one(broker: Broker) -> None:
    for name, key in (("TOPIC_PUT_NUMS", "X"), ("GROUP_GET_NUMS", "T@x"), ("OTHER", "T")):
        response = view(broker, name, key)
        assert (response.code, response.remark) == (1, f"The stats <{name}> <{key}> not exist")


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
    ],
)
def test_every_member_answers_with_success(broker: Broker, code: RequestCode) -> None:
    assert broker.call(code).code == 0
    broker.group.step_down("elsewhere:1")
    assert broker.call(code).code == 0


def test_the_leader_alone_lets_segments_expire(group: FakeGroup) -> None:
    asked: list[str] = []
    processor = CleanUpProcessor(group, asked.append)
    command = request(RequestCode.DELETE_EXPIRED_COMMITLOG, {"AccessKey": "root"})
    for _ in range(2):
        processor.delete_expired(FakeConnection(), command)  # type: ignore[arg-type]  # a fake with what it uses
        group.step_down("elsewhere:1")
    # No access control: the name in the request proves nothing, so only the host is noted.
    assert asked == [FakeConnection().peer_address[0]]


def test_any_member_answers_all_consumer_offsets(broker: Broker) -> None:
    broker.make_topic("T")
    change = ConsumerOffsetsChange.of((("g", "T", 0, 5), ("g", "T", 1, 300), ("h", "T", 0, 1)))
    broker.group.store(change)
    broker.group.step_down("elsewhere:1")
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_CONSUMER_OFFSET).body))
    assert body["offsetTable"] == {"T@g": {"0": 5, "1": 300}, "T@h": {"0": 1}}
    assert body["dataVersion"]["counter"] == broker.group.state.applied_index


def test_all_delay_offsets_are_answered(broker: Broker) -> None:
    broker.group.state.delay_progress[3] = 8
    body = json.loads(bytes(broker.call(RequestCode.GET_ALL_DELAY_OFFSET).body))
    assert body["offsetTable"] == {"3": 8}
