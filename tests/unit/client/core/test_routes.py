"""Routes: what one has, and how a client keeps them."""

import random
from dataclasses import replace

import pytest
import trio

from dledger.client.core.client_instance import ClientConfig, ClientInstance
from dledger.client.core.errors import NoNameServerError, RequestFailedError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue, RouteTable, TopicRoute, parse_address_list
from dledger.client.core.routes import BORROWED_S, NameServerList
from dledger.client.producer.producer import Producer
from dledger.commitlog.errors import ConfigError
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.bodies import BrokerData, QueueData, TopicRouteData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.testing.doubles import MemoryNetwork
from tests.harness.present import present
from tests.unit.client.fake_cluster import World, open_world


def test_a_failed_name_server_gives_way_to_the_next() -> None:
    servers = NameServerList(["a:1", "b:1", "c:1"], start=4)
    assert servers.in_turn() == ["b:1", "c:1", "a:1"]
    servers.failed("a:1")
    assert servers.in_turn()[0] == "b:1"
    servers.failed("b:1")
    assert servers.in_turn()[0] == "c:1"
    servers.answered("a:1")
    assert servers.in_turn()[0] == "a:1"


def test_a_new_list_keeps_the_one_in_use() -> None:
    servers = NameServerList(["a:1", "b:1"], start=1)
    assert servers.replace(["c:1", "b:1"])
    assert servers.in_turn()[0] == "b:1"
    assert not servers.replace(["c:1", "b:1"])
    assert servers.replace(["x:1", "y:1"], start=1)
    assert servers.in_turn()[0] == "y:1"
    assert servers.replace([])
    assert servers.in_turn() == []


def test_a_client_without_name_servers_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no NameServer"):
        ClientInstance(
            ClientConfig(), clock=TrioClock(), network=MemoryNetwork(), rng=random.Random(1)
        )


async def test_a_client_keeps_to_one_name_server_until_it_fails() -> None:
    async with open_world(name_servers=3) as world, world.client() as client:
        for _ in range(5):
            await client.routes.refresh("T")
        busy = [n for n in world.name_servers if n.seen]
        assert len(busy) == 1
        await busy[0].kill()
        for _ in range(5):
            await client.routes.refresh("T")
        used = [n for n in world.name_servers if n.seen]
        assert len(used) == 2
        assert sorted(len(n.seen) for n in used) == [5, 5]


async def _address_server(world: World, answers: list[bytes], asked: list[bytes]) -> None:
    listener = await world.network.listen("10.0.0.3", 8080)
    while True:
        stream = await listener.accept()
        asked.append(bytes(await stream.receive_some(10000)))
        await stream.send_all(answers[min(len(asked), len(answers)) - 1])
        await stream.aclose()


async def test_an_address_server_is_read_again_every_120_s() -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\n\r\n10.0.0.2:9876\n",
        b"HTTP/1.1 500 Oops\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\n10.0.0.2:9877;10.0.0.2:9876",
    ]
    asked: list[bytes] = []
    async with open_world(name_servers=2) as world:
        world.nursery.start_soon(_address_server, world, answers, asked)
        config = ClientConfig(address_server_url="http://10.0.0.3:8080/rocketmq/nsaddr?v=1")
        async with ClientInstance(
            config, clock=TrioClock(), network=world.network, rng=random.Random(1)
        ) as client:
            await client.route("T")
            first = client.name_servers.list.addresses
            await trio.sleep(121)
            second = client.name_servers.list.addresses
            await trio.sleep(120)
            third = client.name_servers.list.addresses
    assert asked[0] == b"GET /rocketmq/nsaddr?v=1 HTTP/1.0\r\nHost: 10.0.0.3\r\n\r\n"
    assert first == second == ("10.0.0.2:9876",)
    assert third == ("10.0.0.2:9877", "10.0.0.2:9876")


