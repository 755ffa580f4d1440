"""Receives and pulls: their order, how long they wait, what a client gets, what comes again."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
from google.protobuf.duration_pb2 import Duration

from dledger.aio.guest import Guest
from dledger.client.core.route import MessageQueue, TopicRoute
from dledger.commitlog.errors import MQError
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import CARRIED_BODY_BYTES_MAX, MAX_MESSAGE_BYTES
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.receives import BODIES_BYTES_MAX
from dledger.proxy.routes import CONFIG_LIFETIME_S, BrokerConfigs
from dledger.proxy.server import _Handlers
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import NOT_MADE_FIELD, UNSEEN_FIELD
from dledger.remoting.protocol.pop_requests import PopMessageResponseHeader, encode_offsets
from dledger.testing.doubles import ManualClock
from tests.harness.present import present
from tests.unit.client.fake_cluster import Group, World
from tests.unit.dledger.proxy.grpc_doubles import Carrier, Context, OneReceive

CALLER = Caller("client-1", time_left_s=8.0)
TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
QUEUE = pb.MessageQueue(topic=TOPIC, id=0, broker=pb.Broker(name="g"))
RECORD = decode_record(
    encode_record(topic="T", queue_id=0, body=b"one", properties=b"", phy_offset=0)
)


def orderly(asked: RemotingCommand) -> RemotingCommand:
    config = SubscriptionGroupConfig("clerks", consume_message_orderly=True)
    return response_to(asked, 0, None, None, config.encode())


def busy(asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, ResponseCode.SYSTEM_ERROR, "no leader yet")


def not_made(asked: RemotingCommand) -> RemotingCommand:
    body = SubscriptionGroupConfig("clerks").encode()
    return response_to(asked, 0, None, {NOT_MADE_FIELD: "true"}, body)


def take_orders(group: Group) -> list[str]:
    """Let receives find nothing; return whether each was to be in order."""
    orders: list[str] = []

    def pop(asked: RemotingCommand) -> RemotingCommand:
        orders.append(str(asked.ext["order"]).lower())
        return response_to(asked, ResponseCode.POLLING_TIMEOUT, "nothing")

    group.on(RequestCode.POP_MESSAGE, pop)
    return orders


class Stated:
    """How the brokers of a group state the consumer group."""

    def __init__(
        self, group: Group, answer: Callable[[RemotingCommand], RemotingCommand] = busy
    ) -> None:
        self.answer = answer
        group.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self._state)

    def _state(self, asked: RemotingCommand) -> RemotingCommand:
        return self.answer(asked)


RECEIVE = pb.ReceiveMessageRequest(group=GROUP, message_queue=QUEUE)
CONSUMER = pb.TelemetryCommand(
    settings=pb.Settings(
        client_type=pb.PUSH_CONSUMER,
        subscription=pb.Subscription(
            group=GROUP,
            subscriptions=[
                pb.SubscriptionEntry(topic=pb.Resource(name="NotThere")),
                pb.SubscriptionEntry(topic=TOPIC),
            ],
        ),
    )
)


async def receive(service: MessagingService) -> int:
    received = await service.receive_message(RECEIVE, CALLER)
    return received.answers[0].status.code


async def test_order_of_a_group_is_not_guessed(world: World, service: MessagingService) -> None:
    orders = take_orders(world.group)
    stated = Stated(world.group)
    with pytest.raises(MQError):
        await receive(service)
    assert orders == []
    stated.answer = orderly
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    stated.answer = busy
    await trio.sleep(CONFIG_LIFETIME_S + 1)
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    assert orders == ["true", "true"], "what was known counts on"


async def test_settings_of_a_group_are_not_guessed(world: World, service: MessagingService) -> None:
    """A client of a group in order would consume in any order until its end."""
    stated = Stated(world.group)
    answer = present(await service.telemetry(CONSUMER, CALLER))
    assert answer.status.code != pb.OK
    stated.answer = orderly
    answer = present(await service.telemetry(CONSUMER, CALLER))
    assert answer.settings.subscription.fifo


@pytest.mark.parametrize("first", [busy, not_made])
async def test_group_is_stated_by_any_broker_group(
    world: World, service: MessagingService, first: Callable[[RemotingCommand], RemotingCommand]
) -> None:
    other = await world.add_group("h", 1, 11_000)
    Stated(world.group, first)
    Stated(other, orderly)
    orders = take_orders(world.group)
    assert await receive(service) == pb.MESSAGE_NOT_FOUND
    assert orders == ["true"]


async def test_topic_without_readable_queues_is_refused(
    world: World, service: MessagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = TopicRoute("T", (MessageQueue("T", "g", 0),), (), {"g": {0: "10.0.0.1:1"}})

    async def route(_configs: BrokerConfigs, _topic: str) -> TopicRoute:
        return written

    monkeypatch.setattr(BrokerConfigs, "route", route)
    asked = pb.ReceiveMessageRequest(group=GROUP, message_queue=pb.MessageQueue(topic=TOPIC))
    with pytest.raises(RefusedError) as caught:
        await service.receive_message(asked, CALLER)
    assert caught.value.code == pb.FORBIDDEN


async def test_receive_for_less_than_no_time_waits_for_none(
    world: World, service: MessagingService
) -> None:
    take_orders(world.group)
    asked = pb.ReceiveMessageRequest(
        group=GROUP, message_queue=QUEUE, long_polling_timeout=Duration(seconds=-3_600)
    )
    received = await service.receive_message(asked, Caller("client-1"))
    assert received.answers[0].status.code == pb.MESSAGE_NOT_FOUND


async def test_pull_waits_no_longer_than_brokers_hold_it(
    world: World, service: MessagingService
) -> None:
    world.group.store("T", 0, RECORD)
    for seconds in (-3_600, 1 << 40):
        asked = pb.PullMessageRequest(
            group=GROUP,
            message_queue=QUEUE,
            offset=1,
            long_polling_timeout=Duration(seconds=seconds),
        )
        began_s = trio.current_time()
        answers = await service.pull_message(asked, Caller("client-1"))
        assert answers[0].status.code == pb.MESSAGE_NOT_FOUND
        assert trio.current_time() - began_s <= 61


ANY_QUEUE = pb.MessageQueue(topic=TOPIC, broker=pb.Broker(name="g"))
ASKED = pb.ReceiveMessageRequest(group=GROUP, message_queue=ANY_QUEUE, auto_renew=True)
ZLIB_FLAG = 1 | 3 << 8


def record(offset: int, **changes: Any) -> bytes:
    plain: dict[str, Any] = {
        "topic": "T",
        "queue_id": 0,
        "body": b"%d" % offset,
        "properties": b"",
        "queue_offset": offset,
    }
    return encode_record(**{**plain, **changes})


def hand_out(world: World, *records: bytes) -> None:
    """Let every receive get *records*, whose offsets count from 0."""

    def pop(asked: RemotingCommand) -> RemotingCommand:
        starts, texts = encode_offsets({0: list(range(len(records)))})
        header = PopMessageResponseHeader(1_000, 60_000, 1_007, 0, starts, texts)
        return response_to(asked, 0, None, dict(header.encode()), b"".join(records))

    world.group.on(RequestCode.POP_MESSAGE, pop)


def bodies(received: Received) -> list[bytes]:
    return [each.message.body for each in received.answers if each.HasField("message")]


UNREADABLE = [
    record(1, body=b"no zlib", sys_flag=ZLIB_FLAG),
    record(1, body=zlib.compress(bytes(CARRIED_BODY_BYTES_MAX + 1)), sys_flag=ZLIB_FLAG),
    record(1, properties=encode_properties({"TIMER_OUT_MS": "9" * 40})),
]


@pytest.mark.parametrize("unreadable", UNREADABLE, ids=["body", "size", "time"])
async def test_unreadable_message_keeps_back_no_other(
    world: World, service: MessagingService, unreadable: bytes
) -> None:
    hand_out(world, record(0), unreadable, record(2))
    received = await service.receive_message(ASKED, Caller("c", time_left_s=8.0))
    assert bodies(received) == [b"0", b"2"]
    assert received.answers[0].status.code == pb.OK
    assert [each.queue_offset for each in received.messages] == [0, 2]
    assert len(service._renewals.table) == 2


async def test_batch_of_unreadable_messages_has_a_code(
    world: World, service: MessagingService
) -> None:
    hand_out(world, UNREADABLE[0], UNREADABLE[0])
    received = await service.receive_message(ASKED, Caller("c", time_left_s=8.0))
    assert bodies(received) == []
    assert [each.status.code for each in received.answers] == [pb.MESSAGE_CORRUPTED]
    assert len(service._renewals.table) == 0


async def test_largest_body_goes_out_as_one_answer(world: World, service: MessagingService) -> None:
    names = "".join(f"{number:04x}\x01\ufffd\x02" for number in range(3_500))
    packed = zlib.compress(bytes(CARRIED_BODY_BYTES_MAX))
    hand_out(world, record(0, body=packed, sys_flag=ZLIB_FLAG, properties=names.encode()))
    received = await service.receive_message(ASKED, Caller("c", time_left_s=8.0))
    assert len(received.answers[1].message.user_properties) == 3_500
    assert received.answers[1].ByteSize() <= MAX_MESSAGE_BYTES


async def test_bodies_of_a_receive_are_bounded_unpacked(
    world: World, service: MessagingService
) -> None:
    """What is behind the bound goes back at once, and is no attempt."""
    asked: list[RemotingCommand] = []

    def change(command: RemotingCommand) -> RemotingCommand:
        asked.append(command)
        return response_to(
            command, 0, None, {"popTime": "1", "invisibleTime": "1", "reviveQid": "1"}
        )

    world.group.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
    packed = zlib.compress(bytes(BODIES_BYTES_MAX // 2))
    hand_out(world, *(record(at, body=packed, sys_flag=ZLIB_FLAG) for at in range(5)))
    received = await service.receive_message(ASKED, Caller("c", time_left_s=8.0))
    assert [each.queue_offset for each in received.messages] == [0, 1]
    await trio.sleep(1)
    assert sorted(each.ext["offset"] for each in asked) == ["2", "3", "4"]
    assert {each.ext[UNSEEN_FIELD] for each in asked} == {"true"}


@pytest.mark.parametrize(
    ("ends_at", "ends_late", "comes_again"),
    [(0, False, True), (2, False, True), (3, False, False), (3, True, True)],
    ids=["before", "between", "behind", "unseen"],
)
def test_answers_not_all_written_come_again(
    ends_at: int, ends_late: bool, comes_again: bool
) -> None:
    guest, context = Carrier(ends_late=ends_late), Context(ends_at)
    calls = CallMetrics(ManualClock())
    handlers = _Handlers(cast(MessagingService, OneReceive()), cast(Guest, guest), calls)

    async def call() -> None:
        try:
            await handlers._receive(ASKED, context)
        except asyncio.CancelledError:
            pass

    asyncio.run(call())
    assert [function.__name__ for function, _ in guest.started] == ["abandon"] * comes_again
    assert calls.open_calls == 0
    (counted, *_) = (sample for sample in calls.latency.family()[1] if sample is not None)
    assert (counted[0]["request_code"], counted[0]["response_code"]) == (
        "receive_message",
        "given_up",
    )


class FullService(OneReceive):
    """A service that takes no more streams."""

    def open_stream(self, _caller: Caller, _push: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("client_id", "code"), [("c", pb.TOO_MANY_REQUESTS), ("", pb.CLIENT_ID_REQUIRED)]
)
def test_refused_stream_states_why(client_id: str, code: int) -> None:
    context = Context(ends_at=9)
    context.invocation_metadata = lambda: (("x-mq-client-id", client_id),)  # type: ignore[method-assign]  # the caller's
    calls = CallMetrics(ManualClock())
    handlers = _Handlers(cast(MessagingService, FullService()), cast(Guest, Carrier()), calls)
    asyncio.run(handlers._telemetry(None, context))
    assert [each.status.code for each in context.written] == [code]
