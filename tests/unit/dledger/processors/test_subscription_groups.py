"""Subscription groups are made, changed, shown and removed through the log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dledger.state.state_record import ConsumerOffsetsChange, state_batch
from remoting.processor import DEFERRED
from remoting.protocol.bodies import (
    GroupRetryPolicy,
    SubscriptionGroupConfig,
    SubscriptionGroupConfigList,
    SubscriptionGroupWrapper,
)
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, request
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection


def put(broker: Broker, name: str = "g", **changes: Any) -> RemotingCommand:
    body = SubscriptionGroupConfig(name, **changes).encode()
    return broker.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)


def shown(broker: Broker, name: str = "g") -> SubscriptionGroupConfig:
    response = broker.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": name})
    assert response.code == 0, response
    return SubscriptionGroupConfig.decode(response.body)


def test_a_group_is_shown_as_it_was_made(broker: Broker) -> None:
    changes: dict[str, Any] = {
        "consume_enable": False,
        "consume_broadcast_enable": False,
        "consume_message_orderly": True,
        "retry_queue_nums": 3,
        "retry_max_times": 5,
        "notify_consumer_ids_changed_enable": False,
        "consume_timeout_minute": 7,
        "attributes": {"a": "b"},
        "group_retry_policy": GroupRetryPolicy("EXPONENTIAL", {"initial": 1, "max": 9}),
    }
    assert put(broker, **changes).code == 0
    assert shown(broker) == SubscriptionGroupConfig("g", **changes)
    assert put(broker).code == 0
    assert shown(broker) == SubscriptionGroupConfig("g")


def test_what_is_as_asked_for_takes_no_entry(broker: Broker) -> None:
    put(broker, retry_max_times=5)
    index = broker.group.state.applied_index
    assert put(broker, retry_max_times=5).code == 0
    assert broker.group.state.applied_index == index


def test_many_groups_change_by_one_entry(broker: Broker) -> None:
    body = SubscriptionGroupConfigList(
        [SubscriptionGroupConfig(name, retry_max_times=4) for name in "abc"]
    ).encode()
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    assert broker.call(code, {}, body).code == 0
    assert broker.group.state.applied_index == 1
    assert [shown(broker, name).retry_max_times for name in "abc"] == [4, 4, 4]


def test_all_groups_are_shown_built_in_ones_too(broker: Broker) -> None:
    put(broker, "z", retry_max_times=2)
    response = broker.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    wrapper = SubscriptionGroupWrapper.decode(response.body)
    assert wrapper.subscription_group_table["z"].retry_max_times == 2
    assert "TOOLS_CONSUMER" in wrapper.subscription_group_table
    assert response.ext["totalGroupNum"] == str(len(wrapper.subscription_group_table))
    assert wrapper.data_version.counter == 1


def test_a_group_that_is_not_there_is_code_26(broker: Broker) -> None:
    response = broker.call(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "nobody"})
    assert response.code == 26


@pytest.mark.parametrize("field", ["cleanOffset", "removeOffset"])
def test_a_group_goes_with_its_offsets_if_asked(broker: Broker, field: str) -> None:
    broker.make_topic("T")
    put(broker)
    offsets = ConsumerOffsetsChange((("g", "T", 0, 5), ("h", "T", 0, 6)))
    broker.group.propose(state_batch(offsets), lambda _: None)
    broker.group.settle()
    broker.processors.offsets.commit("g", "T", 1, 8)
    ext = {"groupName": "g", field: "true"}
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, ext).code == 0
    broker.processors.offsets.flush()
    broker.group.settle()
    state = broker.group.state
    assert (state.subscription_group("g"), state.consumer_offset("g", "T", 0)) == (None, None)
    assert state.consumer_offset("g", "T", 1) is None, "what waited for the next flush is gone"
    assert state.consumer_offset("h", "T", 0) == 6


def test_a_group_goes_and_its_offsets_stay_if_not(broker: Broker) -> None:
    broker.make_topic("T")
    put(broker)
    offsets = ConsumerOffsetsChange((("g", "T", 0, 5),))
    broker.group.propose(state_batch(offsets), lambda _: None)
    broker.group.settle()
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}).code == 0
    assert broker.group.state.consumer_offset("g", "T", 0) == 5
    assert broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}).code == 0


def test_a_change_in_flight_is_seen_by_the_next(broker: Broker) -> None:
    connection = FakeConnection()
    body = SubscriptionGroupConfig("g", consume_enable=False).encode()
    asked = request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    assert broker.handle(asked, connection) is DEFERRED
    assert not shown(broker).consume_enable
    delete = request(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})
    assert broker.handle(delete, connection) is DEFERRED
    broker.group.settle()
    assert [response.code for _, response in connection.replies] == [0, 0]
    assert broker.group.state.subscription_group("g") is None


@pytest.mark.parametrize(
    "body",
    [
        {"groupName": "a/b"},
        {"groupName": ""},
        {"groupName": "g", "retryQueueNums": 65_537},
    ],
)
def test_what_cannot_be_is_refused(broker: Broker, body: dict[str, Any]) -> None:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert broker.call(code, {}, json.dumps(body).encode()).code == 1
    assert broker.group.waiting == 0


def test_a_follower_changes_nothing(broker: Broker) -> None:
    broker.group.step_down("10.0.0.2:10911")
    for response in (
        put(broker),
        broker.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}),
    ):
        assert (response.code, response.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