async def test_an_address_server_that_errs_changes_nothing() -> None:
    answers = [
        b"HTTP/1.1 200 OK\r\n\r\n10.0.0.2:9876;nonsense",
        b"HTTP/1.1 200 OK\r\n\r\n<html><body>Out of order; come back later</body></html>",
    ]
    asked: list[bytes] = []
    async with open_world() as world:
        world.nursery.start_soon(_address_server, world, answers, asked)
        config = ClientConfig(address_server_url="http://10.0.0.3:8080/x")
        async with ClientInstance(
            config, clock=TrioClock(), network=world.network, rng=random.Random(1)
        ) as client:
            await client.route("T")
            await trio.sleep(200)
            assert client.name_servers.list.addresses == ("10.0.0.2:9876",)
            await client.routes.refresh("T")
    assert len(asked) == 2


async def test_a_name_server_that_is_none_gives_way_to_the_next() -> None:
    async with open_world() as world:
        config = ClientConfig(name_servers=("nonsense", world.name_servers[0].address))
        for seed in range(4):
            async with ClientInstance(
                config, clock=TrioClock(), network=world.network, rng=random.Random(seed)
            ) as client:
                assert await client.route("T")
        config = ClientConfig(name_servers=("nonsense",))
        async with ClientInstance(
            config, clock=TrioClock(), network=world.network, rng=random.Random(1)
        ) as client:
            with pytest.raises(NoNameServerError, match="nonsense: not an address"):
                await client.route("T")


async def test_an_address_server_that_is_down_is_one_clear_error(world: World) -> None:
    config = ClientConfig(address_server_url="http://10.0.0.3/x")
    async with ClientInstance(
        config, clock=TrioClock(), network=world.network, rng=random.Random(1)
    ) as client:
        with pytest.raises(NoNameServerError, match="address server"):
            await client.route("T")


def test_an_address_server_must_be_plain_http() -> None:
    with pytest.raises(ConfigError, match="http"):
        ClientInstance(
            ClientConfig(address_server_url="ftp://x"),
            clock=TrioClock(),
            network=MemoryNetwork(),
            rng=random.Random(1),
        )


async def test_route_of_a_topic_that_is_never_made_is_forgotten() -> None:
    async with open_world() as world, world.client() as client:
        routes = client.routes
        lasting = await routes.publish("Lasting")
        version = routes.version
        assert routes.known_publish("Lasting") is lasting
        for number in range(5):
            await routes.publish(f"New{number}")
        routes.forget_unknown(())
        assert routes.known_publish("New0") is not None
        await trio.sleep(BORROWED_S)
        routes.forget_unknown({"Lasting"})
        assert routes.known_publish("Lasting") is lasting
        assert [routes.known_publish(f"New{number}") for number in range(5)] == [None] * 5
        assert routes.version > version
        await trio.sleep(1)  # the poll that is under way
        asked = world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        await trio.sleep(3 * client.config.route_poll_period_s)
        # "Lasting" and the topic that routes are borrowed from.
        assert world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) - asked <= 2 * 4


async def test_borrowed_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.client.core.routes.BORROWED_MAX", 3)
    async with open_world() as world, world.client() as client:
        for number in range(10):
            await client.routes.publish(f"New{number}")
        known = [client.routes.known_publish(f"New{number}") for number in range(10)]
        assert [route is not None for route in known] == [False] * 7 + [True] * 3


async def test_given_back_route_changes_nothing_again() -> None:
    async with open_world() as world, world.client() as client:
        await client.routes.publish("Never")
        await trio.sleep(BORROWED_S)
        client.routes.forget_unknown(())
        assert client.routes.known_publish("Never") is None
        version = client.routes.version
        client.routes.forget_unknown(())
        assert client.routes.version == version


async def test_producer_forgets_topics_with_their_routes() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        await producer.send(Message("T", b"one"))
        await client.routes.publish("Never")
        assert await producer.publish_queues("Never")
        assert producer._topics.known("Never") is not None
        await trio.sleep(BORROWED_S)
        client.routes.forget_unknown(())
        assert producer._topics.known("Never") is None
        assert producer._topics.known("T") is not None


