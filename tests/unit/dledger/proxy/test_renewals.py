"""Receipts that are renewed, and receives whose clients have ended: what comes again.

What many clients ask at the same moment, a proxy asks brokers once.
"""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import trio

from dledger.aio.guest import Guest
from dledger.client.consumer.pop_calls import PopCalls
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.route import MessageQueue
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import renewals as module
from dledger.proxy.caller import HOST_SHARE, Caller, HeldBytes
from dledger.proxy.messages import duration
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.receives import LINES_MAX, Receives
from dledger.proxy.renewals import INVISIBLE_S, RENEW_AFTER_S, RENEWED_S_MAX, Renewals, RenewalTable
from dledger.proxy.routes import CONFIG_LIFETIME_S, FAILED_LIFETIME_S, BrokerConfigs
from dledger.proxy.server import RECEIVE_BYTES_MIN, _Handlers
from dledger.proxy.service import ROUTED_MAX, MessagingService
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader, ReceiptHandle
from tests.harness.pop_group import Fault, PopGroup
from tests.unit.client.consumer.popping import PopBroker
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


CALLER = Caller("client-1", time_left_s=60.0)
TOPIC, GROUP = pb.Resource(name="T"), pb.Resource(name="g")
FIFO_TOPIC = TopicConfig("T", attributes={"+message.type": "FIFO"})
EVERY_TYPE = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION)


# ---------------------------------------------------------------------------------- types


