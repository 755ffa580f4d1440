"""Clients come, change and go; their groups are notified, unless they settle."""

import json
from typing import Any

import pytest
import trio

from dledger.processors.client_table import SETTLE_S
from dledger.processors.clients import (
    LIST_SOON_S,
    NOTIFIED_AT_ONCE,
    NOTIFIED_LATER_S,
    SettlingGroups,
)
from dledger.processors.get_message import FLAG_SUBSCRIPTION
from dledger.remoting.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    MessageModel,
    ProducerData,
    SubscriptionData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import OUR_VERSION, RemotingCommand, request
from dledger.remoting.protocol.headers import PullMessageHeader
from dledger.services.limits import CLIENT_ID_CHARACTERS, GROUPS_PER_HEARTBEAT
from dledger.state.state_record import SubscriptionGroupsChange
from dledger.state.topics import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.beside import beside
from tests.harness.broker import Broker
from tests.harness.fake_group import FakeConnection
from tests.harness.present import present


def beat(
    broker: Broker,
    connection: FakeConnection,
    *subscriptions: SubscriptionData,
    client_id: str = "c1",
    group: str = "g",
    **changes: Any,
) -> RemotingCommand:
    body = HeartbeatData(
        client_id=client_id,
        producer_data_set=[ProducerData("p")],
        consumer_data_set=[
            ConsumerData(group, subscription_data_set=list(subscriptions), **changes)
        ],
    )
    return broker.call(RequestCode.HEART_BEAT, {}, body.encode(), connection=connection)


def reported(connection: FakeConnection) -> list[str]:
    return [
        command.ext["consumerGroup"]
        for command in connection.asked
        if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    ]


def pull(broker: Broker, group: str = "g", topic: str = "T") -> RemotingCommand:
    header = PullMessageHeader(group, topic, 0, 0, 32, FLAG_SUBSCRIPTION, 0, 0, 0, "*")
    connection = FakeConnection()
    handled = broker.handle(request(RequestCode.PULL_MESSAGE, header.encode()), connection)
    return handled if isinstance(handled, RemotingCommand) else connection.reply_


def test_heartbeats_of_unknown_groups_make_nothing(broker: Broker) -> None:
    broker.make_topic("T", 1)
    before = broker.group.log.last_index
    for number in range(100):
        response = beat(broker, FakeConnection(), SubscriptionData("T"), group=f"g{number}")
        assert (response.code, response.version) == (0, OUR_VERSION)
    broker.group.settle()
    assert broker.group.log.last_index == before
    assert ids(broker, "g7") == ["c1"], "its members are known all the same"


def test_first_pull_creates_group_and_retry_topic(broker: Broker) -> None:
    broker.make_topic("T", 1)
    before, topics = broker.group.log.last_index, broker.group.state.topics_counter
    beat(broker, FakeConnection(), SubscriptionData("T"))
    pull(broker, topic="missing")
    assert broker.group.waiting == 0, "no such topic"
    pull(broker)
    pull(broker)
    broker.group.settle()
    assert broker.group.log.last_index == before + 1, "both pulls, one entry"
    assert broker.group.state.topics_counter == topics + 1
    assert broker.group.state.subscription_group("g") is not None
    retry = present(broker.group.state.topic_config("%RETRY%g"))
    assert (retry.read_queue_nums, retry.perm) == (1, 6)
    beat(broker, FakeConnection(), SubscriptionData("T"))
    assert broker.group.waiting == 0


def test_heartbeat_creates_a_missing_retry_topic(broker: Broker) -> None:
    broker.group.store(SubscriptionGroupsChange(put=(SubscriptionGroupConfig("g"),)))
    beat(broker, FakeConnection(), SubscriptionData("T"))
    broker.group.settle()
    assert broker.group.state.topic_config("%RETRY%g") is not None


