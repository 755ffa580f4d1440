"""What calls are refused with, through the calls of a proxy over brokers in memory."""

from dataclasses import replace
from typing import Any

import pytest
import trio
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.testing import capture_logs

from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import decode_record, encode_record, pack_host
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import duration
from dledger.proxy.server import _status
from dledger.proxy.service import ADDRESSES_MAX, EXPIRE_PERIOD_S, HOST_CHARS_MAX, MessagingService
from dledger.proxy.status import status_of
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import RecallHandle
from dledger.remoting.protocol.outcome import DECISION_FIELD, OUTCOME_FIELD
from dledger.remoting.protocol.pop_requests import ChangeInvisibleTimeResponseHeader, ReceiptHandle
from tests.unit.client.fake_cluster import World

CALLER = Caller("client-1", time_left_s=8.0)
TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
EMPTY = pb.Resource()


RECORD = decode_record(
    encode_record(
        topic="T", queue_id=0, body=b"one", properties=b"", store_host=pack_host("10.0.0.1", 10911)
    )
)


def queue(number: int = 0, broker: str = "g") -> pb.MessageQueue:
    return pb.MessageQueue(topic=TOPIC, id=number, broker=pb.Broker(name=broker))


def handle(broker: str = "g") -> str:
    return ReceiptHandle(0, 1, 60_000, 0, broker, 0, 0).encode()


async def code_of(service: MessagingService, name: str, request: Any) -> int:
    """Return the code of a call's answer."""
    call: Any = {"ReceiveMessage": service.receive_message, "PullMessage": service.pull_message}
    call = call.get(name) or service.calls[name]
    try:
        answer = await service.in_time(call, request, CALLER)
    except MQError as error:
        return int(status_of(error).code)
    if isinstance(answer, list):
        answer = answer[0]
    return int(answer.status.code) if hasattr(answer, "status") else pb.OK


def plain_message(topic: str) -> pb.Message:
    system = pb.SystemProperties(message_id="01", message_type=pb.NORMAL)
    return pb.Message(topic=pb.Resource(name=topic), system_properties=system, body=b"x")


def case(name: str, code: int, **fields: Any) -> tuple[str, Any, int]:
    """Return a call, its request of these fields, and the code of its answer."""
    return name, getattr(pb, f"{name}Request")(**fields), code


def acked(receipt: str) -> dict[str, Any]:
    """Return the fields of an acknowledgement."""
    entries = [pb.AckMessageEntry(receipt_handle=receipt)]
    return {"group": GROUP, "topic": TOPIC, "entries": entries}


def own_queue(topic: str) -> pb.MessageQueue:
    return pb.MessageQueue(topic=pb.Resource(name=topic), broker=pb.Broker(name="g"))


OF_GROUP: dict[str, Any] = {"group": GROUP, "message_queue": queue()}
ELSEWHERE: dict[str, Any] = {"group": GROUP, "message_queue": queue(broker="x")}
NO_RECEIPT: dict[str, Any] = {"group": GROUP, "topic": TOPIC, "receipt_handle": handle("x")}
UNKNOWN_BROKER = RecallHandle("T", "x", 1, "01").encode()
MANY = pb.Endpoints(addresses=[pb.Address(host="h", port=1)] * (ADDRESSES_MAX + 1))
LONG = pb.Endpoints(addresses=[pb.Address(host="h" * (HOST_CHARS_MAX + 1), port=1)])
TWO_TOPICS = [plain_message("T"), plain_message("Other")]
NOT_A_GROUP, NO_RECEIPT_CODE = pb.ILLEGAL_CONSUMER_GROUP, pb.INVALID_RECEIPT_HANDLE
BEYOND_ALL = "8000000000000000-0-g"
BY_TIME = {"query_offset_policy": pb.TIMESTAMP}

