"""An idempotent producer: what it repeats, under which sequence, and when it gives up."""

import gc
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    ClientClosedError,
    MessageIllegalError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.lane import PIPELINE_BYTES
from dledger.client.producer.producer import Producer
from dledger.client.producer.state import SendSlot
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World, open_world

QUEUE = MessageQueue("T", "g", 0)
UNKNOWN = (1, {"outcome": "unknown", "retriable": "true"})
BUSY = (2, {"outcome": "not_stored", "retriable": "true"})
FORGOTTEN = (1, {"outcome": "unknown", "reason": "producer_unknown"})
ILLEGAL = (13, {"outcome": "not_stored"})


def stamps(world: World) -> list[tuple[int, int, int]]:
    """Return epoch, sequence and first open of each SEND_RECORDS that arrived."""
    found = [seen.command.ext["producer"] for seen in world.seen if seen.code == 51101]
    assert len({item[0] for item in found}) <= 1, "one producer, one id"
    return [(item[1], item[2], item[3]) for item in found]


@asynccontextmanager
async def numbering() -> AsyncIterator[tuple[World, Producer]]:
    """Give a world whose brokers number sends, and a producer there."""
    async with (
        open_world(idempotent=True) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        yield world, producer


def answers(*given: tuple[int, dict[str, str]]) -> Callable[[RemotingCommand], Handled]:
    """Answer the first requests like this and the others as usual."""
    left = list(given)

    def intercept(asked: RemotingCommand) -> Handled:
        if not left:
            return None
        code, ext = left.pop(0)
        return response_to(asked, code, "no", dict(ext))

    return intercept


async def test_a_session_is_opened_once_and_sends_are_numbered() -> None:
    async with numbering() as (world, producer):
        for _ in range(3):
            await producer.send(Message("T", b"x"))
        assert world.count(RequestCode.OPEN_PRODUCER) == 1
        assert stamps(world) == [(101, 0, 0), (101, 1, 1), (101, 2, 2)]


@pytest.mark.parametrize("on", [True, False])
async def test_idempotence_is_off_where_it_is_not_wanted(on: bool) -> None:
    async with (
        open_world(idempotent=not on) as world,
        world.client() as client,
        Producer(client, "p", ProducerConfig(idempotent=on)) as producer,
    ):
        await producer.send(Message("T", b"x"))
        assert world.count(RequestCode.OPEN_PRODUCER) == 0
        (sent,) = [seen.command.ext for seen in world.seen if seen.code == 51101]
        assert "producer" not in sent


async def test_a_send_without_an_answer_is_repeated_as_it_was() -> None:
    async with numbering() as (world, producer):
        await producer.send(Message("T", b"before"))
        world.group.brokers[0].intercept = lambda asked: DEFERRED
        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer.send_to, QUEUE, Message("T", b"x"))
            await trio.testing.wait_all_tasks_blocked()
            world.group.elect(1)
            await world.group.brokers[0].kill()
        first, second = [seen.command for seen in world.seen if seen.code == 51101][1:]
        assert first.ext["producer"] == second.ext["producer"]
        assert first.ext["runs"] == second.ext["runs"]
        assert bytes(first.body) == bytes(second.body)


async def test_unknown_outcomes_are_repeated_until_the_deadline() -> None:
    async with numbering() as (world, producer):
        world.group.brokers[0].intercept = answers(*[UNKNOWN] * 12)
        result = await producer.send_to(QUEUE, Message("T", b"x"))
        assert result.queue_offset == 0
        assert stamps(world) == [(101, 0, 0)] * 13


async def test_send_that_no_repetition_can_change_ends_early() -> None:
    async with numbering() as (world, producer):
        broker = world.group.brokers[0]
        broker.intercept = answers(*[(1, {"outcome": "unknown"})] * 9)
        with pytest.raises(UnknownOutcomeError):
            await producer.send_to(QUEUE, Message("T", b"x"))
        assert len(stamps(world)) == 3


async def test_what_was_unknown_once_is_never_called_not_stored() -> None:
    async with numbering() as (world, producer):
        world.group.brokers[0].intercept = answers(UNKNOWN, BUSY, ILLEGAL)
        with pytest.raises(UnknownOutcomeError):
            await producer.send_to(QUEUE, Message("T", b"x"))
        assert stamps(world) == [(101, 0, 0)] * 3


