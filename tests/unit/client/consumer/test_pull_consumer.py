"""Pulling by offset, from the leader or from any member."""

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from dledger.client.consumer.pull_consumer import PullConsumer, _pull_result
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerUnreachableError,
    DamagedAnswerError,
    LockLostError,
    NoRouteError,
    OffsetIllegalError,
    RequestFailedError,
    RequestTimedOutError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import PullStatus
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import QueueHeader
from dledger.remoting.protocol.outcome import Condition
from dledger.remoting.protocol.outcome import answer as outcome_answer
from tests.unit.client.fake_cluster import Broker, World, open_world

QUEUE = MessageQueue("T", "g", 0)


@pytest.fixture
async def consumer(client: ClientInstance) -> AsyncIterator[PullConsumer]:
    async with PullConsumer(client, "c") as consumer:
        yield consumer


async def test_what_was_sent_is_pulled(client: ClientInstance, producer: Producer) -> None:
    async with PullConsumer(client, "c") as consumer:
        for i in range(3):
            await producer.send_to(QUEUE, Message("T", b"%d" % i, tags="A"))
        assert QUEUE in await consumer.fetch_message_queues("T")
        result = await consumer.pull(QUEUE, 1)
        assert result.status is PullStatus.FOUND
        assert [m.body_bytes for m in result.messages] == [b"1", b"2"]
        assert (result.next_begin_offset, result.min_offset, result.max_offset) == (3, 0, 3)
        assert [m.tags for m in result.messages] == ["A", "A"]
        assert (await consumer.min_offset(QUEUE), await consumer.max_offset(QUEUE)) == (0, 3)
        assert await consumer.search_offset(QUEUE, 5) == 1