REFUSALS: list[tuple[str, Any, int]] = [
    case("QueryRoute", pb.ILLEGAL_TOPIC, topic=EMPTY),
    case("QueryAssignment", NOT_A_GROUP, topic=TOPIC),
    case("ReceiveMessage", pb.ILLEGAL_TOPIC, group=GROUP, message_queue=pb.MessageQueue()),
    case("ReceiveMessage", NOT_A_GROUP, message_queue=queue()),
    case("ReceiveMessage", NOT_A_GROUP, group=pb.Resource(name="a b"), message_queue=queue()),
    case("ReceiveMessage", pb.BAD_REQUEST, **ELSEWHERE),
    case("PullMessage", pb.BAD_REQUEST, **ELSEWHERE),
    case("PullMessage", pb.BAD_REQUEST, **OF_GROUP, batch_size=-1),
    case("PullMessage", pb.ILLEGAL_OFFSET, **OF_GROUP, offset=-1),
    case("AckMessage", NO_RECEIPT_CODE, **acked(handle("x"))),
    case("AckMessage", NO_RECEIPT_CODE, **acked(f"0 1 60000 0 0 g {1 << 31} 0")),
    case("AckMessage", NO_RECEIPT_CODE, **acked(f"0 1 60000 0 0 g 0 {1 << 63}")),
    case("AckMessage", NO_RECEIPT_CODE, **acked("0 1 60000 0 0 g -1 0")),
    case("AckMessage", NO_RECEIPT_CODE, **acked("0 1 60000 0 0 g 0 -1")),
    case(
        "ChangeInvisibleDuration", NO_RECEIPT_CODE, **NO_RECEIPT, invisible_duration=duration(1000)
    ),
    case("ForwardMessageToDeadLetterQueue", NO_RECEIPT_CODE, **NO_RECEIPT),
    *(
        case(
            "EndTransaction",
            pb.INVALID_TRANSACTION_ID,
            topic=TOPIC,
            transaction_id=each,
            resolution=pb.COMMIT,
        )
        for each in ("0-0-x", BEYOND_ALL)
    ),
    case("EndTransaction", pb.BAD_REQUEST, topic=TOPIC, transaction_id="0-0-g", resolution=7),
    case("RecallMessage", pb.BAD_REQUEST, topic=TOPIC, recall_handle="?"),
    case("RecallMessage", pb.BAD_REQUEST, topic=TOPIC, recall_handle=UNKNOWN_BROKER),
    case("UpdateOffset", NOT_A_GROUP, message_queue=queue()),
    case("UpdateOffset", pb.ILLEGAL_OFFSET, **OF_GROUP, offset=-1),
    case("UpdateOffset", pb.ILLEGAL_OFFSET, **OF_GROUP, offset=2),
    case("UpdateOffset", pb.BAD_REQUEST, group=GROUP, message_queue=queue(99), offset=0),
    case("UpdateOffset", pb.OK, **OF_GROUP, offset=1),
    case("QueryOffset", pb.BAD_REQUEST, message_queue=queue(99)),
    case("QueryOffset", pb.BAD_REQUEST, message_queue=queue(), query_offset_policy=9),
    case("QueryOffset", pb.BAD_REQUEST, message_queue=queue(), **BY_TIME),
    case("QueryOffset", pb.OK, message_queue=queue(), **BY_TIME, timestamp=Timestamp(seconds=1)),
    case("QueryRoute", pb.ILLEGAL_ACCESS_POINT, topic=TOPIC, endpoints=MANY),
    case("QueryRoute", pb.ILLEGAL_ACCESS_POINT, topic=TOPIC, endpoints=LONG),
    case("QueryAssignment", pb.ILLEGAL_ACCESS_POINT, topic=TOPIC, group=GROUP, endpoints=MANY),
    case("QueryAssignment", pb.ILLEGAL_ACCESS_POINT, topic=TOPIC, group=GROUP, endpoints=LONG),
    case("SendMessage", pb.MESSAGE_CORRUPTED, messages=TWO_TOPICS),
    *(
        case("PullMessage", pb.ILLEGAL_TOPIC, group=GROUP, message_queue=own_queue(own))
        for own in ("RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX")
    ),
]


@pytest.mark.parametrize(
    ("name", "request_", "code"),
    REFUSALS,
    ids=[f"{number}-{name}" for number, (name, _, _) in enumerate(REFUSALS)],
)
async def test_illegal_calls_are_refused_at_once(
    world: World, service: MessagingService, name: str, request_: Any, code: int
) -> None:
    world.group.store("T", 0, RECORD)
    began_s = trio.current_time()
    assert await code_of(service, name, request_) == code
    assert trio.current_time() - began_s < 1.0
    if code != pb.OK:
        assert world.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 0


async def test_pull_ends_before_an_unreadable_message(
    world: World, service: MessagingService
) -> None:
    for record in (RECORD, RECORD, replace(RECORD, sys_flag=1 | 3 << 8), RECORD):
        world.group.store("T", 0, record)
    asked = pb.PullMessageRequest(group=GROUP, message_queue=queue(), batch_size=4)
    answers = await service.in_time(service.pull_message, asked, CALLER)
    offsets = [
        each.message.system_properties.queue_offset for each in answers if each.HasField("message")
    ]
    assert (offsets, answers[-1].next_offset) == ([0, 1], 2)
    asked.offset = 2
    assert await code_of(service, "PullMessage", asked) == pb.MESSAGE_CORRUPTED
    asked.offset = 3
    assert await code_of(service, "PullMessage", asked) == pb.OK