async def test_send_of_unknown_outcome_stays_a_refused_one_may_move() -> None:
    async with open_world(idempotent=True) as world:
        await world.add_group("h", 1, 11911, idempotent=True)
        async with world.client() as client, Producer(client, "p") as producer:
            first = (await producer.send(Message("T", b"x"))).message_queue.broker_name
            other = "h" if first == "g" else "g"
            queues = [q for q in await producer.publish_queues("T") if q.broker_name == first]
            world.groups[first].brokers[0].intercept = answers(UNKNOWN, BUSY)
            results: list[Any] = []
            while not results or results[-1].message_queue not in queues:
                results.append(await producer.send(Message("T", b"y")))
            assert [r.message_queue.broker_name for r in results][-1] == first
            world.groups[first].brokers[0].intercept = answers(*[BUSY] * 3)
            moved = [(await producer.send(Message("T", b"z"))).message_queue for _ in range(6)]
            assert {queue.broker_name for queue in moved} == {other}


async def test_engine_opens_a_new_session_for_what_was_never_sent() -> None:
    async with numbering() as (world, producer):
        await producer.send_to(QUEUE, Message("T", b"a"))
        world.group.brokers[0].intercept = answers(FORGOTTEN)
        await producer.send_to(QUEUE, Message("T", b"b"))
        assert stamps(world) == [(101, 0, 0), (101, 1, 1), (102, 0, 0)]
        opened = [seen.command.ext for seen in world.seen if seen.code == 51110]
        assert [item["producerEpoch"] for item in opened] == ["0", "101"]
        assert world.group.bodies() == [b"a", b"b"]


async def test_a_forgotten_producer_does_not_repeat_what_may_be_stored() -> None:
    async with numbering() as (world, producer):
        world.group.brokers[0].intercept = answers(UNKNOWN, FORGOTTEN)
        with pytest.raises(UnknownOutcomeError):
            await producer.send_to(QUEUE, Message("T", b"x"))
        assert stamps(world) == [(101, 0, 0)] * 2
        await producer.send_to(QUEUE, Message("T", b"y"))
        assert stamps(world)[-1] == (102, 0, 0)


async def test_a_refused_send_gives_its_sequence_back() -> None:
    async with numbering() as (world, producer):
        world.group.brokers[0].intercept = answers(ILLEGAL)
        with pytest.raises(MessageIllegalError):
            await producer.send_to(QUEUE, Message("T", b"x"))
        await producer.send_to(QUEUE, Message("T", b"y"))
        assert stamps(world) == [(101, 0, 0), (101, 1, 1)]


@pytest.mark.parametrize("before", [[], [BUSY], [BUSY] * 3], ids=["at once", "busy", "all busy"])
async def test_engine_keeps_order_when_a_session_is_lost(
    before: list[tuple[int, dict[str, str]]],
) -> None:
    """Also of a request that waits, for its sequence, until others are repeated."""
    async with numbering() as (world, producer):
        group = world.group
        await producer.send_to(QUEUE, Message("T", b"0"))
        left, refusals = stamps(world)[0][0], answers(*before)

        def later(asked: RemotingCommand) -> Handled:
            if asked.ext["producer"][1] != left:
                return None
            refusal = refusals(asked)
            answer = refusal or answers(FORGOTTEN)(asked)

            async def wait() -> RemotingCommand:
                await trio.sleep(0.3 if refusal is None else 0.01)
                assert isinstance(answer, RemotingCommand)
                return answer

            return wait()

        group.brokers[0].intercept = later
        # More than leaves in one request, compressed too: several are open at a time.
        much = random.Random(1).randbytes(PIPELINE_BYTES)
        sends = []
        for number in range(1, 10):
            sends.append(producer.send_nowait(Message("T", b"%d" % number + much), queue=QUEUE))
            if number > 2:
                await trio.sleep(0.06)
        assert [(await send.result()).queue_offset for send in sends] == list(range(1, 10))
        assert [body[:1] for body in group.bodies()] == [b"%d" % number for number in range(10)]
        assert [epoch for epoch, _, _ in stamps(world)].count(left) > 2


