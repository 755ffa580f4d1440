"""Producer where leaders change, brokers are busy or away: what became of each send."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import BrokerBusyError, BrokerUnreachableError, UnknownOutcomeError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import decode_record
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world


async def test_a_cancelled_send_does_not_disturb_the_others(
    world: World, producer: Producer
) -> None:
    stored = 0
    await producer.send(Message("T", b"warm"))
    world.group.brokers[0].delay_s = 1.0
    scopes: list[trio.CancelScope] = []

    async def one(i: int) -> None:
        nonlocal stored
        with trio.CancelScope() as scope:
            scopes.append(scope)
            result = await producer.send(Message("T", b"%d" % i))
            queue = world.group.queue("T", result.message_queue.queue_id)
            assert decode_record(queue[result.queue_offset]).body == b"%d" % i
            stored += 1

    async with trio.open_nursery() as nursery:
        for i in range(10):
            nursery.start_soon(one, i)
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes[::2]:
            scope.cancel()
    assert stored == 5
    assert (await producer.send(Message("T", b"after"))).queue_offset >= 0


async def test_not_leader_is_followed_within_one_round_trip(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await producer.send(Message("T", b"1"))
    routes = client.counters.route_refreshes
    world.group.elect(2, register=False)
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() == began
    assert client.counters.redirects_by_hint == 1
    assert client.counters.route_refreshes == routes
    assert world.group.brokers[0].count(RequestCode.SEND_RECORDS) == 2
    assert world.group.brokers[2].count(RequestCode.SEND_RECORDS) == 1
    await producer.send(Message("T", b"3"))
    assert world.group.brokers[2].count(RequestCode.SEND_RECORDS) == 2
    assert client.counters.redirects_by_hint == 1


async def test_a_new_leader_that_is_not_ready_is_asked_again_soon(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    await producer.send(Message("T", b"1"))
    world.group.elect(1, register=False)
    refusals = 2

    def intercept(asked: RemotingCommand) -> Handled:
        nonlocal refusals
        refusals -= 1
        ext = {"outcome": "not_stored", "term": "2", "leaderAddr": world.group.brokers[1].address}
        return response_to(asked, 14, "not yet", ext) if refusals >= 0 else None

    world.group.brokers[1].intercept = intercept
    began = trio.current_time()
    await producer.send(Message("T", b"2"))
    assert trio.current_time() - began == pytest.approx(0.02 + 0.04)
    assert client.counters.leader_searches == 0
    assert world.group.brokers[1].count(RequestCode.SEND_RECORDS) == 3


async def test_without_retry_an_unknown_outcome_surfaces_at_once(
    world: World, client: ClientInstance
) -> None:
    config = ProducerConfig(retry_unknown=False)
    async with Producer(client, "p", config) as producer:
        await producer.send(Message("T", b"before"))
        world.group.brokers[0].intercept = lambda asked: response_to(
            asked, 1, "lost leadership", {"outcome": "unknown"}
        )
        began = trio.current_time()
        with pytest.raises(UnknownOutcomeError) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.outcome == "unknown"
        assert trio.current_time() == began


async def test_send_to_a_silent_broker_is_unknown_at_its_deadline(
    world: World, producer: Producer
) -> None:
    await producer.send(Message("T", b"before"))
    world.group.brokers[0].intercept = lambda asked: DEFERRED
    began = trio.current_time()
    with pytest.raises(UnknownOutcomeError):
        await producer.send(Message("T", b"x"), timeout_s=0.7)
    assert trio.current_time() - began == pytest.approx(0.7)


async def test_send_to_a_dead_group_is_not_stored_at_its_deadline(
    world: World, producer: Producer
) -> None:
    await producer.send(Message("T", b"before"))
    for broker in world.group.brokers:
        await broker.kill()
    began = trio.current_time()
    with pytest.raises(BrokerUnreachableError) as caught:
        await producer.send(Message("T", b"x"), timeout_s=2.0)
    assert caught.value.outcome == "not_stored"
    assert trio.current_time() - began <= 2.01


async def test_a_failed_broker_is_avoided_while_latency_faults_are_on() -> None:
    config = ProducerConfig(latency_fault_enable=True)
    async with open_world(members=1) as world:
        await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p", config) as producer:
            await producer.publish_queues("T")
            broker = world.group.brokers[0]
            broker.intercept = fixed(2, "busy")
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) == 1
            await trio.sleep(31)
            broker.intercept = None
            for i in range(16):
                await producer.send(Message("T", b"%d" % i))
            assert broker.count(RequestCode.SEND_RECORDS) > 1


async def test_send_moves_to_another_group_when_its_own_is_dead() -> None:
    async with open_world(members=1) as world:
        other = await world.add_group("h", 1, 10950)
        async with world.client() as client, Producer(client, "p") as producer:
            await producer.publish_queues("T")
            await world.group.brokers[0].kill()
            results = [await producer.send(Message("T", b"%d" % i)) for i in range(8)]
            assert {r.message_queue.broker_name for r in results} == {"h"}
            assert sorted(other.bodies()) == [b"%d" % i for i in range(8)]
            for result in results:
                record = decode_record(
                    other.queue("T", result.message_queue.queue_id)[result.queue_offset]
                )
                assert record.queue_id == result.message_queue.queue_id
            with pytest.raises(BrokerUnreachableError):
                await producer.send_to(
                    MessageQueue("T", "g", 0), Message("T", b"pinned"), timeout_s=1.0
                )


async def test_send_leaves_a_group_without_a_leader(world: World) -> None:
    """Its members answer and the NameServers still list a leader: only time shows it."""
    other = await world.add_group("h", 1, 10950)
    async with world.client() as client, Producer(client, "p") as producer:
        await producer.publish_queues("T")
        world.group.leader = None
        began = trio.current_time()
        results = [await producer.send(Message("T", b"%d" % i)) for i in range(8)]
        assert {r.message_queue.broker_name for r in results} == {"h"}
        assert sorted(other.bodies()) == [b"%d" % i for i in range(8)]
        assert world.group.bodies() == []
        assert trio.current_time() - began >= 3.0
        with pytest.raises(BrokerBusyError):
            await producer.send_to(
                MessageQueue("T", "g", 0), Message("T", b"pinned"), timeout_s=5.0
            )
