"""What a client gets of a receive, and what comes again when it gets nothing of it."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, cast

import pytest
import trio

from dledger.aio.guest import Guest
from dledger.commitlog.properties import encode_properties
from dledger.commitlog.record import encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import CARRIED_BODY_BYTES_MAX, MAX_MESSAGE_BYTES
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.open_receives import Received
from dledger.proxy.receives import BODIES_BYTES_MAX
from dledger.proxy.server import _Handlers
from dledger.proxy.service import MessagingService
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.own_fields import UNSEEN_FIELD
from dledger.remoting.protocol.pop_requests import PopMessageResponseHeader, encode_offsets
from dledger.testing.doubles import ManualClock
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.proxy.grpc_doubles import Carrier, Context, OneReceive

TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
QUEUE = pb.MessageQueue(topic=TOPIC, broker=pb.Broker(name="g"))
ASKED = pb.ReceiveMessageRequest(group=GROUP, message_queue=QUEUE, auto_renew=True)
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

    for broker in world.groups["g"].brokers:
        broker.on(RequestCode.POP_MESSAGE, pop)


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

    for broker in world.groups["g"].brokers:
        broker.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
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
    context.invocation_metadata = lambda: (("x-mq-client-id", client_id),)  # type: ignore[method-assign]
    calls = CallMetrics(ManualClock())
    handlers = _Handlers(cast(MessagingService, FullService()), cast(Guest, Carrier()), calls)
    asyncio.run(handlers._telemetry(None, context))
    assert [each.status.code for each in context.written] == [code]
