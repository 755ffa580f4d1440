"""Nothing is sent to a broker of another group, whatever the route holds.

The table of leaders, and the search for one.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientError,
    RequestFailedError,
    RequestTimedOutError,
    UnknownOutcomeError,
)
from dledger.client.core.leaders import PATIENCE, PAUSE_S_MAX, SEARCH_S
from dledger.client.core.links import KEPT_S, SILENT_S, GroupIdentities, stated_identities
from dledger.client.core.message import Message
from dledger.client.core.retry import RetryPolicy
from dledger.client.core.route import LeaderTable, MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.remoting.handling import DEFERRED
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.signature import SIGNED_TOO_LONG_AGO
from tests.harness.fake_nodes import Seen
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
