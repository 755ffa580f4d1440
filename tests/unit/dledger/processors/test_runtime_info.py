"""The table that mqadmin and the dashboard read."""

from __future__ import annotations

import pytest

from dledger.processors.admin import _size
from remoting.protocol.bodies import KVTable
from remoting.protocol.codes import RequestCode
from tests.harness.broker import Broker

KEYS = [
    "brokerActive",
    "brokerVersion",
    "brokerVersionDesc",
    "bootTimestamp",
    "runtime",
    "putTps",
    "getFoundTps",
    "getMissTps",
    "getTotalTps",
    "getTransferedTps",
    "getTransferredTps",
    "putMessageTimesTotal",
    "earliestMessageTimeStamp",
    "msgPutTotalYesterdayMorning",
    "msgPutTotalTodayMorning",
    "msgPutTotalTodayNow",
    "msgGetTotalYesterdayMorning",
    "msgGetTotalTodayMorning",
    "msgGetTotalTodayNow",
    "commitLogDiskRatio",
    "consumeQueueDiskRatio",
    "commitLogMinOffset",
    "commitLogMaxOffset",
    "remainHowManyDataToFlush",
    "dispatchBehindBytes",
    "sendThreadPoolQueueSize",
    "sendThreadPoolQueueCapacity",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueSize",
    "pullThreadPoolQueueCapacity",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "litePullThreadPoolQueueSize",
    "queryThreadPoolQueueSize",
    "queryThreadPoolQueueCapacity",
    "scheduleMessageOffset_1",
    "scheduleMessageOffset_18",
    "raftTerm",
    "raftAppliedIndex",
]


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


def test_the_keys_of_the_tools_are_there_and_can_be_parsed_as_they_do(broker: Broker) -> None:
    broker.make_topic("T")
    before = broker.processors.throughput.put
    broker.group.put("T", 0, b"a", b"b")
    table = KVTable.decode(broker.call(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert set(KEYS) - table.keys() == set()
    for rate in ("putTps", "getTransferedTps", "getTransferredTps", "getTotalTps"):
        assert len([float(part) for part in table[rate].split(" ")]) == 3
    float(table["commitLogDiskRatio"])
    assert int(table["earliestMessageTimeStamp"]) == broker.clock.wall_ms()
    assert int(table["msgPutTotalTodayNow"]) == before + 2
    assert table["commitLogMaxOffset"] == str(broker.group.log.end_position)
    assert table["commitLogMinOffset"] == "0"