async def test_a_tag_with_the_hash_of_a_wanted_one_is_left_out(
    client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer:
        for tag in ("Aa", "BB", "Aa", "BB"):
            await producer.send_to(QUEUE, Message("T", tag.encode(), tags=tag))
        # This broker, as RocketMQ's, sends what has the same hash.
        result = await consumer.pull(QUEUE, 0, tags="Aa")
        assert [m.body_bytes for m in result.messages] == [b"Aa", b"Aa"]
        assert (result.status, result.next_begin_offset) == (PullStatus.FOUND, 4)
        result = await consumer.pull(QUEUE, 3, tags="Aa || C")
        assert (result.status, list(result.messages)) == (PullStatus.NO_MATCHED_MESSAGE, [])
        assert result.next_begin_offset == 4


async def test_an_sql_expression_travels_with_the_pull(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer:
        await producer.send_to(QUEUE, Message("T", b"0", tags="x"))
        wanted = SubscriptionExpression.by_sql("a > 5 AND TAGS = 'y'")
        result = await consumer.pull(QUEUE, 0, tags=wanted)
        assert [m.body_bytes for m in result.messages] == [b"0"], "the broker has judged"
        async for message in consumer.iter_messages(QUEUE, 0, tags=wanted):
            assert message.body_bytes == b"0"
        pulls = [
            seen.command.ext
            for seen in world.seen
            if seen.code in (RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL)
        ]
        assert len(pulls) == 3, "one more finds the end"
        for ext in pulls:
            assert ext["subscription"] == "a > 5 AND TAGS = 'y'"
            assert ext["expressionType"] == "SQL92"
            assert int(ext["sysFlag"]) & 4


async def test_pull_waits_for_the_next_message(client: ClientInstance, producer: Producer) -> None:
    async with PullConsumer(client, "c") as consumer:
        got: list[bytes] = []

        async def wait() -> None:
            result = await consumer.pull(QUEUE, 0, timeout_s=20)
            got.extend(m.body_bytes for m in result.messages)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(5)
            assert got == []
            await producer.send_to(QUEUE, Message("T", b"now"))
        assert got == [b"now"]
        assert trio.current_time() < 100


async def test_a_pull_that_finds_nothing_ends_after_its_time(
    world: World, consumer: PullConsumer
) -> None:
    began = trio.current_time()
    result = await consumer.pull(QUEUE, 0, timeout_s=7)
    assert result.status is PullStatus.NO_NEW_MESSAGE
    assert trio.current_time() - began == pytest.approx(7)
    (asked,) = [s.command.ext for s in world.seen if s.code == RequestCode.PULL_MESSAGE]
    assert asked["suspendTimeoutMillis"] == "7000"
    assert asked["sysFlag"] == "6"
    assert asked["subscription"] == "*"


async def test_offset_outside_the_queue_names_its_bounds(
    world: World, consumer: PullConsumer
) -> None:
    with pytest.raises(OffsetIllegalError) as caught:
        await consumer.pull(QUEUE, 99)
    assert caught.value.next_begin_offset == 0


async def test_many_messages_are_asked_for_in_bulk(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer:
        await producer.send_batch([Message("T", b"%d" % i) for i in range(100)], queue=QUEUE)
        result = await consumer.pull(QUEUE, 0, max_messages=100)
        assert len(result.messages) == 100
        assert world.count(RequestCode.BULK_PULL) == 1
        assert world.count(RequestCode.PULL_MESSAGE) == 0


async def test_a_broker_without_bulk_pull_is_asked_the_ordinary_way() -> None:
    async with (
        open_world(bulk=False) as world,
        world.client() as client,
        Producer(client, "p") as producer,
        PullConsumer(client, "c") as consumer,
    ):
        await producer.send_batch([Message("T", b"%d" % i) for i in range(100)], queue=QUEUE)
        bodies = [m.body_bytes async for m in consumer.iter_messages(QUEUE, 0)]
        assert bodies == [b"%d" % i for i in range(100)]
        some = [m.body_bytes async for m in consumer.iter_messages(QUEUE, 10, until=20)]
        assert some == [b"%d" % i for i in range(10, 20)]


async def test_drain_reads_all_queues_to_their_end() -> None:
    async with (
        open_world() as world,
        world.client() as client,
        Producer(client, "p") as producer,
        PullConsumer(client, "c") as consumer,
    ):
        for i in range(40):
            await producer.send(Message("T", b"%d" % i))
        queues = await consumer.fetch_message_queues("T")
        found = [
            m.body_bytes async for _, result in consumer.drain(queues) for m in result.messages
        ]
    assert sorted(found) == sorted(b"%d" % i for i in range(40))


async def test_commits_are_seen_by_the_next_query(world: World, client: ClientInstance) -> None:
    async with PullConsumer(client, "c") as consumer:
        assert await consumer.committed_offset(QUEUE) is None
        await consumer.commit_offset(QUEUE, 17)
        assert await consumer.committed_offset(QUEUE) == 17
        assert world.group.committed == {("c", "T", 0): 17}


async def test_commit_without_an_answer_is_unknown_not_refused() -> None:
    def lost(asked: RemotingCommand) -> RemotingCommand:
        return outcome_answer(asked, Condition.LEADERSHIP_LOST, "not known")

    async with (
        open_world() as world,
        world.client() as client,
        PullConsumer(client, "c") as consumer,
    ):
        world.group.brokers[0].on(RequestCode.UPDATE_CONSUMER_OFFSET, lost)
        with pytest.raises(RequestTimedOutError) as caught:
            await consumer.commit_offset(QUEUE, 17)
    assert caught.value.outcome == "unknown"


async def test_commit_refused_after_an_unknown_attempt_is_unknown(
    world: World, consumer: PullConsumer
) -> None:

    def silent(_: RemotingCommand) -> Handled:
        world.group.leader = None
        return DEFERRED

    world.group.brokers[0].on(RequestCode.UPDATE_CONSUMER_OFFSET, silent)
    with pytest.raises(RequestTimedOutError) as caught:
        await consumer.commit_offset(QUEUE, 17, timeout_s=5)
    assert caught.value.outcome == "unknown"


async def test_lock_lost_after_an_unanswered_commit_is_unknown(
    world: World, consumer: PullConsumer
) -> None:

    def silent(_: RemotingCommand) -> Handled:
        world.group.elect(1)
        return DEFERRED

    def stale(asked: RemotingCommand) -> Handled:
        return response_to(asked, ResponseCode.STALE_LOCK_TOKEN, "another one has it")

    world.group.brokers[0].on(RequestCode.UPDATE_CONSUMER_OFFSET, silent)
    world.group.brokers[1].on(RequestCode.UPDATE_CONSUMER_OFFSET, stale)
    with pytest.raises(RequestTimedOutError):
        await consumer.commit_offset(QUEUE, 17, lock_token=3)
    with pytest.raises(LockLostError):
        await consumer.commit_offset(QUEUE, 17, lock_token=3)


async def test_a_pull_follows_the_leader(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer:
        await producer.send_to(QUEUE, Message("T", b"1"))
        await consumer.pull(QUEUE, 0)
        world.group.elect(1, register=False)
        result = await consumer.pull(QUEUE, 0)
        assert [m.body_bytes for m in result.messages] == [b"1"]
        assert client.counters.redirects_by_hint == 1


async def test_errors_of_reads_carry_code_and_remark() -> None:
    async with (
        open_world(rocketmq=True) as world,
        world.client() as client,
        PullConsumer(client, "c") as consumer,
    ):
        with pytest.raises(NoRouteError):
            await consumer.fetch_message_queues("nothing")
        world.group.topics["U"] = 1
        await consumer.fetch_message_queues("U")
        answer = await client.ask("10.0.0.1:10911", RequestCode.QUERY_MESSAGE)
        assert answer.code == 3
        with pytest.raises(RequestFailedError) as caught:
            await consumer._ask(
                MessageQueue("U", "g", 0),
                RequestCode.GET_EARLIEST_MSG_STORETIME,
                QueueHeader("U", 0),
            )
    assert caught.value.code == 3


async def test_queues_of_a_topic_just_made_by_a_send_are_waited_for(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer, trio.open_nursery() as nursery:
        await producer.send(Message("made", b"x"))
        made = world.group.topics.pop("made", None)

        async def list_it_later() -> None:
            await trio.sleep(1.0)
            world.group.topics["made"] = made or 4

        nursery.start_soon(list_it_later)
        began = trio.current_time()
        assert len(await consumer.fetch_message_queues("made")) == 4
        assert 1.0 <= trio.current_time() - began < 1.2
        with pytest.raises(NoRouteError):
            await consumer.fetch_message_queues("never sent to")


async def test_queues_of_a_topic_never_listed_end_in_an_error(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    async with PullConsumer(client, "c") as consumer:
        await producer.send(Message("made", b"x"))
        world.group.topics.pop("made", None)
        began = trio.current_time()
        with pytest.raises(NoRouteError):
            await consumer.fetch_message_queues("made")
        assert 2.0 <= trio.current_time() - began < 2.2


def test_pull_with_damaged_messages_is_a_retriable_error() -> None:
    queue = MessageQueue("T", "broker-a", 0)
    offsets = {
        "nextBeginOffset": "7",
        "minOffset": "0",
        "maxOffset": "9",
        "suggestWhichBrokerId": "0",
    }
    bad = response_to(request(RequestCode.PULL_MESSAGE), 0, None, offsets, b"\0" * 100)
    with pytest.raises(DamagedAnswerError, match="damaged") as caught:
        _pull_result(queue, 5, bad)
    assert caught.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert caught.value.retriable


QUEUE = MessageQueue("T", "g", 0)
PULLS = (RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL)


def pulls(broker: Broker) -> int:
    return sum(broker.count(code) for code in PULLS)


def let_followers_serve(world: World, *, suggested: int = 0) -> None:
    """Let every member answer pulls with what there is; of "nothing" only the leader speaks."""

    def pull(broker: Broker, asked: RemotingCommand) -> Handled:
        group = broker.group
        leader, group.leader = group.leader, broker.address
        answer = broker._pull(asked)
        group.leader = leader
        assert isinstance(answer, RemotingCommand), "a member was made to wait"
        if answer.code == 19 and not broker.leads:
            return broker._not_leader(asked)
        answer.ext["suggestWhichBrokerId"] = str(suggested)
        return answer

    for code in PULLS:
        world.group.on_each(code, pull)


async def put(world: World, *bodies: bytes) -> None:
    async with world.client() as client, Producer(client, "p") as producer:
        for body in bodies:
            await producer.send_to(QUEUE, Message("T", body))


async def test_the_suggested_follower_is_asked_next(world: World) -> None:
    await put(world, b"0", b"1", b"2")
    let_followers_serve(world, suggested=2)
    leader, _, suggested = world.group.brokers
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        got = []
        for offset in range(3):
            result = await consumer.pull(QUEUE, offset, max_messages=1)
            got += [m.body_bytes for m in result.messages]
    assert got == [b"0", b"1", b"2"]
    assert (pulls(leader), pulls(suggested)) == (1, 2)


async def test_pull_at_a_suggested_follower_that_ended_costs_one_try(world: World) -> None:
    await put(world, b"0", b"1", b"2")
    let_followers_serve(world, suggested=2)
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        await consumer.pull(QUEUE, 0, max_messages=1)
        await world.group.brokers[2].kill()
        result = await consumer.pull(QUEUE, 1, max_messages=1)
    assert [m.body_bytes for m in result.messages] == [b"1"]
    assert pulls(world.group.brokers[0]) == 2


async def test_pull_without_a_leader_reads_stored_messages(world: World) -> None:
    await put(world, b"0", b"1")
    let_followers_serve(world)
    world.group.leader = None
    world.group.register()
    await world.group.brokers[0].kill()
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        result = await consumer.pull(QUEUE, 0)
        assert [m.body_bytes for m in result.messages] == [b"0", b"1"]
        with pytest.raises(BrokerUnreachableError):
            await consumer.pull(QUEUE, 2, timeout_s=0)


async def test_a_member_without_the_messages_is_not_the_last_one_asked(world: World) -> None:
    await put(world, b"0", b"1")
    let_followers_serve(world)
    behind = world.group.brokers[0]
    world.group.leader = None
    world.group.register()

    for code in PULLS:
        behind.on(code, behind._not_leader)
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        result = await consumer.pull(QUEUE, 0)
    assert [m.body_bytes for m in result.messages] == [b"0", b"1"]
    assert pulls(behind) == 1


async def test_without_follower_reads_only_the_leader_is_asked(world: World) -> None:
    await put(world, b"0", b"1")
    let_followers_serve(world, suggested=2)
    async with world.client() as client, PullConsumer(client, "c") as consumer:
        for offset in range(2):
            await consumer.pull(QUEUE, offset, max_messages=1)
    assert [pulls(broker) for broker in world.group.brokers] == [2, 0, 0]


async def test_pull_of_an_empty_queue_is_answered_by_the_leader(world: World) -> None:
    await put(world, b"0")
    let_followers_serve(world)
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        result = await consumer.pull(QUEUE, 1, timeout_s=0)
        assert result.status is PullStatus.NO_NEW_MESSAGE
        with pytest.raises(OffsetIllegalError):
            await consumer.pull(QUEUE, 5, timeout_s=0)
    assert [pulls(broker) > 0 for broker in world.group.brokers] == [True, False, False]


async def test_tags_are_compared_again_in_what_any_member_answers(world: World) -> None:
    async with world.client() as client, Producer(client, "p") as producer:
        for tag in ("Aa", "BB"):  # their hashes are the same
            await producer.send_to(QUEUE, Message("T", tag.encode(), tags=tag))
    let_followers_serve(world)
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        result = await consumer.pull(QUEUE, 0, tags="Aa")
        assert [m.body_bytes for m in result.messages] == [b"Aa"]
        assert result.next_begin_offset == 2


async def test_lock_token_is_shown_to_any_member(world: World) -> None:
    await put(world, b"0", b"1")
    let_followers_serve(world, suggested=2)
    async with world.client() as client, PullConsumer(client, "c", follower_reads=True) as consumer:
        await consumer.pull(QUEUE, 0, max_messages=1, lock_token=7)
        await consumer.pull(QUEUE, 1, max_messages=1, lock_token=7)
    asked = [s for s in world.seen if s.code in PULLS]
    assert len({s.node for s in asked}) == 2
    assert [s.command.ext.get("lockToken") for s in asked] == ["7", "7"]


async def test_answer_without_an_offset_is_an_error_of_requests(
    world: World, client: ClientInstance
) -> None:
    world.group.on(RequestCode.QUERY_CONSUMER_OFFSET, response_to)
    async with PullConsumer(client, "c") as consumer:
        with pytest.raises(RequestFailedError, match="no offset"):
            await consumer.committed_offset(QUEUE)
