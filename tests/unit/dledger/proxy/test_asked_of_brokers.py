"""What calls ask of brokers, through the calls of a proxy over brokers in memory."""

from functools import partial
from typing import Any, TypeVar, cast

import pytest
import trio

from dledger.client.core.broker_requests import Question
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.errors import MQError
from dledger.commitlog.record import decode_record, encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import duration
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError, status_of
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import (
    ConsumerSendMsgBackHeader,
    EndTransactionHeader,
    Header,
)
from dledger.remoting.protocol.outcome import OUTCOME_FIELD
from dledger.remoting.protocol.pop_requests import (
    ChangeInvisibleTimeResponseHeader,
    PopMessageHeader,
    ReceiptHandle,
)
from tests.harness.fake_nodes import fixed
from tests.unit.client.fake_cluster import World
from tests.unit.dledger.proxy.test_refusals import code_of

CALLER = Caller("client-1", time_left_s=8.0)
TOPIC = pb.Resource(name="T")
GROUP = pb.Resource(name="clerks")
QUEUE = pb.MessageQueue(topic=TOPIC, id=-1, broker=pb.Broker(name="g"))
SHOWN = ReceiptHandle(0, 1, 60_000, 1_005, "g", 0, 0)
RECORD = encode_record(topic="T", queue_id=0, body=b"one", properties=b"", phy_offset=96)

HeaderT = TypeVar("HeaderT", bound=Header)


def asked(world: World, code: RequestCode, header: type[HeaderT]) -> HeaderT:
    """Return the header of the one request with *code*."""
    (seen,) = (each for each in world.seen if each.code == code)
    return header.decode(seen.command.ext)


@pytest.mark.parametrize(
    ("source", "is_answer"), [(pb.SOURCE_CLIENT, False), (pb.SOURCE_SERVER_CHECK, True)]
)
@pytest.mark.parametrize(("resolution", "flag"), [(pb.COMMIT, 8), (pb.ROLLBACK, 12)])
async def test_end_names_the_place_and_its_reason(
    world: World,
    service: MessagingService,
    source: pb.TransactionSource,
    is_answer: bool,
    resolution: pb.TransactionResolution,
    flag: int,
) -> None:
    world.group.on(RequestCode.END_TRANSACTION, response_to)
    request = pb.EndTransactionRequest(
        topic=TOPIC,
        transaction_id="1f-2a-g",
        message_id="01AB",
        resolution=resolution,
        source=source,
    )
    await service.in_time(service.calls["EndTransaction"], request, CALLER)
    header = asked(world, RequestCode.END_TRANSACTION, EndTransactionHeader)
    assert (header.tran_state_table_offset, header.commit_log_offset) == (0x1F, 0x2A)
    assert (header.producer_group, header.msg_id) == ("T", "01AB")
    assert (header.commit_or_rollback, header.from_transaction_check) == (flag, is_answer)


@pytest.mark.parametrize("in_order", [True, False])
async def test_receive_asks_for_what_its_client_wants(
    world: World, service: MessagingService, in_order: bool
) -> None:
    def state(command: RemotingCommand) -> RemotingCommand:
        config = SubscriptionGroupConfig("clerks", consume_message_orderly=in_order)
        return response_to(command, 0, None, None, config.encode())

    def find_none(command: RemotingCommand) -> RemotingCommand:
        return response_to(command, ResponseCode.POLLING_TIMEOUT, "nothing")

    world.group.on(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, state)
    world.group.on(RequestCode.POP_MESSAGE, find_none)
    request = pb.ReceiveMessageRequest(
        group=GROUP,
        message_queue=QUEUE,
        batch_size=7,
        invisible_duration=duration(15_000),
        long_polling_timeout=duration(2_500),
        filter_expression=pb.FilterExpression(type=pb.SQL, expression="a = 1"),
        attempt_id="attempt-1",
    )
    await service.receive_message(request, CALLER)
    header = asked(world, RequestCode.POP_MESSAGE, PopMessageHeader)
    assert (header.consumer_group, header.topic, header.queue_id) == ("clerks", "T", -1)
    assert (header.max_msg_nums, header.invisible_time) == (7, 15_000)
    assert 2_000 < header.poll_time <= 2_500
    assert (header.exp_type, header.exp) == ("SQL92", "a = 1")
    assert (bool(header.order), header.attempt_id) == (in_order, "attempt-1")


async def test_changed_message_has_another_receipt(world: World, service: MessagingService) -> None:
    def change(command: RemotingCommand) -> RemotingCommand:
        fields = ChangeInvisibleTimeResponseHeader(2_000, 5_000, 1_006)
        return response_to(command, 0, None, dict(fields.encode()))

    world.group.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
    request = pb.ChangeInvisibleDurationRequest(
        group=GROUP, topic=TOPIC, receipt_handle=SHOWN.encode(), invisible_duration=duration(5_000)
    )
    answer = await service.in_time(service.calls["ChangeInvisibleDuration"], request, CALLER)
    new = ReceiptHandle.decode(answer.receipt_handle)
    assert (new.revive_queue_id, new.pop_time_ms, new.offset) == (1_006, 2_000, 0)


