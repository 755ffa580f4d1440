"""Calls whose fields hold anything: each has an answer with a code, in time, of a bounded size.

Requests begin as right ones; some of their fields are then empty, extreme, of another kind, or
those of something else. No code is that of a fault of the proxy.
"""

import gzip
import random
from typing import Any, Final, cast

import pytest
import trio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from structlog.testing import capture_logs
from trio.testing import MockClock

from dledger.aio.guest import Guest
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import duration, timestamp
from dledger.proxy.metrics import CallMetrics
from dledger.proxy.sends import TransactionId
from dledger.proxy.server import _Handlers
from dledger.proxy.service import MessagingService
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import response_to
from dledger.remoting.protocol.headers import RecallHandle
from dledger.remoting.protocol.pop_requests import ReceiptHandle
from tests.harness.pop_group import PopGroup
from tests.unit.client.fake_cluster import World, open_world
from tests.unit.dledger.proxy.grpc_doubles import TrioCall, TrioGuest

CALLS: Final = 150
ANSWER_BYTES_MAX: Final = 8_192
"""Of a status: what a client wrote is not sent back to it whole."""
LONGEST_S: Final = 70.0
"""The longest poll, and a margin."""

RECEIPT: Final = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0).encode()
LARGE: Final = "x" * 300_000

TEXTS: Final = (
    *("", " ", "T", "clerks", "g", "shop", "%", "%RETRY%clerks", "%DLQ%clerks", "a b", "größer"),
    *("RMQ_SYS_TRANS_HALF_TOPIC", "TBW102", "\x00", "\x01", "\x02", "|", "a || b", "a = 1", "*"),
    *("x" * 127, "x" * 255, LARGE, "0" * 5_000, "9" * 5_000, "-1", "\N{ARABIC-INDIC DIGIT NINE}"),
    *(RECEIPT, RECEIPT + " 7", RECEIPT.replace("g", "x"), RECEIPT.replace("60000", "9" * 900)),
    *("0 0 0 0 0 g 0 0", "0-0-g", "0-0-x", "f" * 17 + "-0-g", "0-0-" + LARGE),
    RecallHandle("T", "g", 1, "01").encode(),
    RecallHandle("T", "x", 1, "01").encode(),
    RecallHandle("U", "g", -(1 << 70), "").encode(),
    TransactionId("g", 5, 1 << 40).encode(),
)
NUMBERS: Final = (0, 1, -1, 2, 32, 1_000_000, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
BODIES: Final = (b"", b"x", b"x" * (4 << 20), b"x" * ((4 << 20) + 1), gzip.compress(b"x" * 100))
SMALL: Final = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM}

QUEUE: Final = pb.MessageQueue(topic=pb.Resource(name="T"), broker=pb.Broker(name="g"))
NAMED: Final[dict[str, Any]] = {"topic": pb.Resource(name="T"), "group": pb.Resource(name="clerks")}
OF_QUEUE: Final[dict[str, Any]] = {"group": NAMED["group"], "message_queue": QUEUE}


def right_request(name: str, rng: random.Random) -> Any:
    """Return a request that brokers would do."""
    kind = rng.choice([pb.MESSAGE_TYPE_UNSPECIFIED, pb.NORMAL, pb.TRANSACTION])
    system = pb.SystemProperties(message_id="01B0", tag="a", message_type=kind)
    if rng.random() < 0.3:
        system.delivery_timestamp.CopyFrom(timestamp(1))
    message = pb.Message(topic=NAMED["topic"], system_properties=system, body=b"x")
    message.user_properties["a"] = "1"
    entry = pb.AckMessageEntry(receipt_handle=RECEIPT)
    return {
        "QueryRoute": pb.QueryRouteRequest(topic=NAMED["topic"]),
        "Heartbeat": pb.HeartbeatRequest(group=NAMED["group"], client_type=pb.PUSH_CONSUMER),
        "SendMessage": pb.SendMessageRequest(messages=[message] * rng.choice([1, 1, 2])),
        "QueryAssignment": pb.QueryAssignmentRequest(**NAMED),
        "AckMessage": pb.AckMessageRequest(**NAMED, entries=[entry]),
        "ForwardMessageToDeadLetterQueue": pb.ForwardMessageToDeadLetterQueueRequest(
            **NAMED, receipt_handle=RECEIPT, max_delivery_attempts=3
        ),
        "EndTransaction": pb.EndTransactionRequest(
            topic=NAMED["topic"], transaction_id="0-0-g", resolution=pb.COMMIT
        ),
        "NotifyClientTermination": pb.NotifyClientTerminationRequest(group=NAMED["group"]),
        "ChangeInvisibleDuration": pb.ChangeInvisibleDurationRequest(
            **NAMED, receipt_handle=RECEIPT, invisible_duration=duration(1_000)
        ),
        "ReceiveMessage": pb.ReceiveMessageRequest(
            **OF_QUEUE, batch_size=2, long_polling_timeout=duration(100)
        ),
        "PullMessage": pb.PullMessageRequest(**OF_QUEUE, long_polling_timeout=duration(100)),
        "UpdateOffset": pb.UpdateOffsetRequest(**OF_QUEUE, offset=1),
        "GetOffset": pb.GetOffsetRequest(**OF_QUEUE),
        "QueryOffset": pb.QueryOffsetRequest(message_queue=QUEUE),
        "RecallMessage": pb.RecallMessageRequest(
            topic=NAMED["topic"], recall_handle=RecallHandle("T", "g", 1, "01").encode()
        ),
        "SyncLiteSubscription": pb.SyncLiteSubscriptionRequest(**NAMED),
    }[name]


