"""What may have been done is answered as unknown, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trio.testing import MockClock

from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import duration
from dledger.proxy.service import MessagingService
from dledger.remoting.processor import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader
from dledger.remoting.protocol.receipt_handle import ReceiptHandle
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.dledger.proxy.test_refusals import RECORD, code_of

TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
SHOWN = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0).encode()

ACK = pb.AckMessageRequest(
    group=GROUP, topic=TOPIC, entries=[pb.AckMessageEntry(receipt_handle=SHOWN)]
)
CHANGE = pb.ChangeInvisibleDurationRequest(
    group=GROUP, topic=TOPIC, receipt_handle=SHOWN, invisible_duration=duration(5_000)
)
FORWARD = pb.ForwardMessageToDeadLetterQueueRequest(
    group=GROUP, topic=TOPIC, receipt_handle=SHOWN, max_delivery_attempts=3
)

Handler = Callable[[RemotingCommand], Handled]


def on(world: World, code: RequestCode, *handlers: Handler) -> None:
    """Answer requests in turn, the last handler all that follow."""
    waiting = list(handlers)

    def handle(asked: RemotingCommand) -> Handled:
        return (waiting.pop(0) if len(waiting) > 1 else waiting[0])(asked)

    for broker in world.groups["g"].brokers:
        if code == RequestCode.CONSUMER_SEND_MSG_BACK:
            broker.answer_send_back = handle
        else:
            broker.on(code, handle)


def changed(asked: RemotingCommand) -> RemotingCommand:
    fields = ChangeInvisibleTimeResponseHeader(2_000, 60_000, 1_007)
    return response_to(asked, 0, None, dict(fields.encode()))


def stored(asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked)


def undecided(asked: RemotingCommand) -> RemotingCommand:
    return answer(asked, Condition.LEADERSHIP_LOST, "the leader lost its leadership")


def forbidden(asked: RemotingCommand) -> RemotingCommand:
    return answer(asked, Condition.NO_PERMISSION, "no right")


def stale(asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, ResponseCode.NO_MESSAGE, "not out")


def lost(_asked: RemotingCommand) -> Handled:
    return DEFERRED


async def outcome(service: MessagingService, name: str, request: Any) -> int:
    """Return the code of a call, of its first entry where it has entries."""
    if name != "AckMessage":
        return await code_of(service, name, request)
    response = await service.in_time(service.calls[name], request, Caller("c", time_left_s=8.0))
    return int(response.entries[0].status.code)


@pytest.mark.parametrize("answers", [(undecided,), (lost, forbidden)], ids=["stated", "lost"])
@pytest.mark.parametrize(
    ("name", "request_", "code"),
    [
        ("AckMessage", ACK, RequestCode.ACK_MESSAGE),
        ("ChangeInvisibleDuration", CHANGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME),
    ],
    ids=["ack", "change"],
)
async def test_receipt_that_may_be_settled_is_unknown(
    world: World,
    service: MessagingService,
    name: str,
    request_: Any,
    code: RequestCode,
    answers: tuple[Handler, ...],
) -> None:
    on(world, code, *answers)
    assert await outcome(service, name, request_) == pb.PROXY_TIMEOUT


async def test_new_receipt_that_cannot_be_read_is_unknown(
    world: World, service: MessagingService
) -> None:
    on(world, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, stored)
    assert await outcome(service, "ChangeInvisibleDuration", CHANGE) == pb.PROXY_TIMEOUT


@pytest.mark.parametrize(
    ("answers", "ack"),
    [((lost, forbidden), stored), ((stored,), stale), ((stored,), forbidden)],
    ids=["lost", "stale", "refused"],
)
async def test_dead_letter_that_may_be_stored_is_unknown(
    world: World, service: MessagingService, answers: tuple[Handler, ...], ack: Handler
) -> None:
    group = world.groups["g"]
    group.store("T", 0, RECORD)
    on(world, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)
    on(world, RequestCode.CONSUMER_SEND_MSG_BACK, *answers)
    on(world, RequestCode.ACK_MESSAGE, ack)
    code = await code_of(service, "ForwardMessageToDeadLetterQueue", FORWARD)
    assert code == pb.PROXY_TIMEOUT


async def test_dead_letter_refused_at_once_is_none(world: World, service: MessagingService) -> None:
    world.groups["g"].store("T", 0, RECORD)
    on(world, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)
    on(world, RequestCode.CONSUMER_SEND_MSG_BACK, forbidden)
    on(world, RequestCode.ACK_MESSAGE, stored)
    code = await code_of(service, "ForwardMessageToDeadLetterQueue", FORWARD)
    assert code == pb.FORBIDDEN
    assert world.count(RequestCode.ACK_MESSAGE) == 0


async def test_half_message_without_a_place_is_unknown(autojump_clock: MockClock) -> None:
    def nameless(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {"msgId": "?", "queueId": "0", "queueOffset": "5"})

    async with open_world(rocketmq=True) as world:
        for broker in world.groups["g"].brokers:
            broker.intercept = nameless
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        message = pb.Message(topic=TOPIC, body=b"x")
        message.system_properties.message_id = "01b0"
        message.system_properties.message_type = pb.TRANSACTION
        async with service.open():
            request = pb.SendMessageRequest(messages=[message])
            assert await code_of(service, "SendMessage", request) == pb.PROXY_TIMEOUT