async def test_dead_letter_names_where_it_came_from(
    world: World, service: MessagingService
) -> None:
    def change(command: RemotingCommand) -> RemotingCommand:
        fields = ChangeInvisibleTimeResponseHeader(2_000, 60_000, 1_006)
        return response_to(command, 0, None, dict(fields.encode()))

    world.group.on(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
    world.group.on(RequestCode.ACK_MESSAGE, response_to)
    world.group.on(RequestCode.CONSUMER_SEND_MSG_BACK, response_to)
    world.group.store("T", 0, decode_record(RECORD))
    request = pb.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=TOPIC, receipt_handle=SHOWN.encode(), max_delivery_attempts=3
    )
    name = "ForwardMessageToDeadLetterQueue"
    answer = await service.in_time(service.calls[name], request, CALLER)
    assert answer.status.code == pb.OK
    header = asked(world, RequestCode.CONSUMER_SEND_MSG_BACK, ConsumerSendMsgBackHeader)
    assert (header.group, header.origin_topic, header.delay_level) == ("clerks", "T", -1)
    # The first delivery is none that is repeated.
    assert header.max_reconsume_times == 2
    assert header.origin_msg_id
    (acked,) = (each for each in world.seen if each.code == RequestCode.ACK_MESSAGE)
    assert ReceiptHandle.decode(str(acked.command.ext["extraInfo"])).revive_queue_id == 1_006


async def test_batch_of_two_message_groups_is_refused(
    world: World, service: MessagingService
) -> None:
    """They belong to two queues, and a batch is stored in one."""
    messages = [
        pb.Message(
            topic=TOPIC,
            system_properties=pb.SystemProperties(
                message_id=each, message_type=pb.FIFO, message_group=each
            ),
            body=b"x",
        )
        for each in ("a", "b")
    ]
    with pytest.raises(RefusedError) as caught:
        await service.send_message(pb.SendMessageRequest(messages=messages), CALLER)
    assert caught.value.code == pb.ILLEGAL_MESSAGE_GROUP
    assert world.group.bodies("T") == []


async def test_check_back_is_about_a_transaction(service: MessagingService) -> None:
    # The half message alone does not state its type, and clients look it up by that.
    got: list[pb.TelemetryCommand] = []
    service.open_stream(CALLER, got.append)
    service.clients.produces(CALLER.name, TOPIC, trio.current_time())
    half = MessageExt(memoryview(RECORD), 0)
    service._ask_back(Question(half, 0x1F, 0x2A, "g", cast(Any, None)))
    (command,) = got
    asked_about = command.recover_orphaned_transaction_command
    assert asked_about.message.system_properties.message_type == pb.TRANSACTION
    assert asked_about.transaction_id == "1f-2a-g"
    assert asked_about.message.body == b"one"


def open_producers(service: MessagingService, *names: str) -> list[str]:
    """Open a stream of each producer; return what becomes the names of those that are asked."""
    asked_of: list[str] = []

    def note(name: str, _: pb.TelemetryCommand) -> None:
        asked_of.append(name)

    for name in names:
        settings = pb.Settings(client_type=pb.PRODUCER, publishing=pb.Publishing(topics=[TOPIC]))
        service.clients.take_settings(name, settings, 0)
        service.open_stream(Caller(name), partial(note, name))
    return asked_of


async def test_producers_of_transactions_are_asked_back(
    world: World, service: MessagingService
) -> None:
    """Those that were started last may send nothing but plain messages, and have no checker."""
    asked_of = open_producers(service, "decides", "too", "plain-1", "plain-2")
    service.clients.produces("decides", TOPIC, 0)
    world.group.on(RequestCode.END_TRANSACTION, response_to)
    end = pb.EndTransactionRequest(topic=TOPIC, transaction_id="1f-2a-g", resolution=pb.COMMIT)
    await service.in_time(service.calls["EndTransaction"], end, Caller("too"))
    half = MessageExt(memoryview(RECORD), 0, "g")
    for _ in range(100):
        service._ask_back(Question(half, 0x1F, 0x2A, "g", cast(Any, None)))
    assert min(asked_of.count("decides"), asked_of.count("too")) > 30
    assert min(asked_of.count("plain-1"), asked_of.count("plain-2")) > 0


def sent(kind: pb.MessageType) -> pb.SendMessageRequest:
    system = pb.SystemProperties(message_id="01AB", message_type=kind)
    if kind == pb.FIFO:
        system.message_group = "a"
    return pb.SendMessageRequest(
        messages=[pb.Message(topic=TOPIC, system_properties=system, body=b"x")]
    )