def value_of(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.message_type is not None:
        return changed(GetMessageClass(field.message_type)(), rng)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(BODIES)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice([0.0, float("inf"), float("nan"), -1.0])
    known = [each for each in NUMBERS if field.type not in SMALL or -(1 << 31) <= each < 1 << 31]
    if field.enum_type is not None:
        known = [*field.enum_type.values_by_number, 99, -1]
    return rng.choice(known)


def changed(message: Any, rng: random.Random) -> Any:
    """Return *message* with some of its fields set to anything."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.6:
            continue
        found = getattr(message, field.name)
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                found[rng.choice(TEXTS)] = rng.choice(TEXTS)
            elif rng.random() < 0.3:
                message.ClearField(field.name)
            elif found and field.message_type is not None:
                changed(rng.choice(found), rng)
            else:
                found.extend(value_of(field, rng) for _ in range(rng.choice([1, 3, 70])))
        elif field.message_type is not None:
            if rng.random() < 0.2:
                message.ClearField(field.name)
            else:
                changed(found, rng)
        elif rng.random() < 0.5:
            setattr(message, field.name, value_of(field, rng))
    return message


def answer_all(world: World) -> None:
    """Let brokers do what is asked, in some way."""
    PopGroup(world.group)
    for number in range(3):
        record = encode_record(topic="T", queue_id=0, body=b"%d" % number, properties=b"")
        world.group.store("T", 0, decode_record(record))
    world.group.on(RequestCode.RECALL_MESSAGE, response_to)


async def call(handlers: _Handlers, name: str, rng: random.Random) -> None:
    request = right_request(name, rng)
    for _ in range(rng.choice([0, 1, 1, 3])):
        changed(request, rng)
    caller = TrioCall(time_left_s=rng.choice([None, 0.0, 3.0]))
    began_s = trio.current_time()
    answer = await caller.make(handlers.handle(name), request)
    answers = caller.written if answer is None else [answer]
    took_s = trio.current_time() - began_s
    assert took_s <= LONGEST_S, request
    if caller.is_whole:
        status = answers[0].status
        assert status.code, request
        assert status.code != pb.INTERNAL_ERROR, request
        assert len(status.message) <= ANSWER_BYTES_MAX, status.message[:300]


async def settle(service: MessagingService, rng: random.Random) -> None:
    """Send settings as a telemetry stream brings them."""
    kind = rng.choice([pb.PRODUCER, pb.PUSH_CONSUMER])
    settings = pb.Settings(client_type=kind)
    if kind == pb.PRODUCER:
        settings.publishing.topics.append(NAMED["topic"])
    else:
        settings.subscription.group.CopyFrom(NAMED["group"])
        settings.subscription.subscriptions.add(topic=NAMED["topic"])
    command = changed(pb.TelemetryCommand(settings=settings), rng)
    answer = await service.telemetry(command, Caller("c"))
    if answer is not None:
        assert answer.status.code
        assert len(answer.status.message) <= ANSWER_BYTES_MAX


@pytest.mark.parametrize("seed", range(6))
async def test_any_field_has_an_answer_with_a_code(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    methods = pb.DESCRIPTOR.services_by_name["MessagingService"].methods
    names = [each.name for each in methods if each.name != "Telemetry"]
    async with open_world() as world, trio.open_nursery() as background:
        answer_all(world)
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        with capture_logs() as logs:
            async with service.open():
                guest = cast(Guest, TrioGuest(background))
                handlers = _Handlers(service, guest, CallMetrics(service.clock))
                for number in range(CALLS):
                    await call(handlers, names[number % len(names)], rng)
                    await settle(service, rng)
                await trio.sleep(150)
        assert handlers._requests.used_bytes == handlers._unread.used_bytes == 0
        background.cancel_scope.cancel()
    assert [each for each in logs if each["event"] == "call_failed"] == []
