"""Administration of a cluster, of single brokers and of NameServers."""

from __future__ import annotations

import msgspec
import pytest

from dledger.client.admin.admin import Admin, judge_group
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ConfirmationNeededError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
)
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.client.trace import TraceBean, TraceContext, TraceType, encode
from dledger.commitlog.errors import ConfigError
from dledger.remoting.protocol.bodies import KVTable, SubscriptionGroupConfig, TopicConfig
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import CONFIRMED_FIELD, GIVES_UP_FIELD, GivenUp
from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import Broker, World, open_world


async def test_a_topic_is_created_seen_and_deleted(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    assert await admin.create_topic("new", queue_nums=3, attributes={"message.type": "FIFO"}) == [
        "g"
    ]
    assert "new" in await admin.topic_list()
    assert len((await admin.topic_route("new")).publish_queues) == 3
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert asked["attributes"] == "+message.type=FIFO"
    await admin.update_topic("new", queue_nums=5, attributes={"retention.ms": None, "a": "b"})
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC][-1]
    assert asked["attributes"] == "-retention.ms,+a=b"
    assert world.group.topics["new"] == 5
    assert await admin.delete_topic("new") == ["g"]
    assert "new" not in await admin.topic_list()
    with pytest.raises(NoRouteError):
        await admin.topic_route("new")


async def test_a_topic_goes_from_each_name_server_that_answers() -> None:
    async with open_world(name_servers=3) as world, world.client() as client:
        admin = Admin(client)
        await admin.create_topic("new")
        silent = world.name_servers[1]
        await silent.kill()
        with pytest.raises(NoNameServerError, match=f"new is deleted in g, .*{silent.address}"):
            await admin.delete_topic("new")
        asked = [server.count(RequestCode.DELETE_TOPIC_IN_NAMESRV) for server in world.name_servers]
        assert asked == [1, 0, 1]
        assert "new" not in world.group.topics
        assert client.routes.table.get("new") is None


