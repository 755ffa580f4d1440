"""Message trace in RocketMQ's encoding, byte by byte.

Message trace of producers and consumers against a cluster in memory.
"""

import pytest
import trio

from dledger.client import trace as trace_dispatcher
from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.lite_pull_consumer import LitePullConsumer
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.client.trace import (
    TRACE_BATCH_MAX,
    WAITING_TRACES_MAX,
    TraceBean,
    TraceContext,
    TraceType,
    decode,
    encode,
    keys_of,
)
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.topic_names import TRACE_TOPIC
from tests.unit.client.consumer.consuming import Heard, send
from tests.unit.client.fake_cluster import Group, World, open_world
from tests.unit.client.producer.fake_transactions import FakeTransactions

BEAN = TraceBean(
    "ID1", "T", "A", "k1 k2", "10.0.0.1:10911", 26, 0, "OFF1", 2, "ID1", "COMMIT_MESSAGE", False
)
BARE = TraceBean("ID2", "T")


def context(kind: TraceType, *beans: TraceBean) -> TraceContext:
    return TraceContext(kind, 1700000000123, beans, "DefaultRegion", "g", 7, True, "REQ", 4)


GOLDEN = {
    TraceType.PUB: (
        "Pub\x011700000000123\x01DefaultRegion\x01g\x01T\x01ID1\x01A\x01k1 k2\x0110.0.0.1:10911"
        "\x0126\x017\x010\x01OFF1\x01true\x02"
    ),
    TraceType.SUB_BEFORE: (
        "SubBefore\x011700000000123\x01DefaultRegion\x01g\x01REQ\x01ID1\x012\x01k1 k2\x02"
    ),
    TraceType.SUB_AFTER: (
        "SubAfter\x01REQ\x01ID1\x017\x01true\x01k1 k2\x014\x011700000000123\x01g\x02"
    ),
    TraceType.END_TRANSACTION: (
        "EndTransaction\x011700000000123\x01DefaultRegion\x01g\x01T\x01ID1\x01A\x01k1 k2"
        "\x0110.0.0.1:10911\x010\x01ID1\x01COMMIT_MESSAGE\x01false\x02"
    ),
}


@pytest.mark.parametrize("kind", TraceType)
def test_each_record_is_rocketmqs_to_the_byte(kind: TraceType) -> None:
    assert encode(context(kind, BEAN)) == GOLDEN[kind]


@pytest.mark.parametrize("kind", TraceType)
def test_what_is_read_is_written_the_same_again(kind: TraceType) -> None:
    (found,) = decode(GOLDEN[kind])
    assert encode(found) == GOLDEN[kind]
    assert found.trace_type is kind


def test_each_message_of_a_context_has_a_record_of_its_own() -> None:
    text = encode(context(TraceType.SUB_BEFORE, BEAN, BARE))
    assert text == GOLDEN[TraceType.SUB_BEFORE] + (
        "SubBefore\x011700000000123\x01DefaultRegion\x01g\x01REQ\x01ID2\x010\x01null\x02"
    )
    assert [found.beans[0].msg_id for found in decode(text)] == ["ID1", "ID2"]


def test_trace_data_writes_missing_fields_as_java_does() -> None:
    text = encode(TraceContext(TraceType.PUB, 1, (BARE,), "", "g"))
    assert (
        text
        == "Pub\x011\x01null\x01g\x01T\x01ID2\x01null\x01null\x01\x010\x010\x010\x01\x01true\x02"
    )
    (found,) = decode(text)
    assert (found.region_id, found.beans) == ("", (BARE,))


def test_keys_are_ids_and_single_keys_once_each() -> None:
    assert keys_of(context(TraceType.PUB, BEAN, BARE, BEAN)) == ["ID1", "k1", "k2", "ID2"]