@pytest.mark.parametrize(
    "data",
    [
        HeartbeatData(client_id="c", producer_data_set=[ProducerData("p\x1b[2J")]),
        HeartbeatData(client_id="c", producer_data_set=[ProducerData("")]),
        HeartbeatData(client_id="c", consumer_data_set=[ConsumerData("g g")]),
        HeartbeatData(
            client_id="c",
            consumer_data_set=[ConsumerData("g", subscription_data_set=[SubscriptionData("../x")])],
        ),
        HeartbeatData(client_id="c" * (CLIENT_ID_CHARACTERS + 1)),
        HeartbeatData(
            client_id="c",
            consumer_data_set=[ConsumerData(f"g{n}") for n in range(GROUPS_PER_HEARTBEAT + 1)],
        ),
    ],
)
def test_a_heartbeat_with_names_that_cannot_be_is_refused_whole(
    broker: Broker, data: HeartbeatData
) -> None:
    connection = FakeConnection()
    refused = broker.call(RequestCode.HEART_BEAT, {}, data.encode(), connection=connection)
    assert (refused.code, refused.ext["outcome"]) == (ResponseCode.SYSTEM_ERROR, "not_stored")
    assert list(broker.processors.clients.consumer_groups) == []
    assert broker.processors.clients.producer_groups() == []
    assert connection.heartbeats == 0


def test_a_follower_registers_clients_and_proposes_nothing(broker: Broker) -> None:
    broker.group.step_down()
    assert beat(broker, FakeConnection(), SubscriptionData("T")).code == 0
    assert broker.group.waiting == 0
    assert broker.processors.clients.consumer_group("g") is not None


def test_a_new_client_and_a_changed_subscription_wake_the_group(broker: Broker) -> None:
    one, two = FakeConnection(), FakeConnection()
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    assert reported(one) == ["g"]
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    assert reported(one) == ["g"], "nothing changed"
    beat(broker, two, SubscriptionData("T"), client_id="c2")
    assert (reported(one), reported(two)) == (["g", "g"], ["g"])
    beat(broker, two, SubscriptionData("T"), SubscriptionData("U"), client_id="c2")
    assert (len(reported(one)), len(reported(two))) == (3, 2)


def test_the_newer_subscription_stays_and_missing_topics_go(broker: Broker) -> None:
    one = FakeConnection()
    beat(broker, one, SubscriptionData("T", "A", sub_version=5), SubscriptionData("U"))
    beat(broker, one, SubscriptionData("T", "B", sub_version=4))
    group = present(broker.processors.clients.consumer_group("g"))
    assert list(group.subscriptions) == ["T"]
    assert group.subscriptions["T"].data.sub_string == "A"
    beat(broker, one, SubscriptionData("T", "B", sub_version=6))
    assert group.subscriptions["T"].data.sub_string == "B"


def test_broadcast_groups_are_not_notified(broker: Broker) -> None:
    one = FakeConnection()
    beat(broker, one, SubscriptionData("T"), message_model=MessageModel.BROADCASTING)
    assert reported(one) == []


def test_a_closed_connection_leaves_all_its_groups(broker: Broker) -> None:
    one, two = FakeConnection(), FakeConnection()
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    beat(broker, two, SubscriptionData("T"), client_id="c2")
    beat(broker, one, SubscriptionData("T"), client_id="c1", group="h")
    before = len(reported(two))
    one.close()
    assert len(reported(two)) == before + 1
    assert broker.processors.clients.consumer_group("h") is None
    assert [client.client_id for client in broker.processors.clients.producers("p")] == ["c2"]


def test_a_client_may_say_goodbye(broker: Broker) -> None:
    one, two = FakeConnection(), FakeConnection()
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    beat(broker, two, SubscriptionData("T"), client_id="c2")
    before = len(reported(two))
    ext = {"clientID": "c1", "producerGroup": "p", "consumerGroup": "g"}
    assert broker.call(RequestCode.UNREGISTER_CLIENT, ext, connection=one).code == 0
    assert len(reported(two)) == before + 1
    # the C++ client sends an empty name for what it has not
    ext = {"clientID": "c2", "producerGroup": "", "consumerGroup": "g"}
    assert broker.call(RequestCode.UNREGISTER_CLIENT, ext, connection=two).code == 0
    assert broker.processors.clients.consumer_group("g") is None
    assert len(broker.processors.clients.producers("p")) == 1