@pytest.mark.parametrize(
    ("code", "body"), [(ResponseCode.SYSTEM_ERROR, b""), (ResponseCode.SUCCESS, b"[1")]
)
async def test_a_topic_that_is_refused_holds_up_no_other(
    world: World, code: ResponseCode, body: bytes
) -> None:
    group, server = world.group, world.name_servers[0]
    group.topics |= {"A": 4, "B": 4}
    async with world.client() as client:
        for topic in ("A", "B"):
            await client.route(topic)
        refused = {"A"}

        def answer(asked: RemotingCommand) -> RemotingCommand | None:
            is_refused = asked.ext["topic"] in refused
            return response_to(asked, code, "no", None, body) if is_refused else None

        server.intercept = answer
        with pytest.raises(RequestFailedError, match="route of A"):
            await client.routes.refresh("A")
        group.topics |= {"A": 8, "B": 8}
        await trio.sleep(client.config.route_poll_period_s + 1)
        assert len((await client.route("B")).publish_queues) == 8
        refused.clear()
        await trio.sleep(client.config.route_poll_period_s)
        assert len((await client.route("A")).publish_queues) == 8


def _data(*groups: tuple[str, dict[int, str], int]) -> TopicRouteData:
    return TopicRouteData(
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=3, write_queue_nums=2, perm=perm)
            for name, _, perm in groups
        ],
        broker_datas=[
            BrokerData(cluster="c", broker_name=name, broker_addrs=addresses)
            for name, addresses, _ in groups
        ],
    )


def test_only_groups_with_a_leader_are_published_to() -> None:
    route = TopicRoute.from_data(
        "T", _data(("b", {0: "b:1", 1: "b:2"}, 6), ("a", {1: "a:2"}, 6), ("c", {0: "c:1"}, 4))
    )
    assert route.publish_queues == (MessageQueue("T", "b", 0), MessageQueue("T", "b", 1))
    assert {q.broker_name for q in route.subscribe_queues} == {"a", "b", "c"}
    assert len(route.subscribe_queues) == 9
    assert route.leader_address("b") == "b:1"
    assert route.leader_address("a") is None
    assert route.leader_address("z") is None


def test_a_group_without_addresses_is_passed_over() -> None:
    data = _data(("a", {0: "a:1"}, 6))
    data.broker_datas = []
    assert TopicRoute.from_data("T", data).subscribe_queues == ()


def test_a_borrowed_route_has_the_queues_a_new_topic_would_get() -> None:
    default = TopicRoute.from_data("TBW102", _data(("a", {0: "a:1"}, 7)))
    route = default.borrowed("new", 1)
    assert route.publish_queues == (MessageQueue("new", "a", 0),)
    assert route.subscribe_queues == ()


def test_the_table_keeps_the_queue_objects_in_use() -> None:
    table = RouteTable()
    assert table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    first = present(table.get("T"))
    assert not table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    assert table.put(TopicRoute.from_data("T", _data(("a", {0: "a:2"}, 6))))
    second = present(table.get("T"))
    assert second.publish_queues[0] is first.publish_queues[0]
    assert table.addresses("a") == ["a:2"]
    assert list(table.brokers()) == [("a", 0, "a:2")]
    table.forget("T")
    assert table.topics() == []


def test_route_table_keeps_all_of_a_changed_route() -> None:
    table = RouteTable()
    table.put(TopicRoute.from_data("T", _data(("a", {0: "a:1"}, 6))))
    changed = TopicRoute.from_data("T", _data(("a", {0: "a:2"}, 6)))
    changed = replace(changed, order_conf="a:4")
    assert table.put(changed)
    assert table.get("T") == changed
    assert changed.clusters == ("c",)
    assert not table.put(changed), "equal routes are no news"


def test_address_lists_come_in_several_spellings() -> None:
    assert parse_address_list("a:1; b:2,a:1;;") == ["a:1", "b:2"]
    assert parse_address_list(["a:1", " b:2 "]) == ["a:1", "b:2"]
