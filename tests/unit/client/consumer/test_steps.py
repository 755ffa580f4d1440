"""Steps of a pull consumer: what travels, and what its caller learns of the outcome.

Locks of queues: by hand, and those of an ordered consumer.
"""

from collections.abc import Callable

import pytest
import trio

from dledger.client.consumer.pull_consumer import PullConsumer, _pull_result
from dledger.client.consumer.queue_locks import EXPIRES_S, LockClient, QueueLocks
from dledger.client.consumer.steps import ConsumeStep
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    LockLostError,
    MessageIllegalError,
    NoRouteError,
    RequestFailedError,
    RequestTimedOutError,
    StepOvertakenError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import iter_records
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.outcome import answer as outcome_answer
from tests.harness.beside import beside
from tests.unit.client.fake_cluster import World

QUEUE = MessageQueue("T", "g", 0)


class Steps:
    """Answers steps at every member, and keeps them."""

    def __init__(self, world: World) -> None:
        self.group = world.group
        self.seen: list[RemotingCommand] = []
        self.answers: list[Callable[[RemotingCommand], Handled]] = []
        self.group.on(RequestCode.CONSUME_STEP, self._answer)

    def _answer(self, asked: RemotingCommand) -> Handled:
        self.seen.append(asked)
        if self.answers:
            return self.answers.pop(0)(asked)
        results = [[0, 100 * number] for number in range(len(asked.ext["runs"]))]
        return response_to(asked, 0, None, {"results": results})


def overtaken(asked: RemotingCommand) -> Handled:
    return response_to(
        asked,
        ResponseCode.COMMIT_NOT_EXPECTED,
        "elsewhere",
        {"outcome": "not_stored", "committedOffset": "9", "topic": "T", "queueId": "0"},
    )


def silent(_: RemotingCommand) -> Handled:
    return DEFERRED


async def take(consumer: PullConsumer, to: int, *messages: Message) -> None:
    async with consumer.transaction(timeout_s=5) as step:
        for message in messages:
            step.send(message)
        step.commit(QUEUE, to)


async def end(
    consumer: PullConsumer,
    act: Callable[[ConsumeStep], object] = lambda _: None,
    *,
    to: int | None = None,
) -> None:
    """Take a step in which *act* takes part."""
    async with consumer.transaction() as step:
        if to is not None:
            step.commit(QUEUE, to)
        act(step)


async def test_step_travels_from_the_offset_that_was_read(
    world: World, client: ClientInstance
) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        assert await consumer.committed_offset(QUEUE) is None
        async with consumer.transaction() as step:
            for number, queue_id in enumerate([1, 0, 1]):
                queue = MessageQueue("T", "g", queue_id)
                step.send(Message("T", b"%d" % number), queue)
            step.commit(QUEUE, 3)
        assert [(each.queue.queue_id, each.queue_offset) for each in step.stored] == [
            (1, 100),
            (0, 0),
            (1, 101),
        ]
        await take(consumer, 5)
    first, second = steps.seen
    assert first.ext["runs"] == [["T", 0, 1], ["T", 1, 2]]
    assert first.ext["commits"] == [["T", 0, -1, 3]]
    assert first.ext["consumer_group"] == "c"
    records = list(iter_records(bytes(memoryview(first.body)[12:])))
    assert [bytes(record.body) for record in records] == [b"1", b"0", b"2"]
    assert (second.ext["runs"], second.ext["commits"]) == ([], [["T", 0, 3, 5]])


async def test_step_waits_for_a_leader_that_its_route_did_not_have(
    world: World, client: ClientInstance
) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        world.group.leader = None
        world.group.register()
        await client.route("T", fresh=True)
        world.group.elect(1)
        await take(consumer, 1, Message("T", b"x"))
    assert steps.seen[-1].ext["commits"] == [["T", 0, -1, 1]]


async def test_overtaken_step_names_the_offset_and_must_read_again(
    world: World, client: ClientInstance
) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        steps.answers = [overtaken]
        with pytest.raises(StepOvertakenError) as caught:
            await take(consumer, 3, Message("T", b"a"))
        assert (caught.value.committed_offset, caught.value.outcome) == (9, "not_stored")
        with pytest.raises(MessageIllegalError, match="committed_offset"):
            await take(consumer, 3)
        await consumer.committed_offset(QUEUE)
        await take(consumer, 3)
    assert len(steps.seen) == 2