def test_older_and_newer_clients_are_read() -> None:
    oldest = "Pub\x015\x01r\x01g\x01T\x01ID\x01A\x01k\x01h\x013\x014\x011\x01true\x02"
    newer = "Pub\x015\x01r\x01g\x01T\x01ID\x01A\x01k\x01h\x013\x014\x011\x01OFF\x01false\x01me\x02"
    after = (
        "SubAfter\x01R\x01ID\x014\x01false\x01k\x02SubAfter\x01R\x01ID\x014\x01true\x01k\x013\x02"
    )
    one, two, three, four = decode(oldest + newer + after)
    assert (one.beans[0].offset_msg_id, one.is_success) == ("", True)
    assert (two.beans[0].offset_msg_id, two.is_success) == ("OFF", False)
    assert (three.time_stamp_ms, three.context_code, three.is_success) == (0, 0, False)
    assert (four.group_name, four.context_code, four.is_success) == ("", 3, True)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "\x02\x02",
        "Pub\x01x\x02",
        "Pub\x02",
        "Recall\x011\x01r\x02",
        "SubBefore\x01a\x01b\x01\x02",
    ],
)
def test_what_cannot_be_read_is_passed_over(damaged: str) -> None:
    found = list(decode(damaged + "\x02" + GOLDEN[TraceType.SUB_AFTER]))
    assert [context.request_id for context in found] == ["REQ"]


TRACED = ProducerConfig(enable_msg_trace=True)


def traces(group: Group, topic: str = TRACE_TOPIC) -> list[MessageExt]:
    """Return the trace messages that are stored."""
    return [MessageExt(memoryview(raw), 0) for q in range(4) for raw in group.queue(topic, q)]


def steps(group: Group, topic: str = TRACE_TOPIC) -> list[TraceContext]:
    """Return what they say."""
    return [step for m in traces(group, topic) for step in decode(m.body_bytes.decode())]


async def test_a_stored_message_is_traced_under_its_id_and_keys() -> None:
    async with open_world() as world, world.client() as client:
        group = world.group
        group.topics[TRACE_TOPIC] = 1
        async with Producer(client, "p", TRACED) as producer:
            result = await producer.send(Message("T", b"body", tags="A", keys=("k1", "k2")))
        (message,) = traces(group)
        (step,) = steps(group)
    assert message.keys == f"{result.message_id} k1 k2"
    assert (step.trace_type, step.group_name, step.region_id, step.is_success) == (
        TraceType.PUB, "p", "DefaultRegion", True,
    )  # fmt: skip
    assert step.beans == (
        TraceBean(
            result.message_id, "T", "A", "k1 k2", str(group.leader), 4, 0, result.offset_message_id
        ),
    )
    assert producer.trace is not None
    assert producer.trace.counters.sent == 1


async def test_every_message_of_a_batch_is_found_and_steps_go_together() -> None:
    async with open_world() as world, world.client() as client:
        world.group.topics["MY_TRACES"] = 1
        config = ProducerConfig(enable_msg_trace=True, trace_topic="MY_TRACES")
        async with Producer(client, "p", config) as producer:
            batch = await producer.send_batch([Message("T", b"%d" % i) for i in range(3)])
            await producer.send_oneway(Message("T", b"not traced: the outcome is unknown"))
            await producer.send(Message("MY_TRACES", b"not traced: a trace itself"))
        found = steps(world.group, "MY_TRACES")
        (message,) = (m for m in traces(world.group, "MY_TRACES") if m.keys)
    assert [step.beans[0].msg_id for step in found] == [r.message_id for r in batch]
    assert message.keys.split() == [r.message_id for r in batch]


async def test_consumption_is_traced_before_and_after() -> None:
    heard = Heard()
    config = PushConfig(consume_from=FROM_FIRST, enable_msg_trace=True)
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        world.group.topics[TRACE_TOPIC] = 1
        await send(producer, 1)
        async with PushConsumer(client, "c", heard, {"T": "*"}, config):
            await heard.wait_for(1)
            await trio.sleep(0.3)
        before, after = steps(world.group)
    (message,) = heard.messages
    assert (before.trace_type, after.trace_type) == (TraceType.SUB_BEFORE, TraceType.SUB_AFTER)
    assert before.request_id == after.request_id != ""
    assert before.beans[0].msg_id == after.beans[0].msg_id == message.message_id
    assert (after.is_success, after.context_code, after.group_name) == (True, 0, "c")
    assert before.beans[0].retry_times == 0
    assert after.cost_time_ms == after.time_stamp_ms - before.time_stamp_ms


