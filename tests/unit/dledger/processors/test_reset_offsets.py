"""Offsets of a group are reckoned, and its clients told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dledger.testing.clocks import ManualClock
from remoting.processor import DEFERRED
from remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection

CODE = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


@pytest.fixture
def filled(broker: Broker, clock: ManualClock) -> Broker:
    """Ten messages in queue 0, a second apart; the group has consumed six."""
    broker.make_topic("T", 2)
    for number in range(10):
        broker.group.put("T", 0, b"m%d" % number)
        clock.now_s += 1
    for queue_id in range(2):
        ext = {
            "consumerGroup": "g",
            "topic": "T",
            "queueId": str(queue_id),
            "commitOffset": "6" if queue_id == 0 else "0",
            "sync": "true",
        }
        assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext).code == 0
    return broker


def connect(broker: Broker, *, language: str = "JAVA", version: int = 407) -> FakeConnection:
    connection = FakeConnection()
    data = ConsumerData("g", subscription_data_set=[SubscriptionData(topic="T")])
    body = HeartbeatData(client_id=f"c-{language}", consumer_data_set=[data]).encode()
    command = request(RequestCode.HEART_BEAT, {}, body)
    command.language, command.version = language, version
    broker.handle(command, connection)
    broker.group.settle()
    connection.asked.clear()
    return connection


def reset(broker: Broker, **changes: Any) -> RemotingCommand:
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true", **changes}
    return broker.call(CODE, {key: str(value) for key, value in ext.items()})


def offsets(body: Any) -> dict[int, int]:
    """Read the fastjson dialect: a queue is a key."""
    text = bytes(body).decode()
    found = {}
    for part in text.removeprefix('{"offsetTable":{').removesuffix("}}").split(",{"):
        queue, _, offset = part.rpartition(":")
        found[json.loads("{" + queue.lstrip("{"))["queueId"]] = int(offset)
    return found


def test_the_answer_and_what_clients_are_told_are_the_same(filled: Broker) -> None:
    client = connect(filled)
    response = reset(filled)
    assert (response.code, offsets(response.body)) == (0, {0: 10, 1: 0})
    (told,) = client.asked
    assert told.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
    assert told.ext == {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    assert bytes(told.body) == bytes(response.body)


def test_the_cpp_client_is_told_in_its_own_form(filled: Broker) -> None:
    client = connect(filled, language="CPP", version=63)
    reset(filled)
    (told,) = client.asked
    assert json.loads(bytes(told.body)) == {
        "offsetTable": [
            {"topic": "T", "brokerName": "broker-a", "queueId": 0, "offset": 10},
            {"topic": "T", "brokerName": "broker-a", "queueId": 1, "offset": 0},
        ]
    }


@pytest.mark.parametrize(
    ("after_s", "force", "offset"),
    [(2, "true", 2), (2, "false", 2), (8, "true", 8), (8, "false", 6)],
)
def test_a_time_is_where_its_first_message_is_and_without_force_only_back(
    filled: Broker, after_s: int, force: str, offset: int
) -> None:
    connect(filled)
    began_ms = filled.clock.wall_ms() - 10_000
    response = reset(filled, timestamp=began_ms + 1000 * after_s, isForce=force)
    assert offsets(response.body)[0] == offset


@pytest.mark.parametrize(("asked", "offset"), [(4, 4), (99, 10)])
def test_one_queue_may_be_set_to_an_offset_it_has(filled: Broker, asked: int, offset: int) -> None:
    connect(filled)
    assert offsets(reset(filled, queueId=0, offset=asked).body) == {0: offset}


def test_without_clients_the_tools_are_told_to_do_it_themselves(filled: Broker) -> None:
    response = reset(filled)
    assert response.code == 206
    assert "Group: g Topic: T" in (response.remark or "")


@pytest.mark.parametrize(
    "changes", [{"topic": "X"}, {"group": "other"}, {"queueId": 7}, {"timestamp": "x"}]
)
def test_what_is_not_there_is_refused(filled: Broker, changes: dict[str, Any]) -> None:
    client = connect(filled)
    assert reset(filled, **changes).code == 1
    assert client.asked == []


def test_one_old_client_is_enough_for_nobody_to_be_told(filled: Broker) -> None:
    client, _ = connect(filled), connect(filled, language="OLD", version=20)
    client.asked.clear()
    assert reset(filled).code == 1
    assert client.asked == []


def test_the_end_is_asked_behind_the_barrier_of_a_leader(filled: Broker) -> None:
    connect(filled)
    filled.group.barriers_pass = False
    ext = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    assert filled.handle(request(CODE, ext)) is DEFERRED
    filled.group.put("T", 0, b"late")
    filled.group.pass_barriers()
    assert offsets(filled.connection.replies[-1][1].body)[0] == 11
    filled.group.step_down("elsewhere:1")
    assert reset(filled).code == 14
