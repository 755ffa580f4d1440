"""What may have been done is answered as unknown, and nothing else; codes of errors."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dledger.client.core import errors
from dledger.client.core.errors import (
    AlreadyDeliveredError,
    BackpressureError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    MessageIllegalError,
    NoNameServerError,
    NoRouteError,
    ReceiptStaleError,
    RequestFailedError,
    RequestTimedOutError,
    SubscriptionIllegalError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.client.core.message_ext import SendStatus
from dledger.commitlog.errors import MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import duration
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError, overall, status_of, status_of_send
from dledger.proxy.status import code_of as code_of_error
from dledger.remoting.handling import DEFERRED, Handled
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader, ReceiptHandle
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

    world.group.on(code, handle)


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
    world.group.store("T", 0, RECORD)
    on(world, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)
    on(world, RequestCode.CONSUMER_SEND_MSG_BACK, *answers)
    on(world, RequestCode.ACK_MESSAGE, ack)
    code = await code_of(service, "ForwardMessageToDeadLetterQueue", FORWARD)
    assert code == pb.PROXY_TIMEOUT


async def test_dead_letter_refused_at_once_is_none(world: World, service: MessagingService) -> None:
    world.group.store("T", 0, RECORD)
    on(world, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed)
    on(world, RequestCode.CONSUMER_SEND_MSG_BACK, forbidden)
    on(world, RequestCode.ACK_MESSAGE, stored)
    code = await code_of(service, "ForwardMessageToDeadLetterQueue", FORWARD)
    assert code == pb.FORBIDDEN
    assert world.count(RequestCode.ACK_MESSAGE) == 0


async def test_half_message_without_a_place_is_unknown() -> None:
    def nameless(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, None, {"msgId": "?", "queueId": "0", "queueOffset": "5"})

    async with open_world(rocketmq=True) as world:
        world.group.intercept(nameless)
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        message = pb.Message(topic=TOPIC, body=b"x")
        message.system_properties.message_id = "01b0"
        message.system_properties.message_type = pb.TRANSACTION
        async with service.open():
            request = pb.SendMessageRequest(messages=[message])
            assert await code_of(service, "SendMessage", request) == pb.PROXY_TIMEOUT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownOutcomeError("sent"), pb.PROXY_TIMEOUT),
        (RequestTimedOutError("asked", code=ResponseCode.NO_PERMISSION), pb.PROXY_TIMEOUT),
        (NoRouteError("no route"), pb.TOPIC_NOT_FOUND),
        (MessageIllegalError("too large"), pb.BAD_REQUEST),
        (SubscriptionIllegalError("blank"), pb.ILLEGAL_FILTER_EXPRESSION),
        (BackpressureError("full"), pb.TOO_MANY_REQUESTS),
        (BrokerBusyError("busy", code=ResponseCode.SYSTEM_BUSY), pb.TOO_MANY_REQUESTS),
        (
            BrokerBusyError("no leader", code=ResponseCode.SERVICE_NOT_AVAILABLE),
            pb.INTERNAL_SERVER_ERROR,
        ),
        (BrokerUnreachableError("no leader"), pb.INTERNAL_SERVER_ERROR),
        (NoNameServerError("none"), pb.INTERNAL_SERVER_ERROR),
        (BrokerRefusedError("no", code=ResponseCode.NO_PERMISSION), pb.FORBIDDEN),
        (BrokerRefusedError("no", code=ResponseCode.TOPIC_NOT_EXIST), pb.TOPIC_NOT_FOUND),
        (BrokerRefusedError("no", code=ResponseCode.MESSAGE_ILLEGAL), pb.BAD_REQUEST),
        (ReceiptStaleError("old", code=ResponseCode.NO_MESSAGE), pb.INVALID_RECEIPT_HANDLE),
        (
            RequestFailedError("no", code=ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
            pb.CONSUMER_GROUP_NOT_FOUND,
        ),
        (
            RequestFailedError("no", code=ResponseCode.SUBSCRIPTION_PARSE_FAILED),
            pb.ILLEGAL_FILTER_EXPRESSION,
        ),
        (TransactionDecidedError("late", code=1), pb.PRECONDITION_FAILED),
        (AlreadyDeliveredError("late", code=1), pb.PRECONDITION_FAILED),
        (RefusedError(pb.ILLEGAL_TOPIC, "blank"), pb.ILLEGAL_TOPIC),
    ],
)
def test_error_has_its_code(error: MQError, code: pb.Code) -> None:
    assert code_of_error(error) == code
    assert status_of(error) == pb.Status(code=code, message=str(error))


def unknown_errors() -> Iterator[type[MQError]]:
    found = [errors.ClientError]
    for kind in found:
        found.extend(kind.__subclasses__())
        if kind.outcome == "unknown":
            yield kind


def test_unknown_outcome_is_no_failure() -> None:
    kinds = list(unknown_errors())
    assert {UnknownOutcomeError, RequestTimedOutError} <= set(kinds)
    for kind in kinds:
        for code in ResponseCode:
            error = kind.__new__(kind)
            error.code = code  # type: ignore[attr-defined]  # a refusal that came after a time-out
            assert code_of_error(error) == pb.PROXY_TIMEOUT


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SendStatus.SEND_OK, pb.OK),
        (SendStatus.FLUSH_DISK_TIMEOUT, pb.MASTER_PERSISTENCE_TIMEOUT),
        (SendStatus.FLUSH_SLAVE_TIMEOUT, pb.SLAVE_PERSISTENCE_TIMEOUT),
        (SendStatus.SLAVE_NOT_AVAILABLE, pb.HA_NOT_AVAILABLE),
    ],
)
def test_stored_message_has_its_code(status: SendStatus, code: pb.Code) -> None:
    assert status_of_send(status).code == code


def test_overall_is_that_of_all_entries() -> None:
    good, bad = pb.Status(code=pb.OK), pb.Status(code=pb.INVALID_RECEIPT_HANDLE, message="old")
    assert overall([good, good]) == good
    assert overall([bad]) == bad
    assert overall([good, bad]).code == pb.MULTIPLE_RESULTS
