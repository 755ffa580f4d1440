"""Receipts that are renewed, and receives whose clients have ended: what comes again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest
import trio

from dledger.aio.guest import Guest
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import renewals as module
from dledger.proxy.caller import HOST_SHARE, Caller, HeldBytes
from dledger.proxy.messages import duration
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.renewals import INVISIBLE_S, RENEW_AFTER_S, RENEWED_S_MAX, Renewals, RenewalTable
from dledger.proxy.server import RECEIVE_BYTES_MIN, _Handlers
from dledger.proxy.service import MessagingService
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader, ReceiptHandle
from tests.harness.pop_group import Fault, PopGroup
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.dledger.proxy.grpc_doubles import TrioCall, TrioGuest

QUEUE = MessageQueue("Orders", "broker-a", 2)


def receipt(offset: int) -> ReceiptHandle:
    return ReceiptHandle(0, 1, 60_000, 1_005, "broker-a", 2, offset)


def add(table: RenewalTable, offset: int, client_id: str = "c", now_s: float = 0) -> bool:
    return table.add(client_id, "workers", QUEUE, receipt(offset), now_s)


def due(table: RenewalTable, now_s: float, *ended: str) -> list[int]:
    found = table.due(now_s, lambda client_id: client_id not in ended)
    return [renewal.receipt.offset for _, renewal in found]


def test_receipt_is_due_after_half_of_its_time() -> None:
    table = RenewalTable()
    add(table, 1)
    add(table, 2, now_s=10)
    assert due(table, RENEW_AFTER_S - 1) == []
    assert due(table, RENEW_AFTER_S) == [1]
    assert due(table, RENEW_AFTER_S + 10) == [1, 2]


def test_client_shows_the_receipt_it_got_first() -> None:
    table = RenewalTable()
    add(table, 1)
    shown = receipt(1).encode()
    renewal = table.get("workers", shown)
    assert renewal is not None
    renewal.receipt = ReceiptHandle(1, 9, 60_000, 1_009, "broker-a", 2, 1)
    assert table.get("workers", shown) is renewal
    assert table.get("others", shown) is None
    table.remove("workers", shown)
    table.remove("workers", shown)
    assert table.get("workers", shown) is None


def test_message_of_an_ended_client_is_forgotten() -> None:
    table = RenewalTable()
    add(table, 1, "a")
    add(table, 2, "b")
    assert due(table, RENEW_AFTER_S, "a") == [2]
    assert len(table) == 2, "its newest receipt counts still"
    assert due(table, INVISIBLE_S - 1, "a") == [2]
    assert len(table) == 2
    assert due(table, INVISIBLE_S, "a") == [2]
    assert len(table) == 1


def test_client_that_was_away_goes_on() -> None:
    table = RenewalTable()
    add(table, 1)
    assert due(table, RENEW_AFTER_S, "c") == []
    assert due(table, INVISIBLE_S - 5) == [1]


def test_renewals_of_a_message_have_an_end() -> None:
    table = RenewalTable()
    add(table, 1)
    assert due(table, RENEWED_S_MAX - 1) == [1]
    assert due(table, RENEWED_S_MAX) == []
    assert len(table) == 0


def test_number_of_renewals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWALS_MAX", 2)
    table = RenewalTable()
    assert [add(table, offset) for offset in range(3)] == [True, True, False]


async def test_silent_broker_holds_up_no_renewal_of_another() -> None:
    renewed_s: list[float] = []

    def renew(asked: RemotingCommand) -> RemotingCommand:
        renewed_s.append(trio.current_time())
        fields = ChangeInvisibleTimeResponseHeader(2_000, 60_000, 1_007)
        return response_to(asked, 0, None, dict(fields.encode()))

    def keep_silent(asked: RemotingCommand) -> Handled:
        return DEFERRED

    async with open_world() as world, world.client() as client, trio.open_nursery() as nursery:
        silent = await world.add_group("h", 1, 11_000)
        silent.brokers[0].on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, keep_silent)
        world.group.brokers[0].on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, renew)
        await client.route("T")
        renewals, began_s = Renewals(client, lambda _: True), trio.current_time()
        for number in range(1_000):
            old = ReceiptHandle(0, 1, 60_000, 1_005, "h", 0, number)
            renewals.table.add("c", "workers", MessageQueue("T", "h", 0), old, began_s)
        old = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0)
        renewals.table.add("c", "workers", MessageQueue("T", "g", 0), old, began_s)
        nursery.start_soon(renewals.run)
        await trio.sleep(3 * INVISIBLE_S)
        nursery.cancel_scope.cancel()
    gaps_s = [
        after - before for before, after in zip([began_s, *renewed_s], renewed_s, strict=False)
    ]
    assert len(gaps_s) >= 5
    assert max(gaps_s) < INVISIBLE_S - 10


HOLD_S = 20
LEFT_QUEUE = pb.MessageQueue(topic=pb.Resource(name="T"), broker=pb.Broker(name="g"))
ASKED = pb.ReceiveMessageRequest(
    group=pb.Resource(name="clerks"),
    message_queue=LEFT_QUEUE,
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
        world.group.store("T", 0, decode_record(record))


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
    pops = PopGroup(world.group, retries=2)
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
    pops = PopGroup(world.group)
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
    pops = PopGroup(world.group)
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
    pops = PopGroup(world.group)
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
    pops = PopGroup(world.group)
    store(world)
    asked = pb.ReceiveMessageRequest(
        group=ASKED.group, message_queue=LEFT_QUEUE, auto_renew=True, batch_size=1
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
    pops = PopGroup(world.group)
    received = await receive_forty(world, service)
    world.group.leader = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.abandon, received)
        await trio.sleep(30)
        assert (received.messages, received.answers) == ([], [])
        world.group.elect(1)
    assert max(out.ends_s for out in pops.out.values()) <= trio.current_time() + 0.01
    assert trio.current_time() < 60


async def test_silent_brokers_get_back_for_a_bounded_time(
    world: World, service: MessagingService
) -> None:
    pops = PopGroup(world.group)
    received = await receive_forty(world, service)
    pops.fault = lambda _: Fault.LOST
    await service.abandon(received)
    assert trio.current_time() < 61
    assert world.count(RequestCode.CHANGE_MESSAGE_INVISIBLETIME) > 0


async def test_client_that_was_silent_acknowledges(world: World, service: MessagingService) -> None:
    """It shows its first receipt, and the message is its own under a newer one."""
    pops = PopGroup(world.group)
    store(world)
    asked = pb.ReceiveMessageRequest(group=ASKED.group, message_queue=LEFT_QUEUE, auto_renew=True)
    received = await service.receive_message(asked, Caller("c"))
    shown = received.answers[1].message.system_properties.receipt_handle
    await trio.sleep(20)
    service.clients.heard("c", trio.current_time())
    await trio.sleep(45)
    assert pops.out[0, 0].ends_s > trio.current_time()
    ack = pb.AckMessageRequest(
        group=ASKED.group,
        topic=LEFT_QUEUE.topic,
        entries=[pb.AckMessageEntry(receipt_handle=shown)],
    )
    answer = await service.calls["AckMessage"](ack, Caller("c"))
    assert answer.status.code == pb.OK
    assert pops.settled == {(0, 0)}