def test_the_clients_of_a_group_are_listed(broker: Broker) -> None:
    ask = {"consumerGroup": "g"}
    code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
    assert broker.call(code, ask).code == 1
    beat(broker, FakeConnection(), SubscriptionData("T"), client_id="c1")
    beat(broker, FakeConnection(), SubscriptionData("T"), client_id="c2")
    response = broker.call(code, ask)
    assert json.loads(bytes(response.body)) == {"consumerIdList": ["c1", "c2"]}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (SubscriptionData("T", "A || B"), 0),
        (SubscriptionData("T", "||"), 23),
        (SubscriptionData("T", "a > 1", expression_type="SQL92"), 0),
        (SubscriptionData("T", "a >", expression_type="SQL92"), 23),
        (SubscriptionData("T", "*", expression_type="SQL92"), 23),
        (SubscriptionData("T", "a > 1", expression_type="JAVA"), 1),
        (SubscriptionData("T", "a >", expression_type="JAVA", class_filter_mode=True), 0),
        (None, 0),
    ],
)
def test_expressions_are_checked(broker: Broker, data: SubscriptionData | None, code: int) -> None:
    body = CheckClientRequestBody("c", "g", data).encode()
    assert broker.call(RequestCode.CHECK_CLIENT_CONFIG, {}, body).code == code


async def test_a_silent_client_is_taken_out(virtual: Broker) -> None:
    silent, alive = FakeConnection(), FakeConnection()
    async with beside(virtual.processors.clients_processor.run):
        beat(virtual, silent, SubscriptionData("T"), client_id="c1")
        for _ in range(6):
            await trio.sleep(25)
            beat(virtual, alive, SubscriptionData("T"), client_id="c2")
        assert silent.closed == "no heartbeat"
        assert not alive.closed
        left: Any = silent  # a connection without clients is not silent: it stays
        assert not virtual.processors.clients.is_silent(left, trio.current_time())
        consumers = present(virtual.processors.clients.consumer_group("g"))
        assert [client.client_id for client in consumers.clients.values()] == ["c2"]


def ids(broker: Broker, group: str = "g") -> list[str] | int:
    """Return what 38 answers: the list, or the code of a refusal."""
    response = broker.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    if response.code:
        return response.code
    found: list[str] = json.loads(bytes(response.body))["consumerIdList"]
    return found


def elect(broker: Broker) -> None:
    """Let the broker lose its leadership and win the next one."""
    broker.group.step_down()
    broker.processors.role_changed()
    broker.group.lead()
    broker.processors.role_changed()


async def test_new_leader_that_may_not_know_a_group_lists_it_later(virtual: Broker) -> None:
    virtual.make_group("g")
    beat(virtual, FakeConnection(), SubscriptionData("T"), client_id="c1")
    elect(virtual)  # of a member that has just started
    code, ext = RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}
    async with beside(virtual.processors.clients_processor.run):
        refused: Any = virtual.handle(request(code, dict(ext)), FakeConnection())
        assert (await refused).code == ResponseCode.SYSTEM_BUSY
        assert trio.current_time() == LIST_SOON_S
        asked = request(code, dict(ext))
        asked.language = "GO"  # it takes an error for an empty list
        waiting: Any = virtual.handle(asked, FakeConnection())
        await trio.sleep(SETTLE_S - LIST_SOON_S - 1)
        beat(virtual, FakeConnection(), SubscriptionData("T"), client_id="c2")
        answered = await waiting
        assert trio.current_time() == SETTLE_S
        assert json.loads(bytes(answered.body)) == {"consumerIdList": ["c1", "c2"]}


async def test_list_that_waits_is_refused_when_leadership_ends(virtual: Broker) -> None:
    virtual.make_group("g")
    elect(virtual)
    code, ext = RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}
    waiting: Any = virtual.handle(request(code, dict(ext)), FakeConnection())

    def end() -> None:
        virtual.group.step_down("10.0.0.2:10911")
        virtual.processors.role_changed()

    answered = await virtual.finish(waiting, end)
    assert (answered.code, answered.ext["leaderAddr"]) == (14, "10.0.0.2:10911")


def test_new_leader_lists_a_group_that_it_knew_before(broker: Broker, clock: ManualClock) -> None:
    beat(broker, FakeConnection(), SubscriptionData("T"), client_id="c1")
    broker.make_group("g")
    clock.now_s += SETTLE_S
    elect(broker)
    assert ids(broker) == ["c1"]


def test_a_group_that_is_new_is_known_at_once(broker: Broker) -> None:
    elect(broker)
    beat(broker, FakeConnection(), SubscriptionData("T"), client_id="c1")
    assert ids(broker) == ["c1"]