@pytest.mark.parametrize(
    ("refusal", "fields", "code"),
    [
        (ResponseCode.SYSTEM_ERROR, {}, pb.INVALID_TRANSACTION_ID),
        (ResponseCode.SYSTEM_ERROR, {DECISION_FIELD: "rollback"}, pb.PRECONDITION_FAILED),
        (ResponseCode.NO_PERMISSION, {}, pb.FORBIDDEN),
    ],
)
async def test_transaction_that_is_none_has_its_code(
    world: World, service: MessagingService, refusal: int, fields: dict[str, str], code: int
) -> None:
    """The broker reads the place that the id names; a client can state any."""

    def refuse(asked: RemotingCommand) -> RemotingCommand:
        stated = {OUTCOME_FIELD: "not_stored", **fields}
        return response_to(asked, refusal, "no half message stands there", stated)

    world.group.on(RequestCode.END_TRANSACTION, refuse)
    asked = pb.EndTransactionRequest(topic=TOPIC, transaction_id="0-0-g", resolution=pb.COMMIT)
    assert await code_of(service, "EndTransaction", asked) == code


@pytest.mark.parametrize(
    ("seconds", "asked_ms"), [(1 << 62, (1 << 63) - 1), (-(1 << 62), 0), (-1, 0)]
)
async def test_times_beyond_all_are_the_ends_of_a_queue(
    world: World, service: MessagingService, seconds: int, asked_ms: int
) -> None:
    asked = pb.QueryOffsetRequest(
        message_queue=queue(),
        query_offset_policy=pb.TIMESTAMP,
        timestamp=Timestamp(seconds=seconds),
    )
    assert await code_of(service, "QueryOffset", asked) == pb.OK
    (seen,) = (each for each in world.seen if each.code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    assert int(seen.command.ext["timestamp"]) == asked_ms


@pytest.mark.parametrize("topic", ["", "a b", "x" * 200_000])
async def test_settings_name_no_illegal_topic(
    world: World, service: MessagingService, topic: str
) -> None:
    """It would be asked for and kept, however long it is."""
    entries = [pb.SubscriptionEntry(topic=each) for each in (TOPIC, pb.Resource(name=topic))]
    subscription = pb.Subscription(group=GROUP, subscriptions=entries)
    settings = pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    asked = pb.TelemetryCommand(settings=settings)
    answer = await service.telemetry(asked, CALLER)
    assert answer is not None
    assert answer.status.code == pb.ILLEGAL_TOPIC
    assert service.clients.get(CALLER.name) is None


async def test_group_without_leader_is_no_illegal_receipt(
    world: World, service: MessagingService
) -> None:
    world.group.leader = None
    world.group.register()
    asked = pb.AckMessageRequest(
        group=GROUP, topic=TOPIC, entries=[pb.AckMessageEntry(receipt_handle=handle())]
    )
    code = await code_of(service, "AckMessage", asked)
    assert code in (pb.INTERNAL_SERVER_ERROR, pb.PROXY_TIMEOUT)


async def test_handle_of_another_topic_recalls_nothing(
    world: World, service: MessagingService
) -> None:
    # The account of the call was checked for the topic that the call names.
    world.group.topics["Other"] = 1
    world.group.register()
    asked = pb.RecallMessageRequest(
        topic=TOPIC, recall_handle=RecallHandle("Other", "g", 1, "01").encode()
    )
    assert await code_of(service, "RecallMessage", asked) == pb.BAD_REQUEST
    assert world.count(RequestCode.RECALL_MESSAGE) == 0


@pytest.mark.parametrize("remark", ["acknowledged before", "of another group"])
async def test_old_receipt_stores_no_dead_letter(
    world: World, service: MessagingService, remark: str
) -> None:
    def refuse(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, ResponseCode.NO_MESSAGE, remark)

    world.group.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, refuse)
    world.group.store("T", 0, RECORD)
    asked = pb.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=TOPIC, receipt_handle=handle(), max_delivery_attempts=3
    )
    code = await code_of(service, "ForwardMessageToDeadLetterQueue", asked)
    assert code == pb.INVALID_RECEIPT_HANDLE
    assert world.count(RequestCode.CONSUMER_SEND_MSG_BACK) == 0
    assert world.group.bodies("%DLQ%clerks") == []


def renewed(service: MessagingService, topic: str) -> str:
    """Return the receipt of a message that is renewed."""
    receipt = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0)
    renewals = service._renewals.table
    renewals.add("client-1", "clerks", MessageQueue(topic, "g", 0), receipt, trio.current_time())
    return receipt.encode()


