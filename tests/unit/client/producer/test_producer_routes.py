"""Producer that waits: for a route, a leader, or space."""

import pytest
import trio
import trio.testing

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientClosedError,
    ClientError,
    NoNameServerError,
    NoRouteError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.queue_selection import LEADER_POLL_S
from dledger.remoting.protocol.codes import RequestCode
from tests.unit.client.fake_cluster import World, open_world


async def test_an_unknown_topic_is_sent_to_where_it_would_be_created(
    world: World, producer: Producer
) -> None:
    results = [await producer.send(Message("new", b"x")) for _ in range(4)]
    assert sorted(r.message_queue.queue_id for r in results) == [0, 1, 2, 3]
    (first, *_) = [s.command for s in world.seen if s.code == 51101]
    assert first.ext["default_topic_queue_nums"] == 4


async def test_send_to_a_topic_that_cannot_exist_has_no_route(
    world: World, producer: Producer
) -> None:
    del world.group.topics["TBW102"]
    with pytest.raises(NoRouteError):
        await producer.send(Message("new", b"x"))
    with pytest.raises(NoRouteError):
        producer.send_nowait(Message("new", b"x"))


@pytest.mark.parametrize("topic", ["T", "new"])
async def test_first_sends_wait_for_an_election_and_ask_together(
    world: World, producer: Producer, topic: str
) -> None:
    world.group.leader = None
    world.group.register()
    results: list[SendResult] = []

    async def one(i: int) -> None:
        results.append(await producer.send(Message(topic, b"%d" % i), timeout_s=20))

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(one, i)
        await trio.sleep(2)
        assert not results
        world.group.elect(1)
        began = trio.current_time()
    assert trio.current_time() - began < 0.5
    stored = sorted(int(body) for body in world.group.bodies(topic))
    assert stored == list(range(50))
    firsts, polls = 2 * 50, 2 * 2.5 / LEADER_POLL_S
    assert world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) <= firsts + polls


async def test_first_send_without_a_leader_ends_with_its_budget(
    world: World, producer: Producer
) -> None:
    world.group.leader = None
    world.group.register()
    began = trio.current_time()
    with pytest.raises(NoRouteError, match=r"no broker with a leader .* within 1\.5 s") as caught:
        await producer.send(Message("T", b"x"), timeout_s=1.5)
    assert 1.5 <= trio.current_time() - began < 1.7
    assert caught.value.outcome == "not_stored"
    assert caught.value.retriable


async def test_wait_for_a_route_counts_for_the_budget_of_a_send(
    world: World, producer: Producer
) -> None:
    world.group.leader = None
    world.group.register()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _elect() -> None:
            await trio.sleep(2)
            world.group.elect(1)
            world.group.brokers[1].delay_s = 100.0

        with pytest.raises(UnknownOutcomeError):
            await producer.send(Message("T", b"x"), timeout_s=3)
    assert 3 <= trio.current_time() - began < 3.2


async def test_with_all_name_servers_down_a_running_producer_goes_on() -> None:
    async with (
        open_world(name_servers=2) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        await producer.send(Message("T", b"1"))
        for name_server in world.name_servers:
            await name_server.kill()
        await trio.sleep(100)
        await producer.send(Message("T", b"2"))
        world.group.elect(1)
        await producer.send(Message("T", b"3"))
        with pytest.raises(NoNameServerError, match=r"9876.*9877|9877.*9876"):
            await producer.send(Message("other", b"x"))


async def test_a_new_client_without_name_servers_gets_one_clear_error() -> None:
    async with open_world(name_servers=2) as world:
        for name_server in world.name_servers:
            await name_server.kill()
        async with world.client() as client, Producer(client, "p") as producer:
            with pytest.raises(NoNameServerError, match="no NameServer answers") as caught:
                await producer.send(Message("T", b"1"))
            assert caught.value.outcome == "not_stored"
            assert caught.value.retriable


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_wait_for_space_counts_as_time_of_a_send(
    world: World, client: ClientInstance, is_async: bool
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000, attempt_timeout_s=3.0)
    message = Message("T", b"y")
    async with Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"first"))
        world.group.brokers[0].delay_s = 1e6
        for _ in range(2):
            future = await producer.send_async(Message("T", b"x" * 1000), timeout_s=4.0)
        begin_s = trio.current_time()

        async def send() -> SendResult:
            if is_async:
                return await (await producer.send_async(message, timeout_s=6.0)).result()
            return await producer.send(message, timeout_s=6.0)

        with pytest.raises(ClientError):
            await send()
        assert trio.current_time() - begin_s == pytest.approx(6.0, abs=0.1)
        with pytest.raises(ClientError):
            await future.result()


async def test_a_send_that_waits_for_space_ends_with_the_producer(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000)
    ended_s: list[float] = []

    async def wait_for_space(producer: Producer) -> None:
        with pytest.raises(ClientClosedError, match="closed before the send"):
            await producer.send(Message("T", b"y"))
        ended_s.append(trio.current_time())

    async def work(nursery: trio.Nursery) -> None:
        async with Producer(client, "p", config) as producer:
            await producer.send(Message("T", b"first"))
            world.group.brokers[0].delay_s = 1e6
            for _ in range(2):
                await producer.send_async(Message("T", b"x" * 1000))
            nursery.start_soon(wait_for_space, producer)
            await trio.sleep(1.0)
            raise KeyError

    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError):
            await work(nursery)
    assert ended_s == [pytest.approx(1.0, abs=0.1)]


async def test_a_producer_that_closes_waits_for_sends_without_space(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(max_waiting_bytes=1000)
    async with trio.open_nursery() as nursery:
        async with Producer(client, "p", config) as producer:
            await producer.send(Message("T", b"first"))
            world.group.brokers[0].delay_s = 0.5
            for _ in range(2):
                await producer.send_async(Message("T", b"x" * 1000))
            for body in (b"y" * 1000, b"z" * 1000, b"0"):
                nursery.start_soon(producer.send, Message("T", body))
            await trio.sleep(0.1)
        assert len(world.group.bodies()) == 6
