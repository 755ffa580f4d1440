"""Single daemons asked through Admin, and messages read where they lie."""

from __future__ import annotations

import pytest

from dledger.client.admin.admin import Admin
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import NoNameServerError, RequestFailedError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.client.trace import TraceBean, TraceContext, TraceType, encode
from dledger.remoting.protocol.bodies import KVTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from tests.unit.client.fake_cluster import World

QUEUE = MessageQueue("T", "g", 0)
LEADER = "10.0.0.1:10911"


async def test_figures_and_settings_of_one_broker(world: World, client: ClientInstance) -> None:
    broker = world.groups["g"].brokers[0]
    table = KVTable(table={"raftTerm": "7"}).encode()
    broker.on(
        RequestCode.GET_BROKER_RUNTIME_INFO, lambda asked: response_to(asked, 0, None, {}, table)
    )
    broker.on(
        RequestCode.GET_BROKER_CONFIG,
        lambda asked: response_to(asked, 0, None, {}, b"brokerName=g\naclEnable=true\n"),
    )
    admin = Admin(client)
    assert await admin.runtime_info(LEADER) == {"raftTerm": "7"}
    assert await admin.broker_settings(LEADER) == {"brokerName": "g", "aclEnable": "true"}


async def test_settings_that_are_refused_carry_the_code(
    world: World, client: ClientInstance
) -> None:
    world.groups["g"].brokers[0].on(
        RequestCode.GET_BROKER_CONFIG, lambda asked: response_to(asked, 16, "no permission")
    )
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
    name_server.intercept = lambda asked: response_to(asked, 0, None, None, b"[1")
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
    records = b"".join(world.groups["g"].by_position.values())
    for broker in world.groups["g"].brokers:
        broker.on(RequestCode.QUERY_MESSAGE, lambda asked: response_to(asked, 0, None, {}, records))
    admin = Admin(client)
    assert [step.beans[0].msg_id for step in await admin.message_trace("A")] == ["A"]
    assert len(await admin.message_trace("order-1")) == 2