async def test_a_topic_that_no_name_server_shows_is_created(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    server.intercept = lambda asked: (
        response_to(asked, 1, "name server not ready")
        if asked.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
        else None
    )
    assert await Admin(client).create_topic("new") == ["g"]
    assert "new" in world.group.topics


async def test_changes_follow_the_leader(world: World, client: ClientInstance) -> None:
    world.group.elect(2, register=False)
    await Admin(client).create_topic("new")
    assert world.group.brokers[2].count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 1


async def test_health_names_what_is_wrong(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    health = (await admin.cluster_health())["g"]
    assert health.healthy
    assert health.leader == "10.0.0.1:10911"
    assert health.term == 1
    await world.group.brokers[1].kill()
    health = (await admin.cluster_health())["g"]
    assert not health.healthy
    assert health.reasons == ("10.0.0.1:10912 does not answer",)


def test_a_leader_of_an_old_term_does_not_count() -> None:
    health = judge_group(
        "g", {"a:1": {"serving": True, "term": 1}, "b:1": {"serving": False, "term": 2}}
    )
    assert health.leader is None
    assert health.reasons == ("no leader",)


async def test_messages_are_viewed_by_offset_message_id(client: ClientInstance) -> None:
    async with Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
        result = await producer.send(Message("T", b"2"))
    admin = Admin(client)
    message = await admin.view_message(result.offset_message_id)
    assert message.body_bytes == b"2"
    assert message.message_id == result.message_id
    with pytest.raises(MessageIllegalError):
        await admin.view_message("nonsense")
    with pytest.raises(RequestFailedError):
        await admin.view_message_at("10.0.0.1:10911", 999999)


async def test_offsets_of_every_queue() -> None:
    async with open_world() as world, world.client() as client:
        async with Producer(client, "p") as producer:
            for _ in range(8):
                await producer.send(Message("T", b"1"))
        offsets = await Admin(client).offsets("T")
    assert offsets == {MessageQueue("T", "g", i): (0, 2) for i in range(4)}


def answer_with(world: World, code: RequestCode, body: bytes = b"", **ext: str) -> None:
    """Let the leader of each group answer *code*, the others that they do not lead."""
    for broker in [broker for group in world.groups.values() for broker in group.brokers]:

        def answer(asked: RemotingCommand, broker: Broker = broker) -> RemotingCommand:
            answer = broker._led(asked, dict(ext))
            if answer.code == 0:
                answer.body = body
            return answer

        broker.on(code, answer)


async def test_change_topic_keeps_the_rest(world: World, client: ClientInstance) -> None:
    config = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=2, perm=4)
    answer_with(world, RequestCode.GET_TOPIC_CONFIG, config.encode())
    await Admin(client).topic_route("T")
    await Admin(client).change_topic("T", "g", {"perm": "6", "attributes": "+retention.ms=1"})
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert asked == {
        **asked,
        "readQueueNums": "3",
        "writeQueueNums": "2",
        "perm": "6",
        "attributes": "+retention.ms=1",
    }
    assert CONFIRMED_FIELD not in asked


async def test_change_that_gives_up_messages_is_confirmed(
    world: World, client: ClientInstance
) -> None:
    lost = GivenUp(change="T: retention.ms = 1", messages={"T": 7})

    def refuse(asked: RemotingCommand) -> RemotingCommand:
        if asked.ext.get(CONFIRMED_FIELD) == "true":
            return response_to(asked, 0, "until it stops")
        return response_to(asked, 1, "gives up", {GIVES_UP_FIELD: lost.encode()})

    broker = world.group.brokers[0]
    broker.on(RequestCode.UPDATE_BROKER_CONFIG, refuse)
    admin = Admin(client)
    with pytest.raises(ConfirmationNeededError) as refused:
        await admin.change_broker_settings(broker.address, {"a": "b"})
    assert refused.value.given_up == lost
    said = await admin.change_broker_settings(broker.address, {"a": "b"}, gives_up_messages=True)
    assert said == "until it stops"


async def test_group_is_paused_where_it_was_not(world: World, client: ClientInstance) -> None:
    (await world.add_group("h", 1, 11_000)).register()
    before = SubscriptionGroupConfig("G", retry_max_times=3, consume_message_orderly=True)
    answer_with(world, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, before.encode())
    answer_with(world, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    admin = Admin(client)
    assert await admin.set_group_enabled("G", True) == []
    assert await admin.set_group_enabled("G", False) == ["g", "h"]
    asked = [
        s.command for s in world.seen if s.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    ]
    paused = msgspec.structs.replace(before, consume_enable=False)
    assert [SubscriptionGroupConfig.decode(one.body) for one in asked] == [paused, paused]


async def test_broker_in_the_place_of_a_name_server_is_named(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    server.intercept = fixed(3, " request type 106 not supported")
    with pytest.raises(ConfigError, match=f"{server.address} is no NameServer"):
        await Admin(client).cluster_info()


async def test_write_permission_changes_in_every_name_server(
    world: World, client: ClientInstance
) -> None:
    (server,) = world.name_servers
    counts = {"wipeTopicCount": "2", "addTopicCount": "2"}
    for code in (RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER):
        server.on(code, fixed(ext=counts))
    admin = Admin(client)
    assert await admin.set_write_perm("g", False) == {server.address: 2}
    assert await admin.set_write_perm("g", True) == {server.address: 2}


QUEUE = MessageQueue("T", "g", 0)
LEADER = "10.0.0.1:10911"


async def test_figures_and_settings_of_one_broker(world: World, client: ClientInstance) -> None:
    broker = world.group.brokers[0]
    table = KVTable(table={"raftTerm": "7"}).encode()
    broker.on(RequestCode.GET_BROKER_RUNTIME_INFO, fixed(body=table))
    broker.on(RequestCode.GET_BROKER_CONFIG, fixed(body=b"brokerName=g\naclEnable=true\n"))
    admin = Admin(client)
    assert await admin.runtime_info(LEADER) == {"raftTerm": "7"}
    assert await admin.broker_settings(LEADER) == {"brokerName": "g", "aclEnable": "true"}


async def test_settings_that_are_refused_carry_the_code(
    world: World, client: ClientInstance
) -> None:
    world.group.brokers[0].on(RequestCode.GET_BROKER_CONFIG, fixed(16, "no permission"))
    with pytest.raises(RequestFailedError) as refused:
        await Admin(client).broker_settings(LEADER)
    assert refused.value.code == 16


async def test_name_servers_are_asked_one_by_one(world: World, client: ClientInstance) -> None:
    admin = Admin(client)
    (name_server,) = world.name_servers

    def settings(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, b"listenPort=9876\n")

    name_server.on(RequestCode.GET_NAMESRV_CONFIG, settings)
    assert await admin.name_server_settings(name_server.address) == {"listenPort": "9876"}
    views = await admin.name_server_views()
    view = views[name_server.address]
    assert view is not None
    assert view.broker_addr_table["g"].broker_addrs[0] == LEADER
    name_server.intercept = fixed(body=b"[1")
    assert await admin.name_server_views() == {name_server.address: None}
    await name_server.kill()
    assert await admin.name_server_views() == {name_server.address: None}
    with pytest.raises(NoNameServerError):
        await admin.name_server_settings(name_server.address)


async def test_a_queue_is_read_where_it_is_asked_for(
    client: ClientInstance, producer: Producer
) -> None:
    for number in range(5):
        await producer.send_to(QUEUE, Message("T", b"%d" % number))
    admin = Admin(client)
    bodies = [message.body_bytes for message in await admin.read_queue(QUEUE, 1, 2)]
    assert bodies == [b"1", b"2"]
    assert [m.queue_offset for m in await admin.read_queue(QUEUE, 4, 9)] == [4]
    assert await admin.read_queue(QUEUE, 5, 9) == []


async def test_messages_outside_the_span_are_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    for number in range(3):
        await producer.send_to(QUEUE, Message("T", b"%d" % number))
    admin = Admin(client)
    stored = [m.store_timestamp_ms for m in await admin.read_queue(QUEUE, 0, 9)]
    # The cluster in memory answers every search by time with offset 1.
    found = await admin.messages_by_time("T", stored[0], stored[-1] + 1, 9)
    assert [message.body_bytes for message in found] == [b"1", b"2"]
    assert await admin.messages_by_time("T", stored[-1] + 1, stored[-1] + 9, 9) == []
    assert len(await admin.messages_by_time("T", 0, stored[-1] + 1, 1)) == 1


async def test_trace_of_other_messages_is_left_out(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    steps = [
        TraceContext(TraceType.PUB, 5, (TraceBean(name, "T", keys="order-1"),), "r", "p", 3)
        for name in ("A", "B")
    ]
    await producer.send(
        Message(TRACE_TOPIC, "".join(map(encode, steps)).encode(), keys="A B order-1")
    )
    records = b"".join(world.group.by_position.values())
    world.group.on(RequestCode.QUERY_MESSAGE, fixed(body=records))
    admin = Admin(client)
    assert [step.beans[0].msg_id for step in await admin.message_trace("A")] == ["A"]
    assert len(await admin.message_trace("order-1")) == 2