async def test_engine_keeps_order_of_sends_that_stay_when_others_move() -> None:
    async with open_world(idempotent=True) as world:
        await world.add_group("h", 1, 11911, idempotent=True)
        async with world.client() as client, Producer(client, "p") as producer:
            await producer.publish_queues("T")
            await producer.send_to(QUEUE, Message("T", b"before"))
            refusals, done = answers(*[BUSY] * 4), {0}

            def busy(asked: RemotingCommand) -> Handled:
                """Refuse the next sequence for a while, and those behind it as long."""
                _, _, sequence, first_open = asked.ext["producer"]
                is_next = done.issuperset(range(first_open, sequence))
                refusal = refusals(asked) if sequence == 1 else None
                if refusal is None and is_next:
                    done.add(sequence)
                    return None
                return refusal or answers(BUSY)(asked)

            world.group.brokers[0].intercept = busy
            much = random.Random(1).randbytes(PIPELINE_BYTES)
            stay = [producer.send_nowait(Message("T", b"first"), queue=QUEUE)]
            free = [producer.send_nowait(Message("T", b"free")) for _ in range(4)]
            stay += [producer.send_nowait(Message("T", much), queue=QUEUE) for _ in range(3)]
            offsets = [(await send.result()).queue_offset for send in stay]
            assert offsets == sorted(offsets)
            assert "h" in {(await send.result()).message_queue.broker_name for send in free}


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("is_leader_known", [True, False])
async def test_engine_keeps_order_while_it_connects(
    idempotent: bool, is_leader_known: bool
) -> None:
    async with (
        open_world(idempotent=idempotent) as world,
        world.client() as client,
        Producer(client, "p") as producer,
    ):
        group = world.group
        await producer.publish_queues("T")
        if not is_leader_known:
            group.elect(1)
            await group.brokers[0].kill()
        much = random.Random(1).randbytes(PIPELINE_BYTES)
        sends = [
            producer.send_nowait(Message("T", b"%d" % number + much), queue=QUEUE)
            for number in range(6)
        ]
        assert [(await send.result()).queue_offset for send in sends] == [0, 1, 2, 3, 4, 5]
        assert [body[:1] for body in group.bodies()] == [b"%d" % number for number in range(6)]


async def test_send_cancelled_between_attempts_never_leaves() -> None:
    async with numbering() as (world, producer):
        await producer.send_to(QUEUE, Message("T", b"before"))
        world.group.brokers[0].intercept = answers(*[BUSY] * 8)
        with trio.move_on_after(0.1) as waiting:
            await producer.send_to(QUEUE, Message("T", b"cancelled"))
        assert waiting.cancelled_caught
        await trio.sleep(30)
        world.group.brokers[0].intercept = None
        await producer.send_to(QUEUE, Message("T", b"after"))
        assert world.group.bodies() == [b"before", b"after"]


async def test_request_that_may_be_stored_is_repeated_whole() -> None:
    async with numbering() as (world, producer):
        await producer.send_to(QUEUE, Message("T", b"before"))
        world.group.brokers[0].intercept = answers(*[UNKNOWN] * 8)
        short = producer.send_nowait(Message("T", b"short"), queue=QUEUE, timeout_s=0.1)
        long = producer.send_nowait(Message("T", b"long"), queue=QUEUE)
        with pytest.raises(UnknownOutcomeError):
            await short.result()
        assert (await long.result()).queue_offset == 2
        assert world.group.bodies() == [b"before", b"short", b"long"]


async def test_a_delayed_send_is_repeated_under_its_sequence() -> None:
    async with numbering() as (world, producer):
        world.group.brokers[0].intercept = answers(*[UNKNOWN] * 5)
        await producer.send_to(QUEUE, Message("T", b"x", delay_level=3))
        await producer.send_to(QUEUE, Message("T", b"y", delay_level=3))
        sent = [seen.command.ext for seen in world.seen if seen.code == 310]
        assert [ext["producerSequence"] for ext in sent] == ["0"] * 6 + ["1"]
        assert {ext["producerEpoch"] for ext in sent} == {"101"}
        assert len({ext["producerId"] for ext in sent}) == 1


async def test_delayed_send_of_a_lost_session_moves_or_stays_unknown() -> None:
    async with numbering() as (world, producer):
        broker = world.group.brokers[0]
        broker.intercept = answers(FORGOTTEN)
        await producer.send_to(QUEUE, Message("T", b"x", delay_level=3))
        broker.intercept = answers(UNKNOWN, FORGOTTEN)
        with pytest.raises(UnknownOutcomeError):
            await producer.send_to(QUEUE, Message("T", b"y", delay_level=3))
        sent = [seen.command.ext for seen in world.seen if seen.code == 310]
        stamped = [(ext["producerEpoch"], ext["producerSequence"]) for ext in sent]
        assert stamped == [("101", "0"), ("102", "0"), ("102", "1"), ("102", "1")]


