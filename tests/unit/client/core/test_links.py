"""Nothing is sent to a broker of another group, whatever the route holds."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
import trio

from dledger.client.core.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    RequestFailedError,
    UnknownOutcomeError,
)
from dledger.client.core.links import KEPT_S, GroupIdentities, stated_identities
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.signature import SIGNED_TOO_LONG_AGO
from tests.unit.client.fake_cluster import Group, World, open_world

OURS, OTHER = "0f" * 16, "e1" * 16


async def add_thief(world: World, *, rocketmq: bool, identity: str | None) -> Group:
    """Start a broker that takes messages under the name "g", and is no member."""
    thief = Group(world, "g", 1, 20911, rocketmq=rocketmq)
    thief.brokers[0].identity = identity
    await thief.brokers[0].start()
    return thief


@pytest.mark.parametrize(
    ("rocketmq", "identity"), [(True, None), (False, None), (False, ""), (False, OTHER)]
)
async def test_a_producer_gives_nothing_to_a_thief_in_the_route(
    world: World, rocketmq: bool, identity: str | None
) -> None:
    world.group.identify(OURS)
    thief = await add_thief(world, rocketmq=rocketmq, identity=identity)
    config = ProducerConfig(send_timeout_s=5.0)
    async with world.client() as client, Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"0"))
        # The NameServer was started again, and the thief came before the group.
        world.group.registered, world.group.stated = {0: thief.brokers[0].address}, ""
        await client.routes.refresh("T")
        with pytest.raises(BrokerUnreachableError, match=f"g is the group {OURS}; nothing was"):
            await producer.send(Message("T", b"1"))
        with pytest.raises(BrokerUnreachableError, match=f"g is the group {OURS}; nothing was"):
            await producer.send_oneway(Message("T", b"2"))
        world.group.register()
        world.group.stated = OURS
        await producer.send(Message("T", b"3"))
    assert thief.bodies() == []
    assert sorted(world.group.bodies()) == [b"0", b"3"]
    sends = (RequestCode.SEND_RECORDS, RequestCode.SEND_MESSAGE_V2)
    assert not [seen for seen in thief.brokers[0].seen if seen.code in sends]


async def test_links_reach_the_group_past_a_false_leader(world: World) -> None:
    group = world.group
    group.identify(OURS)
    thief = await add_thief(world, rocketmq=False, identity=OTHER)
    group.registered[0], group.registered[9] = thief.brokers[0].address, str(group.leader)
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
    assert (thief.bodies(), group.bodies()) == ([], [b"1"])


@pytest.mark.parametrize("rocketmq", [True, False])
async def test_a_cluster_without_identities_is_believed(rocketmq: bool) -> None:
    async with (
        open_world(rocketmq=rocketmq) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        await producer.send(Message("T", b"1"))
        assert world.group.bodies() == [b"1"]


async def test_links_ask_again_after_another_identity(world: World) -> None:
    world.group.identify(OURS)
    world.group.brokers[0].identity = ""  # its group is being founded
    async with (
        world.client() as client,
        Producer(client, "p") as producer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(producer.send, Message("T", b"1"))
        await trio.sleep(0.2)
        world.group.brokers[0].identity = OURS
    assert world.group.bodies() == [b"1"]


async def test_links_keep_nothing_of_brokers_that_went_away(world: World) -> None:
    """A broker in a container has another address each time."""
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
        (address,) = client.links.opened
        await world.group.brokers[0].kill()
        with pytest.raises(BrokerUnreachableError):
            await client.links.open(address, 1.0)
        assert client.links.opened == {}
        async with trio.open_nursery() as nursery:
            # Several wait for the same connection: one opens it.
            for _ in range(3):
                nursery.start_soon(client.links.open, world.group.brokers[1].address, 1.0)
        assert set(client.links.opened) == {world.group.brokers[1].address}
        assert world.group.brokers[1].address not in client.links._opening
        await trio.sleep(120)  # heartbeats look for the broker meanwhile
        assert client.links._opening == {}
    asked = [seen for seen in world.group.brokers[1].seen if seen.code == RequestCode.CAPABILITIES]
    assert len(asked) == 1


@pytest.mark.parametrize("code", [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY])
async def test_links_ask_a_broker_again_that_took_nothing(world: World, code: ResponseCode) -> None:
    broker = world.group.brokers[0]
    broker.not_now = [code]
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
    assert broker.not_now == []
    assert world.group.bodies() == [b"1"]
    sends = {seen.code for seen in broker.seen} & {
        RequestCode.SEND_RECORDS,
        RequestCode.SEND_MESSAGE_V2,
    }
    assert sends == {RequestCode.SEND_RECORDS}, "it is taken for a broker of RocketMQ"


@pytest.mark.parametrize("address", ["nonsense", "a:b", "a:70000", f"{'a' * 64}:1", "a..b:1"])
async def test_what_is_no_address_in_a_route_stops_nothing(world: World, address: str) -> None:
    world.group.registered[7] = address
    rogue = Group(world, "rogue", 1, 20911)
    rogue.registered = {0: address}
    world.groups["rogue"] = rogue
    rogue.topics = {"T": 1}
    queue = MessageQueue("T", "rogue", 0)
    async with world.client() as client, Producer(client, "p") as producer:
        client.heartbeats.add_consumer("c")
        await producer.send_to(MessageQueue("T", "g", 0), Message("T", b"1"))
        assert not await client.heartbeats.send()
        with pytest.raises(BrokerUnreachableError, match=re.escape(f"broker {address}: ")):
            await client.ask(address, RequestCode.RAFT_STATUS)
        with pytest.raises(BrokerUnreachableError, match="not stored"):
            await producer.send_to(queue, Message("T", b"2"), timeout_s=0.5)
        await trio.sleep(2 * client.config.heartbeat_period_s)
        await producer.send_to(MessageQueue("T", "g", 0), Message("T", b"3"))
    assert world.group.bodies() == [b"1", b"3"]


async def test_a_send_names_why_an_account_is_not_let_in(world: World) -> None:
    world.group.identify(OURS)
    for broker in world.group.brokers:
        broker.not_now = [ResponseCode.SYSTEM_ERROR] * 1_000
    async with world.client() as client, Producer(client, "p") as producer:
        with pytest.raises(BrokerUnreachableError, match="refused with code 1: not now") as caught:
            await producer.send(Message("T", b"1"))
    assert caught.value.outcome == "not_stored"
    assert world.group.bodies() == []


async def test_a_refused_account_ends_each_call_at_once(world: World) -> None:
    world.group.let_nobody_in()
    queue = MessageQueue("T", "g", 0)
    async with world.client() as client, Producer(client, "p") as producer:
        calls: list[tuple[Callable[[], Awaitable[object]], type[ClientError]]] = [
            (lambda: producer.send(Message("T", b"1")), BrokerRefusedError),
            (lambda: producer.send_to(queue, Message("T", b"2")), BrokerRefusedError),
            (lambda: producer.send(Message("T", b"3", delay_level=1)), BrokerRefusedError),
            (lambda: producer.send_oneway(Message("T", b"4")), BrokerRefusedError),
            (lambda: client.ask_leader("g", 30, topic="T"), RequestFailedError),
            (lambda: client.ask("10.0.0.1:10911", 30, group="g"), RequestFailedError),
        ]
        for call, kind in calls:
            begin_s = trio.current_time()
            with pytest.raises(kind, match="refused with code 1: not now") as caught:
                await call()
            assert trio.current_time() - begin_s < 0.1
            assert (caught.value.outcome, caught.value.retriable) == ("not_stored", False)
    assert world.group.bodies() == []


async def test_an_account_that_signed_too_late_connects_again(world: World) -> None:
    broker = world.group.brokers[0]
    broker.not_now, broker.says_not_now = [ResponseCode.SYSTEM_ERROR], {"outcome": "not_stored"}
    broker.not_now_remark = f"signature failed: {SIGNED_TOO_LONG_AGO}"
    world.group.identify(OURS)
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
    assert world.group.bodies() == [b"1"]


async def test_a_refused_account_undoes_no_unknown_outcome(world: World) -> None:
    world.group.identify(OURS)
    broker = world.group.brokers[0]

    async def lose_connection() -> None:
        world.group.let_nobody_in()
        await broker.kill()
        await broker.start()

    async def lost() -> RemotingCommand:
        world.nursery.start_soon(lose_connection)
        await trio.sleep_forever()

    broker.intercept = lambda _: lost()
    async with world.client() as client, Producer(client, "p") as producer:
        with pytest.raises(UnknownOutcomeError, match="not now"):
            await producer.send(Message("T", b"1"))
        assert trio.current_time() < 1.0


def test_identity_holds_for_a_while_after_its_last_statement() -> None:
    known = GroupIdentities()
    known.take({"g": OURS}, ["g"], 0.0)
    known.take({}, ["g"], 100.0)
    known.take({}, ["g"], 100.0 + KEPT_S)
    assert known.refusal("g", "") == (
        f"it names no group, and g is the group {OURS}; nothing was sent"
    )
    known.take({}, ["g"], 100.1 + KEPT_S)
    assert known.refusal("g", "") == ""


def test_links_accept_a_new_group_that_the_name_server_states() -> None:
    known = GroupIdentities()
    known.take({"g": OURS}, ["g"], 0.0)
    known.take({"g": OTHER}, ["g"], 1.0)
    assert known.refusal("g", OTHER) == ""
    assert "is of the group" in known.refusal("g", OURS)


@pytest.mark.parametrize("text", [None, 7, "", "{", "[]", '{"g": ["x"]}', '{"g": 1}'])
def test_a_statement_that_cannot_be_read_states_nothing(text: object) -> None:
    assert stated_identities(text) == {}