def test_follower_knows_members_and_notifies_none(broker: Broker) -> None:
    broker.group.step_down("10.0.0.2:10911")
    one, two = FakeConnection(), FakeConnection()
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    beat(broker, two, SubscriptionData("T"), client_id="c2")
    two.close()
    assert reported(one) == []
    response = broker.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert (response.code, response.ext["leaderAddr"]) == (14, "10.0.0.2:10911")
    broker.group.lead()
    assert ids(broker) == ["c1"], "it knew before it led"


def test_leader_change_notifies_no_client(broker: Broker, clock: ManualClock) -> None:
    one = FakeConnection()
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    broker.group.settle()
    before = reported(one)
    elect(broker)
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    clock.now_s += SETTLE_S
    beat(broker, one, SubscriptionData("T"), client_id="c1")
    assert reported(one) == before


async def test_changes_are_notified_when_the_group_has_settled(virtual: Broker) -> None:
    one, late = FakeConnection(), FakeConnection()
    virtual.make_group("g")
    beat(virtual, one, SubscriptionData("T"), client_id="c1")
    virtual.group.settle()
    before = len(reported(one))
    async with beside(virtual.processors.clients_processor.run):
        await trio.sleep(5)
        elect(virtual)
        began = trio.current_time()
        beat(virtual, late, SubscriptionData("T"), client_id="c2")
        await trio.sleep(SETTLE_S - 0.01)
        assert (len(reported(one)) - before, len(reported(late))) == (0, 0)
        await trio.sleep(0.02)
        assert (len(reported(one)) - before, len(reported(late))) == (1, 1)
        assert trio.current_time() - began < SETTLE_S + 0.1
        await trio.sleep(50)
        assert len(reported(late)) == 1, "once"


def test_a_client_on_a_second_connection_is_no_change(broker: Broker) -> None:
    first, second, other = FakeConnection(), FakeConnection(), FakeConnection()
    beat(broker, other, SubscriptionData("T"), client_id="c2")
    beat(broker, first, SubscriptionData("T"), client_id="c1")
    before = len(reported(other))
    beat(broker, second, SubscriptionData("T"), client_id="c1")
    first.close()
    assert len(reported(other)) == before
    assert ids(broker) == ["c2", "c1"]
    second.close()
    assert len(reported(other)) == before + 1


def test_a_group_may_ask_not_to_be_woken(broker: Broker) -> None:
    config = SubscriptionGroupConfig("g", notify_consumer_ids_changed_enable=False)
    broker.group.store(SubscriptionGroupsChange(put=(config,)))
    one = FakeConnection()
    beat(broker, one, SubscriptionData("T"))
    assert reported(one) == []


async def test_changes_of_a_large_group_are_notified_together(virtual: Broker) -> None:
    members = [FakeConnection() for _ in range(3 * NOTIFIED_AT_ONCE)]
    async with beside(virtual.processors.clients_processor.run, virtual.group.turns.run):
        for number, member in enumerate(members):
            await trio.testing.wait_all_tasks_blocked()
            beat(virtual, member, SubscriptionData("T"), client_id=f"c{number}")
        calls = sum(len(reported(member)) for member in members)
        assert calls == NOTIFIED_AT_ONCE * (NOTIFIED_AT_ONCE + 1) // 2

        await trio.sleep(NOTIFIED_LATER_S + 0.01)

        assert sum(len(reported(member)) for member in members) == calls + len(members)
        assert reported(members[-1]) == ["g"]
        await trio.sleep(5)
        assert sum(len(reported(member)) for member in members) == calls + len(members)
        members[0].close()
        assert len(reported(members[1])) == NOTIFIED_AT_ONCE
        await trio.sleep(NOTIFIED_LATER_S + 0.01)
        assert reported(members[-1]) == ["g", "g"]


def test_nothing_settles_without_groups_or_leadership() -> None:
    settling = SettlingGroups()
    settling.begin(0.0, [])
    assert settling.until_s is None
    settling.begin(0.0, ["a"])
    assert settling.holds("a", 1.0)
    settling.end()
    assert not settling.holds("a", 1.0)
    assert settling.pop_settled(1000.0) == []
