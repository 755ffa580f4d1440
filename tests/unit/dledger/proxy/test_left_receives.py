"""Receives whose clients have ended: what is held for them, and what comes again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest
import trio

from dledger.aio.guest import Guest
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import HOST_SHARE, Caller, HeldBytes
from dledger.proxy.messages import duration
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.server import RECEIVE_BYTES_MIN, _Handlers
from dledger.proxy.service import MessagingService
from dledger.remoting.protocol.codes import RequestCode
from tests.harness.pop_group import Fault, PopGroup
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.proxy.grpc_doubles import TrioCall, TrioGuest

HOLD_S = 20
QUEUE = pb.MessageQueue(topic=pb.Resource(name="T"), broker=pb.Broker(name="g"))
ASKED = pb.ReceiveMessageRequest(
    group=pb.Resource(name="clerks"),
    message_queue=QUEUE,
    invisible_duration=duration(3_600_000),
    long_polling_timeout=duration(HOLD_S * 1000),
)


@pytest.fixture
async def handlers(service: MessagingService) -> AsyncIterator[_Handlers]:
    async with trio.open_nursery() as nursery:
        guest = cast(Guest, TrioGuest(nursery))
        yield _Handlers(service, guest, CallMetrics(service.clock))
        nursery.cancel_scope.cancel()


def store(world: World, count: int = 1) -> None:
    for number in range(count):
        record = encode_record(topic="T", queue_id=0, body=b"%d" % number, properties=b"")
        world.groups["g"].store("T", 0, decode_record(record))


async def leave(handlers: _Handlers, asked: pb.ReceiveMessageRequest, count: int) -> None:
    """Let *count* clients wait for messages and end together."""
    handler = handlers._receive
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(TrioCall().make, handler, asked)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()


async def test_message_is_spent_by_no_receive_that_was_left(
    world: World, service: MessagingService, handlers: _Handlers
) -> None:
    """As when all consumers of a group are started again at once."""
    pops = PopGroup(world.groups["g"], retries=2)
    await leave(handlers, ASKED, 30)
    assert pops.waiting == 30
    store(world)
    pops.move()
    received = await service.receive_message(ASKED, Caller("c"))
    if not received.messages:
        received = await service.receive_message(ASKED, Caller("c"))
    assert [each.delivery_attempt for each in received.messages] == [1]
    assert pops.dead == set()
    assert trio.current_time() < 1.5 * HOLD_S


async def test_receive_that_was_left_alone_costs_no_time(
    world: World, service: MessagingService, handlers: _Handlers
) -> None:
    pops = PopGroup(world.groups["g"])
    await leave(handlers, ASKED, 1)
    store(world)
    pops.move()
    began_s = trio.current_time()
    received = await service.receive_message(ASKED, Caller("c"))
    assert [each.delivery_attempt for each in received.messages] == [1]
    assert trio.current_time() - began_s < 1


async def test_request_is_held_until_brokers_have_answered(
    world: World, service: MessagingService, handlers: _Handlers
) -> None:
    """A client could leave requests behind without end otherwise."""
    pops = PopGroup(world.groups["g"])
    asked = pb.ReceiveMessageRequest()
    asked.CopyFrom(ASKED)
    asked.attempt_id = "x" * 100_000
    await leave(handlers, asked, 3)
    assert pops.waiting == 3
    assert handlers._receives.used_bytes == 3 * asked.ByteSize()
    await trio.sleep(HOLD_S)
    assert handlers._receives.used_bytes == 0
    assert service._open_receives.left == 0


async def test_receives_that_were_left_are_bounded(world: World, handlers: _Handlers) -> None:
    pops = PopGroup(world.groups["g"])
    handlers._receives = HeldBytes(HOST_SHARE * 5 * RECEIVE_BYTES_MIN)
    await leave(handlers, ASKED, 9)
    assert pops.waiting == 5
    call = TrioCall()
    await call.make(handlers._receive, ASKED)
    assert [each.status.code for each in call.written] == [pb.TOO_MANY_REQUESTS]
    await trio.sleep(HOLD_S)
    assert handlers._receives.used_bytes == 0


async def test_message_that_was_renewed_is_given_back(
    world: World, service: MessagingService, handlers: _Handlers
) -> None:
    """Its client reads so slowly that the first receipt is an old one when it ends."""
    pops = PopGroup(world.groups["g"])
    store(world)
    asked = pb.ReceiveMessageRequest(
        group=ASKED.group, message_queue=QUEUE, auto_renew=True, batch_size=1
    )
    call = TrioCall(read_s=20.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.make, handlers._receive, asked)
        for _ in range(5):
            await trio.sleep(9.5)
            service.clients.heard("c", trio.current_time())
        (out,) = pops.out.values()
        assert out.ends_s > trio.current_time() + 30, "it is renewed"
        call.end()
    await trio.sleep(1)
    assert pops.out[0, 0].ends_s <= trio.current_time()
    assert service.renewed_messages == 0


async def receive_forty(world: World, service: MessagingService) -> Received:
    """Return what a client got in one receive."""
    store(world, 40)
    received = Received("clerks")
    asked = pb.ReceiveMessageRequest()
    asked.CopyFrom(ASKED)
    asked.batch_size = 40
    await service.receive_message(asked, Caller("c"), received)
    assert len(received.messages) == 40
    return received


async def test_leader_that_comes_late_gets_all_back(
    world: World, service: MessagingService
) -> None:
    pops = PopGroup(world.groups["g"])
    received = await receive_forty(world, service)
    world.groups["g"].leader = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.abandon, received)
        await trio.sleep(30)
        assert (received.messages, received.answers) == ([], [])
        world.groups["g"].elect(1)
    assert max(out.ends_s for out in pops.out.values()) <= trio.current_time() + 0.01
    assert trio.current_time() < 60


async def test_silent_brokers_get_back_for_a_bounded_time(
    world: World, service: MessagingService
) -> None:
    pops = PopGroup(world.groups["g"])
    received = await receive_forty(world, service)
    pops.fault = lambda _: Fault.LOST
    await service.abandon(received)
    assert trio.current_time() < 61
    assert world.count(RequestCode.CHANGE_MESSAGE_INVISIBLETIME) > 0


async def test_client_that_was_silent_acknowledges(world: World, service: MessagingService) -> None:
    """It shows its first receipt, and the message is its own under a newer one."""
    pops = PopGroup(world.groups["g"])
    store(world)
    asked = pb.ReceiveMessageRequest(group=ASKED.group, message_queue=QUEUE, auto_renew=True)
    received = await service.receive_message(asked, Caller("c"))
    shown = received.answers[1].message.system_properties.receipt_handle
    await trio.sleep(20)
    service.clients.heard("c", trio.current_time())
    await trio.sleep(45)
    assert pops.out[0, 0].ends_s > trio.current_time()
    ack = pb.AckMessageRequest(
        group=ASKED.group, topic=QUEUE.topic, entries=[pb.AckMessageEntry(receipt_handle=shown)]
    )
    answer = await service.calls["AckMessage"](ack, Caller("c"))
    assert answer.status.code == pb.OK
    assert pops.settled == {(0, 0)}
