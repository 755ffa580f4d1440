"""A client instance: made from settings, announced by heartbeats, closed."""

from pathlib import Path

import msgspec
import pytest
import trio
import trustme

from dledger.client.connect import connect, credentials_from, tls_from
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.errors import BrokerUnreachableError, ClientClosedError
from dledger.client.core.heartbeats import AGAIN_S
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BusyError
from dledger.remoting.protocol.bodies import ConsumerData, HeartbeatData
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import SerializeType
from dledger.remoting.protocol.signature import Credentials
from tests.unit.client.fake_cluster import World, open_world


async def test_one_heartbeat_per_broker_every_30_s() -> None:
    async with open_world() as world, world.client(instance_name="i") as client:
        async with Producer(client, "p1") as one, Producer(client, "p2") as two:
            await one.send(Message("T", b"1"))
            await two.send(Message("T", b"2"))
            await trio.sleep(1)
            begun = world.group.brokers[0].count(RequestCode.HEART_BEAT)
            await trio.sleep(90)
            beats = [s for s in world.group.brokers[0].seen if s.code == RequestCode.HEART_BEAT]
            assert len(beats) - begun == 3
            assert world.group.brokers[1].count(RequestCode.HEART_BEAT) == 0
            assert world.network.connects["10.0.0.1", 10911] == 1
        body = msgspec.json.decode(beats[-1].command.body)
    assert body == {
        "clientID": "10.0.0.9@i",
        "consumerDataSet": [],
        "heartbeatFingerprint": 0,
        "producerDataSet": [{"groupName": "p1"}, {"groupName": "p2"}],
        "withoutSub": False,
    }
    assert beats[-1].command.serialize is SerializeType.JSON
    assert beats[-1].command.ext == {}


async def test_heartbeat_reaches_a_new_leader_at_once(world: World, client: ClientInstance) -> None:
    """Also when its connection was open before for something else."""
    for broker in world.group.brokers:
        await client.ask(broker.address, RequestCode.RAFT_STATUS)
    async with Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
        await trio.sleep(0.1)
        assert world.group.brokers[0].count(RequestCode.HEART_BEAT) > 0
        world.group.elect(2, register=False)
        await producer.send(Message("T", b"2"))
        await trio.sleep(0.1)
        assert world.group.brokers[2].count(RequestCode.HEART_BEAT) > 0


async def test_consumers_are_announced_to_followers_too() -> None:
    async with (
        open_world() as world,
        world.client(instance_name="i") as client,
        PullConsumer(client, "c") as consumer,
    ):
        await consumer.fetch_message_queues("T")
        await trio.sleep(31)
        (beat,) = [s for s in world.group.brokers[2].seen if s.code == RequestCode.HEART_BEAT][:1]
        with pytest.raises(ConfigError, match="in use"):
            client.heartbeats.add_consumer("c")
    (data,) = msgspec.json.decode(beat.command.body)["consumerDataSet"]
    assert data["groupName"] == "c"
    assert data["consumeType"] == "CONSUME_ACTIVELY"
    assert data["messageModel"] == "CLUSTERING"


async def test_close_unregisters_both_groups() -> None:
    async with open_world() as world:
        async with (
            world.client(instance_name="i") as client,
            Producer(client, "p") as producer,
            PullConsumer(client, "c"),
        ):
            await producer.send(Message("T", b"1"))
        byes = [
            s.command.ext
            for s in world.group.brokers[0].seen
            if s.code == RequestCode.UNREGISTER_CLIENT
        ]
    assert byes == [
        {"clientID": "10.0.0.9@i", "consumerGroup": "c"},
        {"clientID": "10.0.0.9@i", "producerGroup": "p"},
    ]


async def test_close_unregisters_a_shared_group_once(world: World, client: ClientInstance) -> None:
    async with Producer(client, "p") as one:
        await one.send(Message("T", b"1"))
        async with Producer(client, "p"):
            pass
        assert world.count(RequestCode.UNREGISTER_CLIENT) == 0
    assert world.count(RequestCode.UNREGISTER_CLIENT) == 1


async def test_a_client_id_is_open_once_per_process(world: World) -> None:
    async with world.client(instance_name="i"):
        with pytest.raises(ConfigError, match="share its instance"):
            async with world.client(instance_name="i"):
                pass
    async with world.client(instance_name="i"):
        pass


async def test_the_callers_error_comes_out_as_it_is(world: World) -> None:
    error = ValueError("mine")

    async def use() -> None:
        async with world.client() as client, Producer(client, "p") as producer:
            await producer.send(Message("T", b"1"))
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        await use()
    assert caught.value is error


async def test_a_closed_instance_refuses(world: World) -> None:
    client = world.client()
    with pytest.raises(ClientClosedError):
        async with Producer(client, "p"):
            pass
    async with client:
        pass
    with pytest.raises(ClientClosedError):
        await client.link("10.0.0.1:10911", 1.0)
    with pytest.raises(ClientClosedError):
        await client.__aenter__()


async def test_routes_are_polled_every_30_s(world: World, producer: Producer) -> None:
    await producer.send(Message("T", b"1"))
    world.group.topics["T"] = 6
    await trio.sleep(31)
    queues = {(await producer.send(Message("T", b"x"))).message_queue.queue_id for _ in range(6)}
    assert queues == set(range(6))


