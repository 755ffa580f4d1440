"""The table of leaders, and the search for one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import RequestTimedOutError
from dledger.client.core.leaders import PATIENCE, PAUSE_S_MAX, SEARCH_S
from dledger.client.core.links import SILENT_S
from dledger.client.core.message import Message
from dledger.client.core.retry import RetryPolicy
from dledger.client.core.route import LeaderTable
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.fake_nodes import Seen
from tests.unit.client.fake_cluster import Group, World, open_world

LEADERLESS_S = 20.0
PATIENT = ProducerConfig(send_timeout_s=60.0)


@asynccontextmanager
async def producer_of_a_group() -> AsyncGenerator[tuple[Group, Producer]]:
    """A patient producer that has sent 1, and its group."""
    async with (
        open_world() as world,
        world.client() as client,
        Producer(client, "p", PATIENT) as producer,
    ):
        await producer.send(Message("T", b"1"))
        yield world.group, producer


async def test_search_for_a_leader_slows_to_once_a_second() -> None:
    """Its name was news at each search, so one followed the other without a pause."""
    async with producer_of_a_group() as (group, producer):
        await group.brokers[0].kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer.send, Message("T", b"2"))
            await trio.sleep(LEADERLESS_S)
            asked = [s.at for s in group.brokers[1].seen if s.code == RequestCode.RAFT_STATUS]
            assert LEADERLESS_S / 2 < len(asked) < 3 * LEADERLESS_S
            in_the_end = [at for at in asked if at > trio.current_time() - LEADERLESS_S / 2]
            assert len(in_the_end) <= LEADERLESS_S / 2 / PAUSE_S_MAX
            group.elect(1, register=False)
            elected_at = trio.current_time()
        assert trio.current_time() - elected_at < PAUSE_S_MAX + SEARCH_S
        assert sorted(group.bodies()) == [b"1", b"2"]


class FewRequests(list[Seen]):
    """Ends the test when there are more than *most*: without a pause no virtual time passes."""

    def __init__(self, most: int) -> None:
        self._most = most

    def append(self, seen: Seen) -> None:
        super().append(seen)
        assert len(self) <= self._most, f"after {trio.current_time()} s"


async def test_client_pauses_between_two_that_name_a_dead_leader() -> None:
    """The route names a former leader, which names the dead one, which the members name, too."""
    async with producer_of_a_group() as (group, producer):
        former, dead, _ = group.brokers
        group.elect(1, register=False)
        await producer.send(Message("T", b"2"))
        await dead.kill()
        former.seen = FewRequests(10 * round(LEADERLESS_S))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer.send, Message("T", b"3"))
            await trio.sleep(LEADERLESS_S)
            sends = former.count(RequestCode.SEND_RECORDS)
            assert LEADERLESS_S < sends < 5 * LEADERLESS_S
            group.elect(2, register=False)
            elected_at = trio.current_time()
        assert trio.current_time() - elected_at < PAUSE_S_MAX + SEARCH_S
        assert sorted(group.bodies()) == [b"1", b"2", b"3"]


async def test_a_leader_is_found_at_most_an_eighth_later() -> None:
    for leaderless_s in (0.05, 0.2, 0.8, 3.2):
        async with producer_of_a_group() as (group, producer):
            await group.brokers[0].kill()
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(producer.send, Message("T", b"2"))
                await trio.sleep(leaderless_s)
                group.elect(2, register=False)
            took_s = trio.current_time() - began
            assert took_s < leaderless_s * (1 + 1 / PATIENCE) + RetryPolicy().max_backoff_s


async def test_search_for_a_leader_sends_no_heartbeat(world: World, client: ClientInstance) -> None:
    async with PullConsumer(client, "c"), Producer(client, "p", PATIENT) as producer:
        await producer.send(Message("T", b"1"))
        await trio.sleep(1)
        before = world.group.brokers[1].count(RequestCode.HEART_BEAT)
        assert before > 0
        await world.group.brokers[0].kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer.send, Message("T", b"2"))
            await trio.sleep(LEADERLESS_S)
            assert world.group.brokers[1].count(RequestCode.HEART_BEAT) == before
            world.group.elect(1, register=False)
        await trio.sleep(1)
        assert world.group.brokers[1].count(RequestCode.HEART_BEAT) == before + 1


async def test_former_leader_that_is_silent_ends_the_calls_to_it() -> None:
    async with open_world() as world, world.client() as client:
        former, leader = world.group.brokers[0].address, world.group.brokers[1].address
        world.group.on(RequestCode.NOTIFICATION, lambda _: DEFERRED)
        ended_s: list[float] = []

        async def receive() -> None:
            with pytest.raises(RequestTimedOutError):
                await client.links.ask(former, RequestCode.NOTIFICATION, timeout_s=600)
            ended_s.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.sleep(SILENT_S / 2)
            client.leaders.learn("g", former, 1)
            client.leaders.learn("g", leader, 2)
            await trio.sleep(SILENT_S)
            assert ended_s == [], "it answered half a second before"
            client.leaders.learn("g", former, 3)
            client.leaders.learn("g", leader, 4)
            learned_s = trio.current_time()
        assert ended_s == [learned_s]


def test_a_hint_wins_over_the_route_until_the_route_changes() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    assert leaders.learn("g", "b:1", 2)
    leaders.take_route("g", "a:1")
    assert leaders.address("g") == "b:1"
    leaders.take_route("g", "c:1")
    assert leaders.address("g") == "c:1"


def test_a_hint_of_a_lower_term_is_stale() -> None:
    leaders = LeaderTable()
    assert leaders.learn("g", "b:1", 5)
    assert not leaders.learn("g", "c:1", 4)
    assert leaders.address("g") == "b:1"
    assert leaders.term("g") == 5


def test_a_failed_leader_may_be_named_again_in_its_term() -> None:
    leaders = LeaderTable()
    leaders.learn("g", "b:1", 5)
    leaders.suspect("g", "b:1")
    assert leaders.address("g") is None
    assert leaders.learn("g", "b:1", 5, told_by="c:1")
    assert leaders.address("g") == "b:1"


def test_the_supposed_leader_itself_may_name_a_lower_term() -> None:
    leaders = LeaderTable()
    leaders.learn("g", "b:1", 5)
    assert leaders.learn("g", "c:1", 1, told_by="b:1")
    assert leaders.address("g") == "c:1"


def test_a_failed_hint_gives_way_to_the_route() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    leaders.learn("g", "b:1", 2)
    leaders.suspect("g", "x:1")
    assert leaders.address("g") == "b:1"
    leaders.suspect("g", "b:1")
    assert leaders.address("g") == "a:1"


def test_unknown_group_has_no_leader() -> None:
    leaders = LeaderTable()
    assert leaders.address("g") is None
    assert leaders.term("g") == -1
    leaders.suspect("g", "a:1")


def test_a_route_without_a_leader_keeps_the_hint() -> None:
    leaders = LeaderTable()
    leaders.take_route("g", "a:1")
    leaders.learn("g", "b:1", 2)
    leaders.take_route("g", None)
    assert leaders.address("g") == "b:1"