async def test_refusal_after_an_attempt_without_answer_is_unknown(
    world: World, client: ClientInstance
) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        for last in (overtaken, lambda asked: outcome_answer(asked, Condition.NOT_FOUND, "no")):
            await consumer.committed_offset(QUEUE)
            steps.answers = [silent, last]
            with pytest.raises(UnknownOutcomeError):
                await take(consumer, 3, Message("T", b"a"))
    assert len(steps.seen) == 4


async def test_step_without_any_answer_is_unknown(world: World, client: ClientInstance) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        steps.answers = [silent] * 50
        with pytest.raises(RequestTimedOutError) as caught:
            await take(consumer, 3, Message("T", b"a"))
        assert caught.value.outcome == "unknown"
        await consumer.committed_offset(QUEUE)
        steps.answers = [lambda asked: outcome_answer(asked, Condition.LEADERSHIP_LOST, "?")]
        with pytest.raises(UnknownOutcomeError):
            await take(consumer, 3)


async def test_refused_step_is_not_stored(world: World, client: ClientInstance) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        steps.answers = [lambda asked: outcome_answer(asked, Condition.TOPIC_NOT_EXIST, "no")]
        with pytest.raises(RequestFailedError) as caught:
            await take(consumer, 3)
        assert caught.value.code == ResponseCode.TOPIC_NOT_EXIST


async def test_block_that_raises_sends_nothing(world: World, client: ClientInstance) -> None:
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        with pytest.raises(ZeroDivisionError):
            await end(consumer, lambda _: 1 // 0, to=3)
        await take(consumer, 3)
    assert len(steps.seen) == 1


async def test_plain_commit_makes_the_next_step_read_again(
    world: World, client: ClientInstance
) -> None:
    Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        await consumer.commit_offset(QUEUE, 2)
        with pytest.raises(MessageIllegalError, match="committed_offset"):
            await take(consumer, 3)
        assert await consumer.committed_offset(QUEUE) == 2
        await take(consumer, 3)


async def test_what_is_no_step_is_refused_before_it_travels(
    world: World, client: ClientInstance
) -> None:
    steps = Steps(world)
    elsewhere = MessageQueue("T", "h", 0)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        with pytest.raises(MessageIllegalError, match="one broker group"):
            await end(consumer)
        with pytest.raises(MessageIllegalError, match="one broker group"):
            await end(consumer, lambda step: step.commit(elsewhere, 1), to=1)
        with pytest.raises(MessageIllegalError, match="no part of a step"):
            await end(consumer, lambda step: step.send(Message("T", b"a"), elsewhere), to=1)
        with pytest.raises(MessageIllegalError, match="no part of a step"):
            await end(consumer, lambda step: step.send(Message("T", b"a", delay_level=1)))
        with pytest.raises(NoRouteError):
            await end(consumer, lambda step: step.send(Message("Missing", b"a")), to=1)
        await take(consumer, 4)
        with pytest.raises(MessageIllegalError, match="does not go back"):
            await take(consumer, 3)
    assert len(steps.seen) == 1


async def test_step_with_messages_that_moves_no_offset_is_refused(
    world: World, client: ClientInstance
) -> None:
    """Nothing would tell its repetition from the step: it would be stored twice."""
    steps = Steps(world)
    async with PullConsumer(client, "c") as consumer:
        await consumer.committed_offset(QUEUE)
        await take(consumer, 4)
        steps.answers = [silent]
        with pytest.raises(MessageIllegalError, match="moves no offset"):
            await take(consumer, 4, Message("T", b"a"))
        steps.answers = []
        await take(consumer, 4)  # without messages it only compares
        await take(consumer, 5, Message("T", b"a"))
    assert len(steps.seen) == 3


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
        granted = body.mq_set if trio.current_time() < over_s else []
        return response_to(command, 0, None, None, LockBatchResponseBody(granted).encode())

    over_s = trio.current_time() + 10
    world.group.on(RequestCode.LOCK_BATCH_MQ, lock)
    await client.route("T")
    locks = QueueLocks(client, "c", lambda: [QUEUE])
    async with beside(locks.run):
        grant = await locks.held(QUEUE)
        await locks.ended(QUEUE, grant)
        assert trio.current_time() < over_s + EXPIRES_S - 10, "no longer than until the renewal"
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