async def test_half_message_is_sent_once(world: World, service: MessagingService) -> None:
    """When it is stored already, a second one would never be decided."""
    attempts: list[RemotingCommand] = []

    def lose(command: RemotingCommand) -> RemotingCommand:
        attempts.append(command)
        return response_to(
            command, ResponseCode.SYSTEM_ERROR, "no answer", {OUTCOME_FIELD: "unknown"}
        )

    world.group.intercept(lose)
    with pytest.raises(MQError) as caught:
        await service.send_message(sent(pb.TRANSACTION), CALLER)
    assert status_of(caught.value).code == pb.PROXY_TIMEOUT
    assert len(attempts) == 1


@pytest.mark.parametrize("stated", ["NORMAL", "FIFO", "TRANSACTION"])
@pytest.mark.parametrize("kind", [pb.NORMAL, pb.FIFO])
async def test_topic_takes_only_the_type_it_states(
    world: World, service: MessagingService, stated: str, kind: pb.MessageType
) -> None:
    config = TopicConfig("T", attributes={"+message.type": stated})
    world.group.on(RequestCode.GET_TOPIC_CONFIG, fixed(body=config.encode()))
    if pb.MessageType.Name(kind) == stated:
        answer = await service.send_message(sent(kind), CALLER)
        assert answer.status.code == pb.OK
        return
    with pytest.raises(RefusedError) as caught:
        await service.send_message(sent(kind), CALLER)
    assert caught.value.code == pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    assert world.group.bodies("T") == []


async def test_silent_broker_holds_up_no_announcement(
    world: World, service: MessagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all clients of many groups are started again while a broker hangs."""

    async def heartbeat(number: int) -> None:
        group = pb.Resource(name=f"group-{number}")
        beat = pb.HeartbeatRequest(group=group, client_type=pb.PUSH_CONSUMER)
        await service.heartbeat(beat, Caller(f"client-{number}"))

    heartbeats = service._instance.heartbeats

    monkeypatch.setattr(heartbeats, "_unregister", lambda **_: trio.sleep(1))
    for number in range(50):
        await heartbeat(number)
    await trio.sleep(1)
    assert b"group-49" in heartbeats.body()
    for number in range(50):
        await service.notify_client_termination(
            pb.NotifyClientTerminationRequest(), Caller(f"client-{number}")
        )
    await trio.sleep(0.1)
    await heartbeat(99)
    await trio.sleep(2)
    assert b"group-99" in heartbeats.body()
    assert b"group-49" not in heartbeats.body()


async def test_what_waits_at_a_frozen_leader_ends(world: World, service: MessagingService) -> None:
    code, (first, *others) = RequestCode.POP_MESSAGE, world.group.brokers
    first.on(code, lambda _: trio.sleep_forever())
    for broker in others:
        broker.on(code, partial(broker._led, ext={}))

    async def move() -> None:
        await trio.sleep(2.5)
        world.group.elect(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        asking = partial(service._instance.ask_leader, "g", code, topic="T")
        answer = await asking(timeout_s=60.0, attempt_timeout_s=20.0)
        assert (answer.code, trio.current_time() < 6.0) == (0, True)


GROUPS = [f"order-{number}" for number in range(12)]


async def send(service: MessagingService, group: str, step: int) -> int:
    message = pb.Message(topic=pb.Resource(name="T"), body=f"{group} {step}".encode())
    system = message.system_properties
    system.message_id, system.message_type = f"{step:032X}", pb.FIFO
    system.message_group = group
    return await code_of(service, "SendMessage", pb.SendMessageRequest(messages=[message]))


def places(world: World) -> dict[str, set[tuple[str, int]]]:
    """Return the queues that each message group has messages in."""
    found: dict[str, set[tuple[str, int]]] = {}
    for name, group in world.groups.items():
        for (_, queue_id), records in group.queues.items():
            for record in records:
                message_group, _ = bytes(decode_record(record).body).decode().split()
                found.setdefault(message_group, set()).add((name, queue_id))
    return found


async def test_election_moves_no_message_group(world: World, service: MessagingService) -> None:
    other = await world.add_group("h", 3, 11_000)
    for group in GROUPS:
        assert await send(service, group, 0) == pb.OK
    other.leader = None
    other.register()
    await service.query_route(pb.QueryRouteRequest(topic=pb.Resource(name="T")), Caller("c"))
    await service._instance.route("T", fresh=True)
    codes = [await send(service, group, 1) for group in GROUPS]
    assert pb.OK in codes
    assert len(set(codes)) == 2, "those of the group without a leader are refused"
    other.elect(1)
    for group in GROUPS:
        assert await send(service, group, 2) == pb.OK
    found = places(world)
    assert [len(found[group]) for group in GROUPS] == [1] * len(GROUPS)
    assert {name for each in found.values() for name, _ in each} == {"g", "h"}