async def test_send_without_a_session_is_not_stored() -> None:
    async with (
        open_world(idempotent=True) as world,
        world.client() as client,
        Producer(client, "p", ProducerConfig(send_timeout_s=1.0)) as producer,
    ):
        # The group reports that it leads, and answers no opening.
        world.group.on(RequestCode.OPEN_PRODUCER, fixed(1, "lost", UNKNOWN[1]))
        with pytest.raises(BrokerBusyError) as caught:
            await producer.send_to(QUEUE, Message("T", b"x"))
        assert caught.value.outcome == "not_stored"
        assert stamps(world) == []


async def test_a_busy_broker_is_not_asked_again_before_it_wants_to_be() -> None:
    async with numbering() as (world, producer):
        await producer.send_to(QUEUE, Message("T", b"before"))
        broker = world.group.brokers[0]
        broker.intercept = answers((2, {**BUSY[1], "retryAfterMs": "700"}))
        began = trio.current_time()
        await producer.send_to(QUEUE, Message("T", b"x"))
        assert trio.current_time() - began == pytest.approx(0.7)


async def test_sends_do_not_wait_for_a_session_one_after_the_other() -> None:
    async with numbering() as (world, producer):
        await producer.publish_queues("T")
        world.group.brokers[0].on(RequestCode.OPEN_PRODUCER, lambda asked: DEFERRED)
        delayed = [
            producer.send_nowait(Message("T", b"%d" % number, delay_level=3), queue=QUEUE)
            for number in range(6)
        ]
        await trio.testing.wait_all_tasks_blocked()
        world.group.elect(1)
        began = trio.current_time()
        await producer.send_to(QUEUE, Message("T", b"x"))
        for send in delayed:
            await send.result()
        assert trio.current_time() - began < 4  # an attempt of 3 s, and a search


async def test_refused_run_does_not_wait_for_the_pause_of_another() -> None:
    async with numbering() as (world, producer):
        await producer.send_to(QUEUE, Message("T", b"before"))
        world.group.refused_queues = {("T", 0): 2, ("T", 1): 16}
        began = trio.current_time()
        producer.send_nowait(Message("T", b"busy"), queue=QUEUE)
        refused = producer.send_nowait(Message("T", b"x"), queue=MessageQueue("T", "g", 1))
        with pytest.raises(BrokerRefusedError):
            await refused.result()
        assert trio.current_time() == began
        world.group.refused_queues = {}


async def test_send_that_waits_to_move_is_not_stored_at_the_end() -> None:
    async with open_world(idempotent=True) as world, world.client() as client:
        await world.add_group("h", 1, 11911, idempotent=True)
        for group in world.groups.values():
            group.brokers[0].intercept = answers(*[BUSY] * 9)
        with trio.CancelScope() as scope:
            async with Producer(client, "p") as producer:
                await producer.publish_queues("T")
                send = producer.send_nowait(Message("T", b"x"))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
                await trio.lowlevel.checkpoint()
        with pytest.raises(ClientClosedError, match="before the send"):
            await send.result()
        assert len(stamps(world)) == 1


async def test_engine_repeats_what_it_sent_when_a_send_ended_before() -> None:
    async with numbering() as (world, producer):
        await producer.publish_queues("T")

        async def slow(asked: RemotingCommand) -> RemotingCommand:
            await trio.sleep(0.5)
            return world.group.brokers[0]._open_producer(asked)

        world.group.brokers[0].on(RequestCode.OPEN_PRODUCER, slow)
        world.group.brokers[0].intercept = answers(UNKNOWN)
        short = producer.send_nowait(Message("T", b"short"), queue=QUEUE, timeout_s=0.4)
        long = producer.send_nowait(Message("T", b"long"), queue=QUEUE)
        with pytest.raises(BrokerUnreachableError, match="not stored"):
            await short.result()
        await long.result()
        assert world.group.bodies() == [b"long"]
        first, second = [seen.command for seen in world.seen if seen.code == 51101]
        assert bytes(first.body) == bytes(second.body)


async def test_engine_leaves_no_settled_send_to_the_collector() -> None:
    def slots() -> int:
        return sum(isinstance(each, SendSlot) for each in gc.get_objects())

    gc.collect()
    before = slots()
    async with numbering() as (world, producer):
        await producer.send(Message("T", b"x"))
        world.group.brokers[0].intercept = answers(UNKNOWN, BUSY)
        for _ in range(3):
            await producer.send_to(QUEUE, Message("T", b"x"))
        assert slots() == before