async def test_polls_are_traced() -> None:
    async with open_world() as world, world.client() as client, Producer(client, "p") as producer:
        world.group.topics[TRACE_TOPIC] = 1
        await send(producer, 2, queues=1)
        async with LitePullConsumer(
            client, "c", consume_from=FROM_FIRST, enable_msg_trace=True
        ) as consumer:
            consumer.subscribe("T")
            assert len(await consumer.poll()) == 2
            await consumer.commit()
        kinds = [step.trace_type.value for step in steps(world.group)]
    assert kinds == ["SubBefore", "SubBefore", "SubAfter", "SubAfter"]


async def test_half_messages_and_decisions_are_traced() -> None:
    async def unasked(_: MessageExt) -> LocalTransactionState:
        raise AssertionError("no broker asks")

    async def commit(_: HalfMessage) -> LocalTransactionState:
        await trio.lowlevel.checkpoint()
        return LocalTransactionState.COMMIT

    async with open_world() as world, world.client() as client:
        world.group.topics[TRACE_TOPIC] = 1
        FakeTransactions(world.group)
        config = TransactionProducerConfig(TRACED)
        async with TransactionProducer(client, "pg", unasked, config) as producer:
            result = await producer.send_in_transaction(Message("T", b"x", keys="k"), commit)
        half, end = steps(world.group)
    assert (half.trace_type, half.beans[0].msg_type) == (TraceType.PUB, 1)
    (bean,) = end.beans
    assert (end.trace_type, bean.msg_type, bean.transaction_state) == (
        TraceType.END_TRANSACTION, 2, "COMMIT_MESSAGE",
    )  # fmt: skip
    assert bean.msg_id == bean.transaction_id == result.half.transaction_id
    assert not bean.from_transaction_check


async def test_dispatcher_with_hanging_topic_delays_no_send(
    world: World, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_dispatcher, "WAITING_TRACES_MAX", 10)

    def hang(asked: RemotingCommand) -> Handled:
        topics = {run[0] for run in asked.ext.get("runs", [])}
        return DEFERRED if TRACE_TOPIC in topics else None

    world.group.topics[TRACE_TOPIC] = 1
    world.group.intercept(hang)
    async with Producer(client, "p", TRACED) as producer:
        began = trio.current_time()
        for number in range(50):
            await producer.send(Message("T", b"%d" % number))
        assert trio.current_time() - began < 0.5
        assert producer.trace is not None
        assert producer.trace.counters.dropped == 40
        await trio.sleep(20)
        assert producer.trace.counters.failed == 10
    assert traces(world.group) == []


async def test_without_a_trace_topic_sends_go_on(world: World, client: ClientInstance) -> None:
    world.group.topics.pop("TBW102", None)
    async with Producer(client, "p", TRACED) as producer:
        assert (await producer.send(Message("T", b"x"))).message_id
        await trio.sleep(10)
        assert producer.trace is not None
        assert (producer.trace.counters.sent, producer.trace.counters.failed) == (0, 1)


async def test_many_steps_leave_in_messages_of_bounded_size() -> None:
    async with open_world() as world, world.client() as client:
        world.group.topics[TRACE_TOPIC] = 1
        async with Producer(client, "p", TRACED) as producer:
            assert producer.trace is not None
            for number in range(WAITING_TRACES_MAX):
                keys = "k" * (7000 if number < 5 else 10)
                bean = TraceBean(f"ID{number}", "T", keys=keys)
                assert producer.trace.append(TraceContext(TraceType.PUB, 1, (bean,)))
            await trio.sleep(5)
            assert producer.trace.counters.sent == WAITING_TRACES_MAX
        found = [list(decode(m.body_bytes.decode())) for m in traces(world.group)]
    assert sum(map(len, found)) == WAITING_TRACES_MAX
    assert max(map(len, found)) == TRACE_BATCH_MAX
    assert max(len(m.keys) for m in traces(world.group)) <= trace_dispatcher.TRACE_KEYS_BYTES
    ids = [step.beans[0].msg_id for message in found for step in message]
    assert set(ids) == {f"ID{number}" for number in range(WAITING_TRACES_MAX)}