async def test_renewed_receipt_of_another_topic_is_refused(
    world: World, service: MessagingService
) -> None:
    # The account of the call was checked for the topic that the call names.
    world.group.on(RequestCode.ACK_MESSAGE, response_to)
    shown = renewed(service, "Other")
    asked = pb.AckMessageRequest(
        group=GROUP, topic=TOPIC, entries=[pb.AckMessageEntry(receipt_handle=shown)]
    )
    assert await code_of(service, "AckMessage", asked) == pb.INVALID_RECEIPT_HANDLE
    assert world.count(RequestCode.ACK_MESSAGE) == 0
    assert service._renewals.table.get("clerks", shown) is not None


async def test_failed_dead_letter_is_tried_again(world: World, service: MessagingService) -> None:
    """The client goes on to show the receipt it got first."""
    newest = 1_005
    busy = True

    def change(asked: RemotingCommand) -> RemotingCommand:
        nonlocal newest
        shown = ReceiptHandle.decode(str(asked.ext["extraInfo"]))
        if shown.revive_queue_id != newest:
            return response_to(asked, ResponseCode.NO_MESSAGE, "another receipt stands")
        newest += 1
        fields = ChangeInvisibleTimeResponseHeader(2_000, 60_000, newest)
        return response_to(asked, 0, None, dict(fields.encode()))

    def send_back(asked: RemotingCommand) -> RemotingCommand:
        if busy:
            return response_to(asked, ResponseCode.NO_PERMISSION, "not now")
        return response_to(asked)

    for broker in world.group.brokers:
        broker.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
        broker.on(RequestCode.ACK_MESSAGE, response_to)
        broker.on(RequestCode.CONSUMER_SEND_MSG_BACK, send_back)
    world.group.store("T", 0, RECORD)
    shown = renewed(service, "T")
    asked = pb.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=TOPIC, receipt_handle=shown, max_delivery_attempts=3
    )
    name = "ForwardMessageToDeadLetterQueue"
    assert await code_of(service, name, asked) == pb.FORBIDDEN
    busy = False
    assert await code_of(service, name, asked) == pb.OK
    assert service._renewals.table.get("clerks", shown) is None


# ---------------------------------------------------------------------------- topics


async def test_unknown_topics_are_not_asked_for_again(
    world: World, service: MessagingService
) -> None:
    """Anybody may name a topic; each was asked for every half minute from then on."""
    await service.query_route(pb.QueryRouteRequest(topic=TOPIC), CALLER)
    for number in range(20):
        topic = pb.Resource(name=f"typo-{number}")
        with pytest.raises(MQError):
            await service.query_route(pb.QueryRouteRequest(topic=topic), CALLER)
    await trio.sleep(EXPIRE_PERIOD_S + 1)
    before = world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    await trio.sleep(60)
    assert world.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) - before <= 3
    world.group.topics["typo-0"] = 1
    asked = pb.QueryRouteRequest(topic=pb.Resource(name="typo-0"))
    assert len((await service.query_route(asked, CALLER)).message_queues) == 1


# ---------------------------------------------------------------------------- time


async def test_call_ends_before_its_client_gives_up(
    world: World, service: MessagingService
) -> None:
    async def slow(_request: Any, caller: Caller) -> None:
        await trio.sleep_forever()

    began_s = trio.current_time()
    with pytest.raises(MQError) as caught:
        await service.in_time(slow, None, CALLER)
    assert status_of(caught.value).code == pb.PROXY_TIMEOUT
    assert 7.5 < trio.current_time() - began_s < 8.0


async def test_receive_ends_before_its_client_gives_up(
    world: World, service: MessagingService
) -> None:
    for broker in world.group.brokers:
        await broker.kill()
    began_s = trio.current_time()
    asked = pb.ReceiveMessageRequest(group=GROUP, message_queue=queue())
    with pytest.raises(MQError):
        await service.receive_message(asked, CALLER)
    assert trio.current_time() - began_s < 8.0


def test_unexpected_error_is_logged_with_the_call() -> None:
    with capture_logs() as logs:
        status = _status("SendMessage", KeyError("x"))
    assert status.code == pb.INTERNAL_ERROR
    assert [(log["event"], log["call"]) for log in logs] == [("call_failed", "SendMessage")]


async def test_delay_that_brokers_refuse_is_a_delivery_time(
    world: World, service: MessagingService
) -> None:
    remark = "a delay of 9000 ms, at most 8 s: timerMaxDelaySec"

    def refuse(asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, ResponseCode.MESSAGE_ILLEGAL, remark)

    world.group.intercept(refuse)
    message = pb.Message(topic=TOPIC, body=b"x")
    message.system_properties.message_id = "01b0"
    message.system_properties.message_type = pb.DELAY
    message.system_properties.delivery_timestamp.CopyFrom(Timestamp(seconds=1 << 40))
    request = pb.SendMessageRequest(messages=[message])
    assert await code_of(service, "SendMessage", request) == pb.ILLEGAL_DELIVERY_TIME
