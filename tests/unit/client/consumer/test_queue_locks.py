"""Locks of queues: by hand, and those of an ordered consumer."""

from __future__ import annotations

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer, _pull_result
from dledger.client.consumer.queue_locks import EXPIRES_S, LockClient, QueueLocks
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import LockLostError, RequestFailedError, RequestTimedOutError
from dledger.client.core.route import MessageQueue
from dledger.remoting.handling import Handled
from dledger.remoting.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from tests.harness.beside import beside
from tests.unit.client.fake_cluster import World

QUEUE = MessageQueue("T", "g", 0)


async def test_tokens_follow_the_grants(world: World, client: ClientInstance) -> None:
    tokens = iter(["17", "17", "40"])

    def lock(command: RemotingCommand) -> Handled:
        body = LockBatchRequestBody.decode(command.body)
        granted = LockBatchResponseBody(body.mq_set).encode()
        return response_to(command, 0, None, {"lockTokens": next(tokens)}, granted)

    async with trio.open_nursery() as nursery:
        world.group.on(RequestCode.LOCK_BATCH_MQ, lock)
        await client.route("T")
        locks = QueueLocks(client, "c", lambda: [QUEUE])
        nursery.start_soon(locks.run)
        first = await locks.held(QUEUE)
        assert locks.tokens == {QUEUE: 17}
        await trio.sleep(21)
        assert locks.tokens == {QUEUE: 17}, "a renewal keeps it"
        assert locks.grant(QUEUE) == first
        await trio.sleep(21)
        assert locks.tokens == {QUEUE: 40}
        assert locks.grant(QUEUE) != first, "another client may have had it in between"
        await locks.unlock([QUEUE])
        assert locks.tokens == {}
        nursery.cancel_scope.cancel()


async def test_lock_counts_from_when_it_was_asked_for(world: World, client: ClientInstance) -> None:
    async def answer_late(command: RemotingCommand) -> RemotingCommand:
        await trio.sleep(2.0)
        body = LockBatchRequestBody.decode(command.body)
        return response_to(command, 0, None, None, LockBatchResponseBody(body.mq_set).encode())

    world.group.on(RequestCode.LOCK_BATCH_MQ, answer_late)
    await client.route("T")
    locks = QueueLocks(client, "c", lambda: [QUEUE])
    async with beside(locks.run):
        await locks.held(QUEUE)
        assert locks.left_s(QUEUE) == pytest.approx(EXPIRES_S - 2.0, abs=0.1)


async def test_a_lock_that_is_not_named_again_is_lost(world: World, client: ClientInstance) -> None:
    def lock(command: RemotingCommand) -> Handled:
        body = LockBatchRequestBody.decode(command.body)
        granted = body.mq_set if trio.current_time() < end else []
        return response_to(command, 0, None, None, LockBatchResponseBody(granted).encode())

    end = trio.current_time() + 10
    world.group.on(RequestCode.LOCK_BATCH_MQ, lock)
    await client.route("T")
    locks = QueueLocks(client, "c", lambda: [QUEUE])
    async with beside(locks.run):
        grant = await locks.held(QUEUE)
        await locks.ended(QUEUE, grant)
        assert trio.current_time() < end + EXPIRES_S - 10, "no longer than until the renewal"
        assert not locks.is_held(QUEUE)


Q0, Q1 = MessageQueue("T", "g", 0), MessageQueue("T", "g", 1)


def grants(world: World, ext: dict[str, str]) -> None:
    """Let brokers grant the first queue asked for."""

    def lock(command: RemotingCommand) -> Handled:
        body = LockBatchRequestBody.decode(command.body)
        return response_to(command, 0, None, ext, LockBatchResponseBody(body.mq_set[:1]).encode())

    world.group.on(RequestCode.LOCK_BATCH_MQ, lock)


def asked(world: World) -> list[RemotingCommand]:
    """Return the requests about locks so far."""
    codes = (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ)
    return [seen.command for seen in world.seen if seen.code in codes]


async def test_what_is_granted_comes_with_its_token(world: World, client: ClientInstance) -> None:
    grants(world, {"lockTokens": "17"})
    await client.route("T")
    locks = LockClient(client, "c")
    held = await locks.lock([Q0, Q1])
    assert held == {Q0: 17}
    await locks.unlock(held)
    body = LockBatchRequestBody.decode(asked(world)[0].body)
    assert (body.consumer_group, body.client_id) == ("c", client.client_id)
    assert [queue.queue_id for queue in body.mq_set] == [0, 1]
    assert [command.ext for command in asked(world)] == [
        {"lockTokens": "wanted"},
        {"lockTokens": "17"},
    ]


async def test_a_real_rocketmq_grants_without_tokens(world: World, client: ClientInstance) -> None:
    grants(world, {})
    await client.route("T")
    locks = LockClient(client, "c", client_id="me")
    held = await locks.lock([Q0])
    assert held == {Q0: None}
    await locks.unlock(held)
    assert LockBatchRequestBody.decode(asked(world)[1].body).client_id == "me"
    assert asked(world)[1].ext == {}


async def test_tokens_that_do_not_fit_are_no_answer(world: World, client: ClientInstance) -> None:
    grants(world, {"lockTokens": "1,2"})
    await client.route("T")
    with pytest.raises(RequestFailedError, match="2 tokens for 1 queues"):
        await LockClient(client, "c").lock([Q0])


@pytest.mark.parametrize(
    ("condition", "error"),
    [
        (Condition.LEADERSHIP_LOST, RequestTimedOutError),
        (Condition.GROUP_NOT_EXIST, RequestFailedError),
    ],
)
async def test_lock_refusal_has_whether_it_may_have_happened(
    world: World, client: ClientInstance, condition: Condition, error: type[RequestFailedError]
) -> None:
    world.group.on(RequestCode.LOCK_BATCH_MQ, lambda command: answer(command, condition, "no"))
    await client.route("T")
    with pytest.raises(error) as caught:
        await LockClient(client, "c").lock([Q0])
    assert type(caught.value) is error


async def test_an_old_token_is_an_error_of_its_own(world: World, client: ClientInstance) -> None:
    async with PullConsumer(client, "c") as consumer:
        broker = world.group.brokers[0]
        broker.on(
            RequestCode.UPDATE_CONSUMER_OFFSET,
            lambda asked: answer(asked, Condition.STALE_LOCK_TOKEN, "taken"),
        )
        with pytest.raises(LockLostError, match="taken") as caught:
            await consumer.commit_offset(Q0, 1, lock_token=9)
        assert (caught.value.outcome, caught.value.retriable) == ("not_stored", False)
        await consumer.pull(Q0, 0, lock_token=9, timeout_s=0)
        codes = (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.PULL_MESSAGE)
        shown = [seen.command.ext["lockToken"] for seen in world.seen if seen.code in codes]
        assert shown == ["9", "9"]


def test_a_refused_pull_is_the_same_error() -> None:
    refused = answer(request(RequestCode.PULL_MESSAGE), Condition.STALE_LOCK_TOKEN, "taken")
    with pytest.raises(LockLostError, match="taken"):
        _pull_result(Q0, 0, refused)
