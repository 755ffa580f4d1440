"""Hooks of producers and consumers against a cluster in memory."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import (
    CommunicationMode,
    ConsumeMessageContext,
    EndTransactionContext,
    LocalTransactionState,
    MessageType,
    SendMessageContext,
    with_hook_properties,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.results import BatchSendResult
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.remoting.handling import DEFERRED
from tests.unit.client.consumer.consuming import QUEUE, Heard, committed, send
from tests.unit.client.fake_cluster import Group, World, open_world
from tests.unit.client.producer.fake_transactions import FakeTransactions

OTHER = MessageQueue("T", "g", 1)


class Sends:
    """Keeps what it was given of sends; raises on request."""

    def __init__(self, *, raises: bool = False) -> None:
        self.before: list[SendMessageContext] = []
        self.after: list[SendMessageContext] = []
        self.raises = raises

    def send_message_before(self, context: SendMessageContext) -> None:
        assert context.send_result is None
        self.before.append(context)
        context.props["seen"] = "before"
        self._fail()

    def send_message_after(self, context: SendMessageContext) -> None:
        assert context.props["seen"] == "before"
        self.after.append(context)
        self._fail()

    def _fail(self) -> None:
        if self.raises:
            raise RuntimeError("a hook of the user's")

    def the_one(self) -> SendMessageContext:
        """Return the context of the only send there was."""
        (before,), (after,) = self.before, self.after
        assert before is after
        return after


class Consumptions:
    """Keeps what it was given of messages handed out; raises on request."""

    def __init__(self, *, raises: bool = False) -> None:
        self.before: list[list[bytes]] = []
        self.after: list[tuple[list[bytes], bool, str, str]] = []
        self.queues: set[MessageQueue] = set()
        self.raises = raises

    def consume_message_before(self, context: ConsumeMessageContext) -> None:
        assert context.consumer_group == "c"
        assert not context.success
        self.queues.add(context.mq)
        self.before.append([message.body_bytes for message in context.msg_list])
        if self.raises:
            raise RuntimeError("a hook of the user's")

    def consume_message_after(self, context: ConsumeMessageContext) -> None:
        bodies = [message.body_bytes for message in context.msg_list]
        kind = context.props["ConsumeContextType"]
        self.after.append((bodies, context.success, context.status, kind))
        if self.raises:
            raise RuntimeError("a hook of the user's")


class Ends:
    """Keeps the decisions it was given."""

    def __init__(self) -> None:
        self.contexts: list[EndTransactionContext] = []

    def end_transaction(self, context: EndTransactionContext) -> None:
        self.contexts.append(context)
        raise RuntimeError("a hook of the user's")


def queue_bodies(group: Group, topic: str = "T") -> list[bytes]:
    """Return the bodies of *topic*, queue by queue."""
    return [
        MessageExt(memoryview(raw), 0).body_bytes
        for queue_id in range(4)
        for raw in group.queue(topic, queue_id)
    ]


@asynccontextmanager
async def hooked(*hooks: Sends, **more: Any) -> AsyncIterator[tuple[World, Producer]]:
    """A producer whose sends these hooks see, and what it sends to."""
    config = ProducerConfig(send_message_hooks=hooks, **more)
    async with (
        open_world() as world,
        world.client() as client,
        Producer(client, "p", config) as producer,
    ):
        yield world, producer


# ---------------------------------------------------------------------------------- sends


@pytest.mark.parametrize("rocketmq", [False, True])
async def test_hooks_run_once_before_and_once_after_a_send(rocketmq: bool) -> None:
    hook = Sends()
    config = ProducerConfig(send_message_hooks=(hook,))
    message = Message("T", b"x", tags="A")
    async with (
        open_world(rocketmq=rocketmq) as world,
        world.client() as client,
        Producer(client, "p", config) as producer,
    ):
        result = await producer.send(message)
        leader = world.group.leader
    context = hook.the_one()
    assert context.message is message
    assert (context.producer_group, context.broker_addr, context.born_host) == (
        "p", leader, client.config.client_ip,
    )  # fmt: skip
    assert context.communication_mode is CommunicationMode.SYNC
    assert context.msg_type is MessageType.NORMAL_MSG
    assert context.exception is None
    reported = context.send_result
    assert isinstance(reported, SendResult)
    assert (reported.message_id, reported.queue_offset, reported.message_queue) == (
        result.message_id, 0, context.mq,
    )  # fmt: skip


async def test_hooks_run_for_every_way_to_send() -> None:
    hook = Sends()
    async with hooked(hook) as (world, producer):
        await producer.send_to(OTHER, Message("T", b"to", delay_level=2))
        await (await producer.send_async(Message("T", b"async"))).result()
        await producer.send_nowait(Message("T", b"nowait", delay_ms=5)).result()
        batch = await producer.send_batch([Message("T", b"b0"), Message("T", b"b1")])
        await producer.send_oneway(Message("T", b"oneway"))
        await trio.sleep(1)
        assert len(queue_bodies(world.group)) == 6
    assert hook.before == hook.after
    assert [(c.communication_mode.name, c.msg_type.name) for c in hook.after] == [
        ("SYNC", "DELAY_MSG"),
        ("ASYNC", "NORMAL_MSG"),
        ("ASYNC", "DELAY_MSG"),
        ("SYNC", "NORMAL_MSG"),
        ("ONEWAY", "NORMAL_MSG"),
    ]
    reported = hook.after[3].send_result
    assert isinstance(reported, BatchSendResult)
    assert [r.message_id for r in reported] == [r.message_id for r in batch]
    assert hook.after[4].send_result is None
    assert hook.after[4].exception is None


async def test_hooks_run_for_a_refusal_and_a_cancelled_sender() -> None:
    hook = Sends()
    async with hooked(hook) as (world, producer):
        world.group.refused_queues["T", 0] = 16
        with pytest.raises(BrokerRefusedError) as caught:
            await producer.send_to(QUEUE, Message("T", b"no"))
        world.group.brokers[0].delay_s = 1.0
        with trio.move_on_after(0.5):
            await producer.send_to(OTHER, Message("T", b"late"))
        assert len(hook.after) == 2
    refused, cancelled = hook.after
    assert refused.exception is caught.value
    assert (refused.send_result, cancelled.send_result) == (None, None)
    assert isinstance(cancelled.exception, UnknownOutcomeError)
    assert hook.before == hook.after


async def test_hooks_get_the_group_a_send_moved_to() -> None:
    hook = Sends()
    async with hooked(hook, idempotent=False) as (world, producer):
        await world.add_group("h", 1, 11911)
        queues = await producer.publish_queues("T")
        for broker in world.group.brokers:
            await broker.kill()
        for _ in queues:
            await producer.send(Message("T", b"x"))
    assert len(hook.after) == len(queues)
    assert {c.mq.broker_name for c in hook.after} == {"h"}
    assert {c.broker_addr for c in hook.after} == {world.groups["h"].leader}


async def test_hooks_run_for_a_oneway_send_that_cannot_leave() -> None:
    hook = Sends()
    async with hooked(hook, attempt_timeout_s=0.2) as (world, producer):
        await producer.publish_queues("T")
        for broker in world.group.brokers:
            await broker.kill()
        with pytest.raises(BrokerUnreachableError) as caught:
            await producer.send_oneway(Message("T", b"x"))
    assert hook.the_one().exception is caught.value


async def test_hooks_that_raise_lose_nothing_and_are_logged() -> None:
    bad, good = Sends(raises=True), Sends()
    with capture_logs() as logs:
        async with hooked(bad, good) as (world, producer):
            assert (await producer.send_to(QUEUE, Message("T", b"0"))).queue_offset == 0
            batch = await producer.send_batch([Message("T", b"1")], queue=QUEUE)
            assert batch[0].queue_offset == 1
            await producer.send_to(QUEUE, Message("T", b"2", delay_level=1))
            await producer.send_oneway(Message("T", b"3"), queue=QUEUE)
            world.group.refused_queues["T", 1] = 16
            with pytest.raises(BrokerRefusedError):
                await producer.send_to(OTHER, Message("T", b"no"))
            await trio.sleep(1)
            assert queue_bodies(world.group) == [b"0", b"1", b"2", b"3"]
    assert len(good.before) == len(good.after) == len(bad.after) == 5
    failed = [line for line in logs if line["event"] == "hook_failed"]
    assert len(failed) == 10
    assert {line["hook"] for line in failed} == {
        "Sends.send_message_before",
        "Sends.send_message_after",
    }


async def test_hooks_run_for_sends_that_closing_fails() -> None:
    hook = Sends()
    config = ProducerConfig(send_message_hooks=(hook,))
    async with open_world() as world, world.client() as client:

        async def fail() -> None:
            async with Producer(client, "p", config) as producer:
                world.group.brokers[0].intercept = lambda _: DEFERRED
                await producer.send_async(Message("T", b"x"))
                await trio.sleep(0.5)
                raise RuntimeError("the caller's")

        with pytest.raises(RuntimeError, match="the caller's"):
            await fail()
    assert isinstance(hook.the_one().exception, UnknownOutcomeError)


# ---------------------------------------------------------------------------------- transactions


async def test_hooks_run_for_half_messages_and_decisions() -> None:
    sends, ends = Sends(raises=True), Ends()
    config = TransactionProducerConfig(
        ProducerConfig(send_message_hooks=(sends,)), end_transaction_hooks=(ends,)
    )
    order = Message("T", b"order", tags="A")

    async def unasked(_: MessageExt) -> LocalTransactionState:
        raise AssertionError("no broker asks")

    async def commit(_: HalfMessage) -> LocalTransactionState:
        await trio.lowlevel.checkpoint()
        return LocalTransactionState.COMMIT

    async with open_world() as world, world.client() as client:
        transactions = FakeTransactions(world.group)
        async with TransactionProducer(client, "pg", unasked, config) as producer:
            result = await producer.send_in_transaction(order, commit)
        assert transactions.decisions == {0: 8}
    assert sends.the_one().msg_type is MessageType.TRANS_MSG_HALF
    (end,) = ends.contexts
    assert end.message is order
    assert end.msg_id == end.transaction_id == result.half.transaction_id
    assert (end.transaction_state, end.from_transaction_check) == (
        LocalTransactionState.COMMIT, False,
    )  # fmt: skip
    assert (end.producer_group, end.broker_addr) == ("pg", world.group.leader)


# ---------------------------------------------------------------------------------- consumers


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("orderly", [False, True])
async def test_hooks_run_for_every_call_of_a_listener(raises: bool, orderly: bool) -> None:
    heard, hook = Heard(), Consumptions(raises=raises)
    answers: Iterator[ConsumeStatus | None] = iter([ConsumeStatus.RECONSUME_LATER, None, None])
    heard.answer = lambda _message, _context: next(answers)
    config = PushConfig(consume_from=FROM_FIRST, consume_message_hooks=(hook,))
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        world.group.makes_retry_topics = True
        await send(producer, 1)
        async with PushConsumer(client, "c", heard, {"T": "*"}, config, orderly=orderly):
            await heard.wait_for(2 if orderly else 1)
            await trio.sleep(1)
        assert committed(world.group)[0] == 1
    good, bad = (
        ("SUCCESS", "SUSPEND_CURRENT_QUEUE_A_MOMENT")
        if orderly
        else ("CONSUME_SUCCESS", "RECONSUME_LATER")
    )
    reported = [([b"0"], False, bad, "FAILED"), ([b"0"], True, good, "SUCCESS")]
    assert hook.after[: 2 if orderly else 1] == reported[: 2 if orderly else 1]
    assert len(hook.before) == len(hook.after)
    assert QUEUE in hook.queues


def raising(_: DeliveredMessage, __: ConsumeContext) -> ConsumeStatus:
    raise ValueError("the listener's")


@pytest.mark.slow
async def test_hooks_run_for_a_listener_that_raises_or_times_out() -> None:
    heard, hook = Heard(), Consumptions()
    config = PushConfig(
        consume_from=FROM_FIRST, consume_message_hooks=(hook,), consume_timeout_s=3.0
    )
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        heard.answer = raising
        async with PushConsumer(client, "c", heard, {"T": "*"}, config):
            await send(producer, 1)
            await heard.wait_for(1)
            await trio.sleep(0.1)
            heard.delay_s = 100.0
            await send(producer, 1, first=1)
            await trio.sleep(10)
    assert hook.after[0] == ([b"0"], False, "RECONSUME_LATER", "EXCEPTION")
    assert ([b"1"], False, "RECONSUME_LATER", "TIME_OUT") in hook.after


async def test_hooks_run_when_a_poll_returns_and_when_it_ends(
    world: World, client: ClientInstance, producer: Producer
) -> None:
    hook = Consumptions(raises=True)
    await send(producer, 3, queues=1)
    async with LitePullConsumer(
        client, "c", consume_from=FROM_FIRST, consume_message_hooks=(hook,)
    ) as consumer:
        consumer.subscribe("T")
        assert len(await consumer.poll(max_messages=2)) == 2
        assert (hook.before, hook.after) == ([[b"0", b"1"]], [])
        assert len(await consumer.poll()) == 1
        done = ([b"0", b"1"], True, "CONSUME_SUCCESS", "SUCCESS")
        assert hook.after == [done]
    assert hook.after == [done, ([b"2"], False, "RECONSUME_LATER", "FAILED")]
    assert committed(world.group)[0] == 2


class Giving:
    """Gives each message the same properties."""

    def __init__(self, given: dict[str, str]) -> None:
        self.given = given

    def send_message_properties(self, message: Message) -> dict[str, str]:
        if "raise" in self.given:
            raise ValueError(message.topic)
        return self.given


def test_properties_of_a_message_win_over_those_of_hooks() -> None:
    message = Message("T", b"x", properties={"own": "1", "both": "mine"})
    hooks = [Giving({"both": "theirs", "a": "1"}), Giving({"raise": ""}), Giving({"b": "2"})]
    with capture_logs() as logs:
        given = with_hook_properties(message, hooks)
    assert given.properties == {"own": "1", "both": "mine", "a": "1", "b": "2"}
    assert message.properties == {"own": "1", "both": "mine"}
    assert [line["event"] for line in logs] == ["hook_failed"]
    assert with_hook_properties(message, [Giving({})]) is message
