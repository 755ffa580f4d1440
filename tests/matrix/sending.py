"""Rows about what is sent: groups, filters, queries, idempotence, transactions, batches."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import trio

from dledger.client.admin.admin import Admin
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    ClientError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import CompressionType, MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.request_reply import reply_message
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.client.trace import TraceDispatcher, decode
from dledger.jepsen_like.chaos.cluster import GROUP
from tests.harness.operator_cluster import SERVICE
from tests.matrix.ground import LOOK_S, OTHER_GROUP, SEND_TIMEOUT_S, Ground, Tail, retried
from tests.matrix.row import Round, row


@row("several groups")
async def several_groups(ground: Ground) -> AsyncIterator[Round]:
    names = (GROUP, OTHER_GROUP)
    await ground.admin.create_topic("both", queue_nums=2, broker_names=names)
    tail = await ground.tail("both")
    assert {queue.broker_name for queue in tail.queues} == set(names)

    async def play(number: int) -> None:
        bodies = [b"%d-%d" % (number, each) for each in range(8)]
        results = [await ground.producer.send(Message("both", body)) for body in bodies]
        # One that was slow to answer is left out for a while.
        while OTHER_GROUP not in {result.message_queue.broker_name for result in results}:
            bodies.append(b"%d-%d" % (number, len(bodies)))
            results.append(await ground.producer.send(Message("both", bodies[-1])))
            await trio.sleep(LOOK_S)
        there = await tail.until(bodies)
        said = {
            (r.message_queue.broker_name, r.message_queue.queue_id, r.queue_offset) for r in results
        }
        assert {(m.broker_name, m.queue_id, m.queue_offset) for m in there} == said

    yield play


@row("filtering")
async def filtering(ground: Ground) -> AsyncIterator[Round]:
    queues = await ground.topic("filtered")
    by_tag = await ground.tail("filtered", "red || blue")
    by_sql = await ground.tail(
        "filtered", SubscriptionExpression.by_sql("weight > 2 AND TAGS <> 'blue'")
    )

    async def play(number: int) -> None:
        sent: dict[bytes, tuple[str, int]] = {}
        for place, tag in enumerate(("red", "green", "blue", "red", "green")):
            body = b"%d %d" % (number, place)
            message = Message("filtered", body, tags=tag, properties={"weight": str(place)})
            await ground.producer.send_to(queues[place % len(queues)], message)
            sent[body] = (tag, place)
        await by_tag.until(body for body, (tag, _) in sent.items() if tag != "green")
        await by_sql.until(body for body, (tag, n) in sent.items() if n > 2 and tag != "blue")

    yield play


@row("query")
async def query(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("asked")

    async def play(number: int) -> None:
        key, body = f"order-{number}", b"asked %d" % number
        before_ms = int(time.time() * 1000)
        result = await ground.producer.send(Message("asked", body, keys=(key,)))
        by_key = await _until_found(lambda: ground.admin.query_messages("asked", key))
        assert [message.body_bytes for message in by_key] == [body]
        (by_id,) = await _until_found(
            lambda: ground.admin.query_unique_key("asked", result.message_id)
        )
        assert (by_id.body_bytes, by_id.queue_offset) == (body, result.queue_offset)
        at = await retried(lambda: ground.consumer.search_offset(result.message_queue, before_ms))
        assert at <= result.queue_offset

    yield play


async def _until_found(ask: Callable[[], Awaitable[list[MessageExt]]]) -> list[MessageExt]:
    """Ask until something is found: the index is behind an acknowledgement by an entry."""
    while True:
        if found := await retried(ask):
            return list(found)
        await trio.sleep(LOOK_S)


@row("idempotent producer")
async def idempotent_producer(ground: Ground) -> AsyncIterator[Round]:
    (queue,) = await ground.topic("once", 1)
    tail = await ground.tail("once")
    # So impatient that much is sent more than once while the leader is in trouble.
    config = _patient(attempt_timeout_s=0.3)
    async with Producer(ground.client, "impatient", config) as producer:

        async def play(number: int) -> None:
            bodies = [b"once %d-%d" % (number, each) for each in range(5)]
            offsets = []
            for body in bodies:
                offsets.append((await producer.send_to(queue, Message("once", body))).queue_offset)
            batch = [Message("once", b"batch %d-%d" % (number, each)) for each in range(3)]
            results = await producer.send_batch(batch, queue=queue)
            bodies += [bytes(message.body) for message in batch]
            offsets += [result.queue_offset for result in results]
            there = await tail.until(bodies)
            assert [message.body_bytes for message in there] == bodies
            assert [message.queue_offset for message in there] == offsets

        yield play


@row("transactions")
async def transactions(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("deals", 1)
    tail = await ground.tail("deals")
    said: dict[str, LocalTransactionState] = {}

    async def check(message: MessageExt) -> LocalTransactionState:
        return said.get(message.message_id, LocalTransactionState.UNKNOWN)

    config = TransactionProducerConfig(producer=_patient(), topics=("deals",))
    async with TransactionProducer(ground.client, "dealers", check, config) as producer:

        async def play(number: int) -> None:
            async def decide(half: HalfMessage) -> LocalTransactionState:
                back = b"back" in bytes(half.message.body)
                state = LocalTransactionState.ROLLBACK if back else LocalTransactionState.COMMIT
                said[half.transaction_id] = state
                # A broker asks for those that are not ended.
                is_silent = b"silent" in bytes(half.message.body)
                return LocalTransactionState.UNKNOWN if is_silent else state

            for word in (b"done", b"back", b"silent"):
                await producer.send_in_transaction(
                    Message("deals", b"%s %d" % (word, number)), decide
                )
            await tail.until([b"done %d" % number, b"silent %d" % number])

        yield play


@row("request-reply, batch, compression, trace")
async def parcels(ground: Ground) -> AsyncIterator[Round]:
    (queue,) = await ground.topic("parcels", 1)
    await ground.topic("questions", 1)
    await ground.topic("traces", 1)
    tail, traces = await ground.tail("parcels"), await ground.tail("traces")
    async with (
        ground.connect() as office,
        Producer(office, "office", _patient()) as answers,
        AsyncExitStack() as packers,
    ):
        folding = [await packers.enter_async_context(_packer(ground, t)) for t in CompressionType]

        async def answer(
            messages: Sequence[DeliveredMessage], context: ConsumeContext
        ) -> ConsumeStatus | None:
            (message,) = messages
            await answers.send(reply_message(message, b"heard " + message.body_bytes))
            return None

        config = PushConfig(consume_from=FROM_FIRST)
        async with PushConsumer(office, "desk", answer, {"questions": "*"}, config):

            async def play(number: int) -> None:
                large = (b"large %d " % number) * 400
                producer = folding[number % len(folding)]
                failed = (counters := cast(TraceDispatcher, producer.trace).counters).failed
                one = await producer.send_to(queue, Message("parcels", large))
                batch = [Message("parcels", b"small %d-%d" % (number, n)) for n in range(4)]
                results = await producer.send_batch(batch, queue=queue)
                question = Message("questions", b"%d" % number)
                reply = await retried(lambda: producer.request(question, timeout_s=SEND_TIMEOUT_S))
                assert reply.body_bytes == b"heard %d" % number
                offsets = [one.queue_offset, *(result.queue_offset for result in results)]
                assert offsets == list(range(offsets[0], offsets[0] + 5))
                there = await tail.until([large, *(bytes(message.body) for message in batch)])
                assert there[0].record.size < len(large)
                wanted = {result.message_id for result in (one, *results)}
                await _traced(traces, wanted, lambda: counters.failed > failed)

            yield play


def _packer(ground: Ground, kind: CompressionType) -> Producer:
    config = _patient(
        compress_over_bytes=64, compress_type=kind, enable_msg_trace=True, trace_topic="traces"
    )
    return Producer(ground.client, f"packers-{kind.name}", config)


def _patient(**more: Any) -> ProducerConfig:
    return ProducerConfig(send_timeout_s=SEND_TIMEOUT_S, **more)


async def _traced(traces: Tail, wanted: set[str], is_lost: Callable[[], bool]) -> None:
    """Wait until traces show that these messages were sent, each once, or some are counted lost."""
    reported: Counter[str] = Counter()
    while not (wanted <= set(reported) or is_lost()):
        for message in await traces.more():
            for context in decode(message.body_bytes.decode()):
                assert context.is_success
                reported.update(bean.msg_id for bean in context.beans)
        await trio.sleep(LOOK_S)
    assert all(reported[each] == 1 or (is_lost() and not reported[each]) for each in wanted)


@row("flow control")
async def flow_control(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("flood")
    tail = await ground.tail("flood")
    # More at a time than a broker lets one connection have open: the rest has to wait.
    config = _patient(requests_in_flight=8, compress_over_bytes=None)
    async with ground.connect() as client, Producer(client, "flooders", config) as producer:

        async def play(number: int) -> None:
            bodies = [(b"%d-%d " % (number, each)).ljust(50_000, b".") for each in range(12)]
            stored: list[bytes] = []

            async def send(body: bytes) -> None:
                try:
                    await producer.send(Message("flood", body))
                except BrokerBusyError:
                    return
                stored.append(body)

            async with trio.open_nursery() as nursery:
                for body in bodies:
                    nursery.start_soon(send, body)
            assert stored
            await tail.until(stored)

        yield play


@row("access")
async def access(ground: Ground) -> AsyncIterator[Round]:
    await ground.topic("guarded")
    await ground.topic("forbidden")
    tail, nothing = await ground.tail("guarded"), await ground.tail("forbidden")
    config = _patient()
    async with ground.connect(SERVICE) as client, Producer(client, "service", config) as producer:

        async def play(number: int) -> None:
            body = b"guarded %d" % number
            await producer.send(Message("guarded", body))
            # Unknown where an attempt before the refusal had no answer; it is not stored either.
            with pytest.raises((BrokerRefusedError, UnknownOutcomeError), match="permission"):
                await producer.send(Message("forbidden", body))
            with pytest.raises(ClientError) as denied:
                await retried(lambda: Admin(client).create_topic("mine", broker_names=(GROUP,)))
            assert not denied.value.retriable
            await tail.until([body])
            await nothing.until([])

        yield play
