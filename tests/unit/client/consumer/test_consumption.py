"""Ordered consumption against a cluster in memory, on virtual time."""

from collections.abc import Callable

import pytest
import trio

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.message import Message
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import decode_record
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand
from tests.harness.fake_nodes import fixed
from tests.unit.client.consumer.consuming import QUEUE, Heard, committed, owned, send, settled
from tests.unit.client.fake_cluster import Broker, Group, World

FIRST = PushConfig(consume_from=FROM_FIRST)
WIRE_QUEUE = bodies.MessageQueue("T", "g", 0)


def holders(group: Group) -> dict[int, str]:
    return {q.queue_id: who for (_, q), (who, _) in group.locks.items() if q.topic == "T"}


async def test_each_queue_is_consumed_in_order_one_batch_at_a_time(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 0.5
    await send(producer, 40)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(40)
        assert set(holders(world.group).values()) == {client.client_id}
    for queue_id in range(4):
        numbers = [int(m.body_bytes) for m in heard.messages if m.queue_id == queue_id]
        assert numbers == list(range(queue_id, 40, 4))
    assert heard.most_running == 4
    assert heard.at[-1] - heard.at[0] == pytest.approx(4.5, abs=0.3)
    assert committed(world.group) == dict.fromkeys(range(4), 10)
    assert holders(world.group) == {}


async def test_lock_of_another_client_keeps_the_queue_unread(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    world.group.locks["c", WIRE_QUEUE] = ("another client", trio.current_time())
    await send(producer, 8)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(6)
        await trio.sleep(50)
        assert {m.queue_id for m in heard.messages} == {1, 2, 3}
        pulled = {
            s.command.ext["queueId"]
            for s in world.seen
            if s.code == RequestCode.PULL_MESSAGE and s.command.ext["topic"] == "T"
        }
        assert pulled == {"1", "2", "3"}
        await heard.wait_for(8, within_s=15)  # the broker lets it expire
    assert heard.bodies[-2:] == [b"0", b"4"]


async def test_queue_begins_again_where_others_have_left_it(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    await send(producer, 4, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True) as consumer:
        await heard.wait_for(4)
        await trio.sleep(6)  # the offset is committed
        world.group.locks["c", WIRE_QUEUE] = ("another client", trio.current_time())
        await trio.sleep(25)  # the renewal is refused
        await send(producer, 4, queues=1, first=4)
        await trio.sleep(5)
        assert len(heard.bodies) == 4
        world.group.committed["c", "T", 0] = 6  # two of them were consumed by the other
        del world.group.locks["c", WIRE_QUEUE]
        await heard.wait_for(6, within_s=3)
        assert consumer.counts["lost"] == 1
    assert heard.bodies == [b"0", b"1", b"2", b"3", b"6", b"7"]
    assert committed(world.group)[0] == 8


async def test_lock_without_renewal_ends_after_thirty_seconds(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True) as consumer:
        await settled(consumer)
        await trio.sleep(1)
        began = trio.current_time()
        lock, unlocked = RequestCode.LOCK_BATCH_MQ, world.group.brokers[0]._lock
        world.group.on(RequestCode.LOCK_BATCH_MQ, fixed(ResponseCode.SYSTEM_ERROR, "no"))
        await trio.sleep(27)
        await send(producer, 1, queues=1)
        await heard.wait_for(1, within_s=1)
        await trio.sleep(4)
        await send(producer, 1, queues=1, first=1)
        await trio.sleep(20)
        assert heard.bodies == [b"0"]
        # It asks once a second while there is no answer.
        asked = [s.at for s in world.seen if s.code == lock and s.at > began + 40]
        assert len(asked) >= 8
        world.group.on(RequestCode.LOCK_BATCH_MQ, unlocked)
        await heard.wait_for(2, within_s=3)


async def test_orderly_failure_is_tried_in_place_before_the_others(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    suspend = ConsumeStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
    heard.answer = lambda m, _: (
        suspend if m.body_bytes == b"1" and m.reconsume_times < 3 else ConsumeStatus.SUCCESS
    )
    await send(producer, 3, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(6)
    assert heard.bodies == [b"0", b"1", b"1", b"1", b"1", b"2"]
    gaps = [round(b - a, 1) for a, b in zip(heard.at, heard.at[1:], strict=False)]
    assert gaps == [0, 1, 1, 1, 0]
    assert [m.reconsume_times for m in heard.messages][4] == 3
    assert world.count(RequestCode.CONSUMER_SEND_MSG_BACK) == 0


async def test_a_listener_chooses_how_long_its_queue_rests(
    client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(message: DeliveredMessage, context: ConsumeContext) -> ConsumeStatus | None:
        context.suspend_ms = 7000
        return None if message.reconsume_times else ConsumeStatus.RECONSUME_LATER

    heard.answer = answer
    await send(producer, 1, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(2)
    assert heard.at[1] - heard.at[0] == pytest.approx(7, abs=0.1)


async def test_a_message_tried_too_often_goes_to_the_dead_letters(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(message: DeliveredMessage, _: ConsumeContext) -> None:
        if message.body_bytes == b"0":
            raise ValueError("cannot cope")

    heard.answer = answer
    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=2)
    await send(producer, 2, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config, orderly=True) as consumer:
        await heard.wait_for(4)
        await trio.sleep(1)
        assert consumer.counts["given_up"] == 1
    assert heard.bodies == [b"0", b"0", b"0", b"1"]
    assert world.group.bodies("%DLQ%c") == [b"0"]
    (dead,) = world.group.queue("%DLQ%c", 0)
    assert decode_record(dead).property_map["RETRY_TOPIC"] == "T"
    assert committed(world.group)[0] == 2


async def test_a_message_that_cannot_be_given_up_is_tried_on(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.answer = lambda *_: ConsumeStatus.RECONSUME_LATER
    config = PushConfig(consume_from=FROM_FIRST, max_reconsume_times=1)
    await producer.send_to(QUEUE, Message("T", b"x"))
    world.group.intercept(fixed(ResponseCode.NO_PERMISSION, "no"))
    async with PushConsumer(client, "c", heard, {"T": "*"}, config, orderly=True):
        await heard.wait_for(4)
    assert committed(world.group).get(0, 0) == 0


async def test_a_queue_changes_hands_only_when_its_listener_has_ended(world: World) -> None:
    first, second = Heard(), Heard()
    first.delay_s = 8
    async with world.client() as one, world.client() as two, Producer(one, "p") as producer:
        await send(producer, 12)
        async with PushConsumer(one, "c", first, {"T": "*"}, FIRST, orderly=True) as consumer:
            await first.wait_for(4)
            began = trio.current_time()
            async with PushConsumer(two, "c", second, {"T": "*"}, FIRST, orderly=True) as other:
                await trio.sleep(5)
                assert second.bodies == []
                await second.wait_for(4)
                assert min(second.at) - began == pytest.approx(8, abs=1.5)
                moved = {m.queue_id for m in second.messages}
                assert [sorted(moved)] == owned(other)
                assert not moved & set(owned(consumer)[0])
                await first.wait_for(8)
        everything = sorted([*first.bodies, *second.bodies], key=int)
        assert everything == [b"%d" % i for i in range(12)]


async def test_stop_gives_locks_back_at_once(world: World, heard: Heard) -> None:
    async with world.client() as one, world.client() as two, Producer(one, "p") as producer:
        async with PushConsumer(two, "c", heard, {"T": "*"}, FIRST, orderly=True) as consumer:
            async with PushConsumer(one, "c", heard, {"T": "*"}, FIRST, orderly=True) as other:
                await settled(consumer, other)
                await send(producer, 8)
                await heard.wait_for(8)
            began = trio.current_time()
            await send(producer, 8, first=8)
            await heard.wait_for(16, within_s=3)
            assert trio.current_time() - began < 3
        assert sorted(heard.bodies, key=int) == [b"%d" % i for i in range(16)]


async def test_queue_that_rests_leaves_its_place_to_others(
    client: ClientInstance, producer: Producer, heard: Heard
) -> None:

    def answer(message: DeliveredMessage, context: ConsumeContext) -> ConsumeStatus | None:
        context.suspend_ms = 30_000
        return ConsumeStatus.RECONSUME_LATER if message.queue_id == 0 else None

    heard.answer = answer
    config = PushConfig(consume_from=FROM_FIRST, consume_tasks=1)
    await send(producer, 12, queues=4)
    async with PushConsumer(client, "c", heard, {"T": "*"}, config, orderly=True):
        await heard.wait_for(10, within_s=5)
        assert sorted(heard.bodies, key=int) == [b"%d" % i for i in range(12) if i % 4 or not i]
        assert heard.most_running == 1


async def test_listener_ends_when_the_lock_of_its_queue_is_lost(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 1e6
    await send(producer, 2, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True) as consumer:
        await heard.wait_for(1)
        began = trio.current_time()
        world.group.locks["c", WIRE_QUEUE] = ("another client", began)
        with trio.fail_after(22):  # the renewal is refused
            while heard.running:
                await trio.sleep(0.1)
        assert consumer.counts["lost"] == 1
        heard.delay_s = 0
        del world.group.locks["c", WIRE_QUEUE]
        await heard.wait_for(3, within_s=3)
        assert heard.bodies == [b"0", b"0", b"1"]


async def test_listener_ends_when_its_lock_is_not_renewed_in_time(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 1e6
    await send(producer, 1, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(1)
        world.group.on(RequestCode.LOCK_BATCH_MQ, fixed(ResponseCode.SYSTEM_ERROR, "no"))
        await trio.sleep(28)
        assert heard.running == 1
        await trio.sleep(3)
        assert heard.running == 0


def note_unlocks(world: World, note: Callable[[], object]) -> None:
    """Call *note* whenever locks are given back."""

    def unlock(broker: Broker, asked: RemotingCommand) -> RemotingCommand:
        note()
        return broker._unlock(asked)

    world.group.on_each(RequestCode.UNLOCK_BATCH_MQ, unlock)


async def test_stop_ends_a_listener_before_its_lock_is_given_back(
    world: World, client: ClientInstance, producer: Producer, heard: Heard
) -> None:
    heard.delay_s = 1e6
    running: list[int] = []
    note_unlocks(world, lambda: running.append(heard.running))
    await send(producer, 1, queues=1)
    async with PushConsumer(client, "c", heard, {"T": "*"}, FIRST, orderly=True):
        await heard.wait_for(1)
    assert set(running) == {0}
    assert holders(world.group) == {}


class Slow:
    """An executor whose works take fifty seconds, and cannot be cancelled."""

    def __init__(self) -> None:
        self.running = 0

    def runs_inline(self, kind: str) -> bool:
        return False

    def run_inline(self, work, *, kind: str):  # type: ignore[no-untyped-def]  # any work, any result
        return work()

    async def run(self, work, *, kind: str):  # type: ignore[no-untyped-def]  # any work, any result
        self.running += 1
        with trio.CancelScope(shield=True):
            await trio.sleep(50)
        self.running -= 1
        return work()


async def test_plain_function_that_runs_on_keeps_its_queue_locked(world: World) -> None:
    slow, heard = Slow(), Heard()
    beside: list[int] = []
    heard.answer = lambda *_: beside.append(slow.running)
    async with world.client() as one, world.client() as two, Producer(two, "p") as producer:
        one.executor = slow
        await send(producer, 4)
        async with (
            PushConsumer(one, "c", lambda *_: None, {"T": "*"}, FIRST, orderly=True) as first,
            PushConsumer(two, "c", heard, {"T": "*"}, FIRST, orderly=True) as second,
        ):
            await trio.sleep(40)
            assert (owned(first, second), slow.running) == ([[0, 1], [2, 3]], 4)
            await heard.wait_for(2)
    assert beside == [0, 0]


async def test_stop_unlocks_when_a_plain_function_has_ended(world: World) -> None:
    slow, kept = Slow(), list[tuple[int, set[int]]]()
    note_unlocks(world, lambda: kept.append((slow.running, set(holders(world.group)))))
    async with world.client() as client, Producer(client, "p") as producer:
        client.executor = slow
        await send(producer, 2, queues=2)
        async with PushConsumer(
            client, "c", lambda *_: None, {"T": "*"}, FIRST, orderly=True
        ) as consumer:
            await settled(consumer)
            await trio.sleep(1)
    assert kept == [(2, {0, 1, 2, 3}), (0, {0, 1})]
    assert holders(world.group) == {}
