"""What dashboards ask of topics and groups."""

from __future__ import annotations

import json

from dledger.testing.clocks import ManualClock
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand
from tests.harness.broker import Broker


def view(broker: Broker, name: str, key: str) -> RemotingCommand:
    ext = {"statsName": name, "statsKey": key}
    return broker.call(RequestCode.VIEW_BROKER_STATS_DATA, ext)


def pull(broker: Broker) -> None:
    ext = {
        "consumerGroup": "g", "topic": "T", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32",
        "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*",
        "subVersion": "0",
    }  # fmt: skip
    assert broker.call(RequestCode.PULL_MESSAGE, ext).code == 0


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
