"""The table that mqadmin and the dashboard read."""

from __future__ import annotations

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