async def test_senders_of_one_moment_ask_for_types_once(world: World) -> None:
    def state(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, FIFO_TOPIC.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    found: list[object] = []
    async with world.client() as client:
        configs = BrokerConfigs(client)

        async def ask() -> None:
            found.append(await configs.types("T"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
    assert found == [(pb.FIFO,)] * 20
    assert world.count(RequestCode.GET_TOPIC_CONFIG) == 1


async def test_types_are_asked_for_again_when_asker_leaves(world: World) -> None:
    answers: list[RemotingCommand] = []

    def state(asked: RemotingCommand) -> Handled:
        answers.append(asked)
        if len(answers) == 1:
            return DEFERRED  # and never answered
        return response_to(asked, 0, None, {}, FIFO_TOPIC.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    found: list[object] = []
    async with world.client() as client:
        configs = BrokerConfigs(client)

        async def ask() -> None:
            found.append(await configs.types("T"))

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.2) as hurry:
                async with trio.open_nursery() as hurried:
                    hurried.start_soon(ask)
                    await trio.sleep(0.1)
                    for _ in range(20):
                        nursery.start_soon(ask)
            assert hurry.cancelled_caught
    assert found == [(pb.FIFO,)] * 20
    assert world.count(RequestCode.GET_TOPIC_CONFIG) == 2


async def test_known_types_count_while_no_broker_states_them(world: World) -> None:
    config = TopicConfig("T", attributes={"+message.type": "FIFO"})
    is_away = [False]

    def state(asked: RemotingCommand) -> RemotingCommand:
        if is_away[0]:
            return response_to(asked, ResponseCode.SYSTEM_BUSY, "later")
        return response_to(asked, 0, None, {}, config.encode())

    world.group.on(RequestCode.GET_TOPIC_CONFIG, state)
    async with world.client() as client:
        configs = BrokerConfigs(client)
        assert await configs.types("T") == (pb.FIFO,)
        is_away[0] = True
        await trio.sleep(CONFIG_LIFETIME_S)
        assert await configs.types("T") == (pb.FIFO,)
        is_away[0], config.attributes = False, {"+message.type": "DELAY"}
        assert await configs.types("T") == (pb.FIFO,)
        await trio.sleep(FAILED_LIFETIME_S)
        assert await configs.types("T") == (pb.DELAY,)


async def test_broker_without_types_is_asked_once_a_second(world: World) -> None:
    def busy(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, ResponseCode.SYSTEM_BUSY, "later")

    world.group.on(RequestCode.GET_TOPIC_CONFIG, busy)
    async with world.client() as client:
        configs = BrokerConfigs(client)
        assert await configs.types("T") == EVERY_TYPE
        asked, began_s = world.count(RequestCode.GET_TOPIC_CONFIG), trio.current_time()
        for _ in range(10):
            assert await configs.types("T") == EVERY_TYPE
        assert world.count(RequestCode.GET_TOPIC_CONFIG) == asked
        assert trio.current_time() == began_s, "no send waits for them"
        await trio.sleep(FAILED_LIFETIME_S)
        await configs.types("T")
        assert world.count(RequestCode.GET_TOPIC_CONFIG) > asked


# ---------------------------------------------------------------------------------- subscriptions


def consumer_of(names: list[str]) -> pb.TelemetryCommand:
    entries = [pb.SubscriptionEntry(topic=pb.Resource(name=name)) for name in names]
    subscription = pb.Subscription(group=GROUP, subscriptions=entries)
    return pb.TelemetryCommand(
        settings=pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    )


@pytest.mark.parametrize("known_at", [0, ROUTED_MAX + 5])
async def test_settings_of_many_topics_ask_for_few_routes(world: World, known_at: int) -> None:
    names = [f"Unknown{number}" for number in range(5_000)]
    names[known_at] = "T"
    group = SubscriptionGroupConfig("g", consume_message_orderly=True)

    def state(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {}, group.encode())

    world.group.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, state)
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    async with service.open():
        answer = await service.telemetry(consumer_of(names), CALLER)
        assert answer is not None
        assert answer.status.code == pb.OK
        assert answer.settings.subscription.fifo, "no default is put for what brokers state"
    asked = world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    rounds = 1 + known_at // ROUTED_MAX
    assert asked <= rounds * ROUTED_MAX + 5


# ---------------------------------------------------------------------------------- acknowledging


class Configs:
    """Every broker group is known."""

    async def find_broker(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


def receives_of(broker: PopBroker) -> Receives:
    configs = cast("BrokerConfigs", Configs())
    return Receives(broker.instance, configs, RenewalTable())


async def handles(broker: PopBroker, count: int) -> list[str]:
    found = await PopCalls(broker.instance, "g").pop(
        "T", "b", SubscriptionExpression.by_tag("*"), max_messages=count, invisible_s=60, hold_s=1
    )
    return [message.receipt.encode() for message in found]


def ack_of(*receipts: str) -> pb.AckMessageRequest:
    entries = [pb.AckMessageEntry(message_id="1", receipt_handle=each) for each in receipts]
    return pb.AckMessageRequest(topic=TOPIC, group=GROUP, entries=entries)


async def test_acks_of_many_calls_share_a_request(nursery: trio.Nursery) -> None:
    broker = PopBroker(nursery, messages=8)
    receives, answers = receives_of(broker), {}
    receipts = await handles(broker, 8)

    async def ack(receipt: str) -> None:
        answers[receipt] = await receives.ack(ack_of(receipt), CALLER)

    async with trio.open_nursery() as calls:
        for receipt in receipts:
            calls.start_soon(ack, receipt)
    assert broker.acked == set(range(8))
    assert len([each for each in broker.seen if each[0] != RequestCode.POP_MESSAGE]) <= 2
    assert {answers[each].status.code for each in receipts} == {pb.OK}
    # Each has an outcome of its own: they are stale by now.
    again: Any = await receives.ack(ack_of(receipts[3], "no receipt"), CALLER)
    assert [entry.status.code for entry in again.entries] == [pb.INVALID_RECEIPT_HANDLE] * 2


async def test_lines_of_many_groups_are_bounded(nursery: trio.Nursery) -> None:
    receives = receives_of(PopBroker(nursery))
    for number in range(3 * LINES_MAX):
        receives._lines_of(f"group {number}")
    assert len(receives._ack_lines) <= LINES_MAX
