"""A group begins where another one stands."""

from __future__ import annotations

from typing import Any

import pytest

from remoting.processor import DEFERRED
from remoting.protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker

CODE = RequestCode.CLONE_GROUP_OFFSET


def commit(broker: Broker, topic: str, queue_id: int, offset: int, *, sync: bool = True) -> None:
    ext = {
        "consumerGroup": "from",
        "topic": topic,
        "queueId": str(queue_id),
        "commitOffset": str(offset),
        **({"sync": "true"} if sync else {}),
    }
    assert broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext).code == 0


def clone(broker: Broker, **more: str) -> RemotingCommand:
    return broker.call(CODE, {"srcGroup": "from", "destGroup": "to", **more})


def offset(broker: Broker, topic: str, queue_id: int) -> int | None:
    return broker.group.state.consumer_offset("to", topic, queue_id)


@pytest.fixture
def filled(broker: Broker) -> Broker:
    for topic in ("T", "U"):
        broker.make_topic(topic, 4)
        commit(broker, topic, 0, 5)
        commit(broker, topic, 3, 7)
    return broker


def test_all_topics_are_cloned_in_one_entry(filled: Broker) -> None:
    commit(filled, "T", 1, 9, sync=False)
    before = filled.group.log.last_index
    assert clone(filled).code == 0
    assert filled.group.log.last_index == before + 1
    assert [offset(filled, "T", queue) for queue in range(4)] == [5, 9, None, 7]
    assert [offset(filled, "U", queue) for queue in range(4)] == [5, None, None, 7]


def test_one_topic_may_be_named(filled: Broker) -> None:
    assert clone(filled, topic="U").code == 0
    assert (offset(filled, "T", 0), offset(filled, "U", 0)) == (None, 5)


def test_what_a_connected_group_no_longer_reads_is_left_behind_unless_asked_for(
    filled: Broker,
) -> None:
    data = ConsumerData("from", subscription_data_set=[SubscriptionData(topic="T")])
    body = HeartbeatData(client_id="c", consumer_data_set=[data]).encode()
    assert filled.call(RequestCode.HEART_BEAT, {}, body).code == 0
    filled.group.settle()
    assert clone(filled, offline="false").code == 0
    assert (offset(filled, "T", 0), offset(filled, "U", 0)) == (5, None)
    assert clone(filled, offline="true").code == 0
    assert offset(filled, "U", 0) == 5


def test_a_group_without_offsets_leaves_nothing(filled: Broker) -> None:
    before = filled.group.log.last_index
    assert filled.call(CODE, {"srcGroup": "nobody", "destGroup": "to"}).code == 0
    assert filled.group.log.last_index == before


@pytest.mark.parametrize(("ext", "code"), [({"destGroup": "a b"}, 1), ({"srcGroup": None}, 1)])
def test_what_makes_no_sense_is_refused(filled: Broker, ext: dict[str, Any], code: int) -> None:
    whole = {"srcGroup": "from", "destGroup": "to", **ext}
    asked = {key: value for key, value in whole.items() if value is not None}
    assert filled.call(CODE, asked).code == code


def test_only_a_leader_clones_and_an_unknown_fate_is_told(filled: Broker) -> None:
    asked = request(CODE, {"srcGroup": "from", "destGroup": "to"})
    assert filled.handle(asked) is DEFERRED
    filled.group.append()
    filled.group.step_down("elsewhere:1")
    assert filled.connection.replies[-1][1].ext["outcome"] == "unknown"
    assert clone(filled).code == 14
