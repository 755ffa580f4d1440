"""Limits of topics, groups, offsets and clients: one more is refused with the setting's name."""

from typing import Any

import pytest

from dledger.remoting.protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import (
    CreateTopicHeader,
    PullMessageHeader,
    SendMessageHeader,
    UpdateConsumerOffsetHeader,
)
from dledger.services.limits import check_limit
from dledger.settings.tables import BrokerTable
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection, FakeGroup

SUBSCRIBES = 4
"""Flag of a pull that brings its subscription."""

LIMITED = "limited account"
"""What the gate notes on a connection."""

LIMITS = {
    "max_topics": 3,
    "max_groups": 2,
    "max_group_topics": 3,
    "max_topics_per_group": 2,
    "max_clients": 4,
    "max_clients_per_group": 3,
}


@pytest.fixture
def broker(group: FakeGroup) -> Broker:
    return Broker(group, **LIMITS)


def create(broker: Broker, topic: str) -> RemotingCommand:
    header = CreateTopicHeader(topic, "TBW102", 1, 1, 6, "SINGLE_TAG", order=False)
    ext = {name: str(value) for name, value in header.encode().items()}
    return broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC, {**ext, "order": "false"})


def send(broker: Broker, topic: str, connection: FakeConnection | None = None) -> RemotingCommand:
    header = SendMessageHeader("p", topic, "TBW102", 1, 0, 0, 1, 0, "")
    return broker.call(RequestCode.SEND_MESSAGE, header.encode(), b"body", connection=connection)


def commit(
    broker: Broker,
    group: str,
    topic: str,
    offset: int = 1,
    connection: FakeConnection | None = None,
) -> RemotingCommand:
    header = UpdateConsumerOffsetHeader(group, topic, 0, offset)
    ext = header.encode()
    return broker.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext, connection=connection)


def pull(broker: Broker, group: str, connection: FakeConnection) -> RemotingCommand:
    header = PullMessageHeader(group, "T", 0, 0, 32, SUBSCRIBES, 0, 0, 0, subscription="*")
    answer = broker.call(RequestCode.PULL_MESSAGE, header.encode(), connection=connection)
    broker.group.settle()
    return answer


def beat(broker: Broker, connection: FakeConnection, *groups: str) -> RemotingCommand:
    body = HeartbeatData(
        client_id="c",
        consumer_data_set=[
            ConsumerData(group, subscription_data_set=[SubscriptionData("T")]) for group in groups
        ],
    )
    return broker.call(RequestCode.HEART_BEAT, {}, body.encode(), connection=connection)


def assert_refused(answer: RemotingCommand, setting: str) -> None:
    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.ext["outcome"] == "not_stored"
    assert f"broker.{setting} allows" in (answer.remark or "")
    assert f"raise broker.{setting}" in (answer.remark or "")


def test_topic_over_the_limit_is_refused(broker: Broker) -> None:
    assert [create(broker, f"T{number}").code for number in range(3)] == [0, 0, 0]
    before = broker.group.log.last_index
    assert_refused(create(broker, "T3"), "max_topics")
    assert_refused(send(broker, "fresh"), "max_topics")
    assert_refused(send(broker, "%RETRY%of-nobody"), "max_topics")
    assert broker.group.log.last_index == before
    assert send(broker, "T0").code == 0
    assert create(broker, "T0").code == 0
    deleted = broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T2"})
    assert deleted.code == 0
    assert create(broker, "T3").code == 0


def test_one_group_more_is_refused(broker: Broker) -> None:
    def put(name: str) -> RemotingCommand:
        body = b'{"groupName":"%s"}' % name.encode()
        return broker.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)

    assert [put("g0").code, put("g1").code] == [0, 0]
    assert_refused(put("g2"), "max_groups")
    assert put("g1").code == 0


def test_retries_of_a_known_group_have_their_topic_in_any_case(broker: Broker) -> None:
    for number in range(3):
        create(broker, f"T{number}")
    assert broker.processors.topics.subscription_group("g") is None
    body = b'{"groupName":"g"}'
    broker.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    broker.make_group("g")
    assert broker.group.state.topic_config("%RETRY%g") is not None


def test_offsets_over_the_limit_are_refused(broker: Broker) -> None:
    for number in range(3):
        create(broker, f"T{number}")
    assert [commit(broker, "g", f"T{number}").code for number in range(2)] == [0, 0]
    assert_refused(commit(broker, "g", "T2"), "max_topics_per_group")
    assert commit(broker, "g", "T1", 7).code == 0, "it has offsets there"
    assert commit(broker, "h", "T2").code == 0
    assert_refused(commit(broker, "i", "T2"), "max_group_topics")
    assert set(broker.group.state.consumer_offsets) == {("g", "T0"), ("g", "T1"), ("h", "T2")}