async def test_a_broker_that_never_answers_is_unreachable(
    world: World, client: ClientInstance
) -> None:
    world.network.silent.add(("10.0.0.1", 10912))
    began = trio.current_time()
    with pytest.raises(BrokerUnreachableError):
        await client.ask("10.0.0.1:10912", RequestCode.RAFT_STATUS, timeout_s=2.0)
    assert trio.current_time() - began == pytest.approx(2.0)


async def test_news_wakes_heartbeats_after_others_sent_some(
    world: World, client: ClientInstance
) -> None:
    leader = world.group.brokers[0]
    async with Producer(client, "p") as producer:
        await producer.send(Message("T", b"1"))
        await trio.sleep(1)
        await client.heartbeats.send()
        before = leader.count(RequestCode.HEART_BEAT)
        client.heartbeats.add_producer("another")
        await trio.sleep(1)
        assert leader.count(RequestCode.HEART_BEAT) == before + 1
        client._announcements.wake()
        await trio.sleep(1)
        assert leader.count(RequestCode.HEART_BEAT) == before + 1


async def test_block_of_an_abandoned_client_goes_on(world: World) -> None:
    async with world.client(route_poll_period_s=5.0) as client:
        await client.route("T")
        client.abandon()
        await trio.sleep(60)
        with pytest.raises(ClientClosedError):
            await client.ask("10.0.0.1:10911", RequestCode.CAPABILITIES)


async def test_a_refused_heartbeat_is_sent_again_soon(world: World, client: ClientInstance) -> None:
    refusals = [2]

    def heard(_connection: Connection, _data: HeartbeatData) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise BusyError("too many heartbeats")

    world.group.brokers[1].heard = heard
    await client.route("T")
    client.heartbeats.add_sharing_consumer(ConsumerData(group_name="c"), lambda: None)
    await trio.sleep(0.5)
    assert [list(broker.consumers.get("c", {})) == [] for broker in world.group.brokers] == [
        False,
        True,
        False,
    ]
    await trio.sleep(2 * (AGAIN_S + 0.5))
    assert refusals == [0]
    assert list(world.group.brokers[1].consumers["c"].values()) == [client.client_id]
    assert await client.heartbeats.send()


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_group_that_comes_back_is_announced_again(
    world: World, client: ClientInstance, is_asked: bool
) -> None:
    leader = world.group.brokers[0]
    await client.route("T")
    heartbeats = client.heartbeats
    for add, remove in (
        (heartbeats.add_producer, heartbeats.remove_producer),
        (heartbeats.add_consumer, heartbeats.remove_consumer),
    ):
        add("group")
        await heartbeats.introduce("group", ["g"])
        await remove("group")
        add("group")
        if is_asked and add == heartbeats.add_producer:
            await heartbeats.introduce("group", ["g"])
        else:
            await trio.sleep(1.0)
        codes = [seen.code for seen in leader.seen]
        backwards = codes[::-1]
        assert RequestCode.HEART_BEAT in backwards[: backwards.index(RequestCode.UNREGISTER_CLIENT)]
        await remove("group")


ME = Credentials("order-service", "do-not-show-me")


def test_nothing_named_is_nothing() -> None:
    assert credentials_from({}) is None
    assert tls_from({}) is None


def test_credentials_come_from_variables_or_from_a_file(tmp_path: Path) -> None:
    variables = {"DLEDGER_ACCESS_KEY": "order-service", "DLEDGER_SECRET_KEY": "do-not-show-me"}
    assert credentials_from(variables) == ME
    assert credentials_from({**variables, "DLEDGER_SECURITY_TOKEN": "t"}) == Credentials(
        "order-service", "do-not-show-me", "t"
    )
    path = tmp_path / "tools.yml"
    path.write_text("accessKey: order-service\nsecretKey: do-not-show-me\n")
    assert credentials_from({"DLEDGER_CREDENTIALS": str(path)}) == ME


@pytest.mark.parametrize(
    "environment",
    [
        {"DLEDGER_ACCESS_KEY": "order-service"},
        {"DLEDGER_SECRET_KEY": "do-not-show-me"},
        {"DLEDGER_CREDENTIALS": "/missing/tools.yml"},
    ],
)
def test_half_of_it_is_an_error_without_the_secret(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        credentials_from(environment)
    assert "do-not-show-me" not in str(raised.value)
    with pytest.raises(ConfigError):
        connect("127.0.0.1:9876", environment=environment)


def test_tls_comes_from_variables(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(path)
    context = tls_from({"DLEDGER_TLS_CA_FILE": str(path)})
    assert context is not None
    assert context.check_hostname
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_from({"DLEDGER_TLS_CA_FILE": str(tmp_path / "none.pem")})


def test_what_the_caller_gives_counts_before_the_environment() -> None:
    environment = {"DLEDGER_ACCESS_KEY": "someone-else", "DLEDGER_SECRET_KEY": "0123456789"}
    assert connect("a:1", environment=environment).config.credentials == Credentials(
        "someone-else", "0123456789"
    )
    client = connect("a:1", ClientConfig(credentials=ME), environment=environment)
    assert client.config.credentials is ME
    assert "do-not-show-me" not in repr(client.config)