def test_one_client_more_is_refused_and_its_place_comes_back(broker: Broker) -> None:
    connections = [FakeConnection() for _ in range(5)]
    assert [beat(broker, one, "g").code for one in connections[:3]] == [0, 0, 0]
    assert_refused(beat(broker, connections[3], "g"), "max_clients_per_group")
    assert beat(broker, connections[3], "h").code == 0
    assert_refused(beat(broker, connections[4], "h"), "max_clients")
    assert beat(broker, connections[0], "g").code == 0, "it is in the group"
    connections[0].close()
    assert beat(broker, connections[4], "g").code == 0


def test_producers_count_as_clients(broker: Broker) -> None:
    def produce(connection: FakeConnection, *groups: str) -> RemotingCommand:
        data: Any = [ProducerData(group) for group in groups]
        body = HeartbeatData(client_id="c", producer_data_set=data).encode()
        return broker.call(RequestCode.HEART_BEAT, {}, body, connection=connection)

    first, second = FakeConnection(), FakeConnection()
    assert produce(first, "p", "q", "r").code == 0
    assert produce(first, "p", "q", "r").code == 0
    assert_refused(produce(second, "p", "q"), "max_clients")
    first.close()
    assert produce(second, "p", "q").code == 0


# ------------------------------------------------------------------------------ of an account

OF_ACCOUNT = {
    "max_topics_per_account": 2,
    "max_groups_per_account": 1,
    "max_group_topics_per_account": 2,
    "max_clients_per_account": 3,
}


def connected_as(account: str) -> FakeConnection:
    """Return the connection of a client whose requests an account answers for."""
    return FakeConnection(attributes={LIMITED: account})


@pytest.fixture
def checking(group: FakeGroup) -> Broker:
    return Broker(group, **OF_ACCOUNT)


def test_account_has_its_own_limit_of_topics(checking: Broker) -> None:
    broker, orders = checking, connected_as("orders")
    assert [send(broker, f"T{number}", orders).code for number in range(2)] == [0, 0]
    before = broker.group.log.last_index
    assert_refused(send(broker, "T2", orders), "max_topics_per_account")
    assert broker.group.log.last_index == before
    assert send(broker, "T1", orders).code == 0, "it is there"
    assert send(broker, "T2", connected_as("billing")).code == 0
    assert [send(broker, f"N{number}").code for number in range(3)] == [0, 0, 0], "no account"
    assert broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T0"}).code == 0
    assert send(broker, "T3", connected_as("orders")).code == 0, "a deleted one is not counted"
    assert_refused(send(broker, "T4", orders), "max_topics_per_account")


def test_a_group_too_many_of_an_account_works_with_defaults(checking: Broker) -> None:
    broker, orders = checking, connected_as("orders")
    broker.make_topic("T", 1)
    for name in ("g0", "g1", "g0", "g1"):
        assert pull(broker, name, orders).code in (0, 19, 20)
    assert pull(broker, "h0", connected_as("billing")).code in (0, 19, 20)
    assert set(broker.group.state.subscription_groups) == {"g0", "h0"}


def test_offsets_of_an_account_are_bounded_over_its_groups(checking: Broker) -> None:
    broker, orders = checking, connected_as("orders")
    for number in range(3):
        create(broker, f"T{number}")
    assert commit(broker, "g", "T0", 1, orders).code == 0
    assert commit(broker, "h", "T0", 1, orders).code == 0
    assert_refused(commit(broker, "h", "T1", 1, orders), "max_group_topics_per_account")
    assert commit(broker, "g", "T0", 2, orders).code == 0, "it has offsets there"
    assert commit(broker, "h", "T1", 1, connected_as("billing")).code == 0
    assert commit(broker, "i", "T2", 1).code == 0, "no account"


def test_account_has_its_own_limit_of_clients(checking: Broker) -> None:
    broker = checking
    clients = [connected_as("orders") for _ in range(4)]
    assert [beat(broker, one, "g").code for one in clients[:3]] == [0, 0, 0]
    assert_refused(beat(broker, clients[3], "g"), "max_clients_per_account")
    assert beat(broker, clients[0], "g").code == 0, "it is in the group"
    assert beat(broker, connected_as("billing"), "g").code == 0
    assert beat(broker, FakeConnection(), "g").code == 0, "no account"
    clients[0].attributes[LIMITED] = "billing"
    assert beat(broker, clients[0], "g").code == 0
    clients[0].close()
    assert beat(broker, clients[3], "g").code == 0
    assert_refused(beat(broker, connected_as("orders"), "g"), "max_clients_per_account")


def test_defaults_hold_what_large_clusters_have() -> None:
    held = {
        "max_topics": 20_000 + 2 * 2_000,
        "max_groups": 2_000,
        "max_group_topics": 100_000,
        "max_topics_per_group": 1_000,
        "max_clients": 4 * 2_000,
        "max_clients_per_group": 2_000,
    }
    for name, number in held.items():
        check_limit(BrokerTable(), name, number)
