"""The clients a proxy knows: streams, settings, groups, namespaces, questions of operators."""

from random import Random
from typing import Any, cast

import pytest
import trio
import trio.testing

from dledger.client.core.broker_requests import Question
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.record import encode_record
from dledger.proxy import clients as module
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy import operators as operators_module
from dledger.proxy import service as service_module
from dledger.proxy.caller import CLIENT_ID_CHARS_MAX, Caller
from dledger.proxy.clients import EXPIRY_S, SILENCE_S_MAX, TOPICS_MAX, Client, ClientTable, Stream
from dledger.proxy.operators import Operators, verdict_of
from dledger.proxy.service import MessagingService
from dledger.proxy.status import RefusedError
from dledger.remoting.connection import Connection
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.bodies import HeartbeatData
from dledger.services.limits import GROUPS_PER_HEARTBEAT
from tests.harness.present import present
from tests.unit.client.fake_cluster import World, open_world


def producer(*topics: str) -> pb.Settings:
    publishing = pb.Publishing(topics=[pb.Resource(name=topic) for topic in topics])
    return pb.Settings(client_type=pb.PRODUCER, publishing=publishing)


def consumer(group: str) -> pb.Settings:
    subscription = pb.Subscription(group=pb.Resource(name=group))
    return pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)


class Table(ClientTable):
    """Counts changes."""

    def __init__(self) -> None:
        self.changes = 0
        super().__init__(self._count)

    def _count(self) -> None:
        self.changes += 1


def test_stream_of_a_topic_is_found_among_its_producers_alone() -> None:
    """A round of check-backs asks for hundreds, and a proxy may have 100,000 clients."""
    table = ClientTable()
    for number in range(50):
        table.open_stream(f"other{number}", lambda _: None, 0)
        table.take_settings(f"other{number}", producer(f"T{number}"), 0)
    table.open_stream("a", lambda _: None, 0)
    table.take_settings("a", producer("Orders"), 0)
    table.open_stream("b", lambda _: None, 0)
    table.take_settings("b", producer("Orders"), 0)
    table.take_settings("silent", producer("Orders"), 0)
    table.take_settings("c", consumer("workers"), 0)
    newest = table.open_stream("c", lambda _: None, 0)
    every, table._clients = table._clients, {}
    found = present(table.producer_stream("Orders"))
    assert found.client.client_id == "b"
    assert table.consumer_streams("workers") == {"c": newest}
    table._clients = every
    table.end("b")
    found = present(table.producer_stream("Orders"))
    assert found.client.client_id == "a"
    table.end("a")
    assert table.producer_stream("Orders") is None, "one without a stream is left"
    table.heard("c", 1, group="others")
    assert (table.consumer_streams("workers"), len(table.consumer_streams("others"))) == ({}, 1)


def test_groups_are_those_of_all_clients() -> None:
    table = Table()
    table.take_settings("a", producer("Orders", "Bills"), 0)
    table.take_settings("b", producer("Orders"), 0)
    table.take_settings("c", consumer("workers"), 0)
    assert table.topics == {"Orders": 2, "Bills": 1}
    assert table.groups == {"workers": 1}
    changes = table.changes
    table.take_settings("b", producer("Orders"), 1)
    table.heard("c", 1, group="workers")
    assert table.changes == changes
    table.end("a")
    table.end("c")
    assert (table.topics, table.groups) == ({"Orders": 1}, {})
    assert table.changes == changes + 2


def test_newest_stream_of_each_producer_is_asked() -> None:
    table = ClientTable()
    got: list[str] = []
    table.take_settings("a", producer("Orders"), 0)
    table.take_settings("b", producer("Orders"), 0)
    assert table.producer_stream("Orders") is None
    first = table.open_stream("a", lambda _: got.append("a"), 0)
    table.open_stream("b", lambda _: got.append("b"), 0)
    third = table.open_stream("a", lambda _: got.append("a again"), 0)
    assert first is not None
    assert third is not None
    for expected in ("a again", "b"):
        stream = present(table.producer_stream("Orders"))
        stream.push(pb.TelemetryCommand())
        assert got[-1] == expected
        table.close_stream("a", third, 0)
        table.close_stream("a", first, 0)


def test_silent_client_without_stream_is_forgotten() -> None:
    table = ClientTable()
    table.take_settings("a", producer("Orders"), 0)
    table.take_settings("b", consumer("workers"), 0)
    stream = present(table.open_stream("b", lambda _: None, 0))
    assert table.expire(EXPIRY_S - 1) == []
    assert table.expire(EXPIRY_S) == ["a"]
    assert (table.topics, table.groups) == ({}, {"workers": 1})
    table.close_stream("b", stream, 100)
    assert table.expire(100 + EXPIRY_S - 1) == []
    assert table.expire(100 + EXPIRY_S) == ["b"]
    assert len(table) == 0


def test_consumer_without_settings_is_known_by_heartbeat() -> None:
    table = ClientTable()
    table.heard("c", 0, group="workers")
    stream = table.open_stream("c", lambda _: None, 0)
    assert table.consumer_streams("workers") == {"c": stream}
    assert table.consumer_streams("others") == {}


def test_more_clients_are_served_and_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENTS_MAX", 2)
    table = ClientTable()
    for name in ("a", "b", "c", ""):
        table.heard(name, 0, group="workers")
    assert table.groups == {"workers": 2}
    assert table.open_stream("c", lambda _: None, 0) is None


def test_topics_of_a_client_are_bounded() -> None:
    table = ClientTable()
    for number in range(TOPICS_MAX + 5):
        table.produces("a", pb.Resource(name=f"t{number}"), 0)
    assert len(table.topics) == TOPICS_MAX


def test_client_is_alive_by_its_stream_or_its_calls() -> None:
    table = ClientTable()
    table.heard("c", 0)
    assert table.is_alive("c", SILENCE_S_MAX - 1)
    assert not table.is_alive("c", SILENCE_S_MAX)
    stream = present(table.open_stream("c", lambda _: None, 0))
    assert table.is_alive("c", EXPIRY_S - 1)
    assert not table.is_alive("c", EXPIRY_S), "its host may have lost power"
    table.heard("c", 1_000)
    assert table.is_alive("c", 1_000 + EXPIRY_S - 1)
    table.close_stream("c", stream, 1_000)
    assert table.is_alive("c", 1_000 + SILENCE_S_MAX - 1)
    table.end("c")
    assert not table.is_alive("c", 1_000)


def caller(client_id: str, access_key: str) -> Caller:
    signed = f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, Signature=00"
    return Caller(client_id, authorization=signed)


async def test_client_is_one_of_its_account(service: MessagingService) -> None:
    # What a check-back has is for accounts that may send to its topic.
    mine, other = caller("a", "clerk-key"), caller("a", "other-key")
    stream = service.open_stream(mine, lambda _: None)
    settings = pb.TelemetryCommand(settings=producer("T"))
    await service.telemetry(settings, mine)
    present(service.open_stream(other, lambda _: None))
    assert service.clients.producer_stream("T") is stream
    await service.notify_client_termination(pb.NotifyClientTerminationRequest(), other)
    assert service.clients.producer_stream("T") is stream
    await service.notify_client_termination(pb.NotifyClientTerminationRequest(), mine)
    assert service.clients.producer_stream("T") is None


@pytest.mark.parametrize(
    ("known", "name"),
    [
        (caller("a", "clerk-key"), "a clerk-key"),
        (caller("", "clerk-key"), ""),
        (Caller("a"), "a"),
        (Caller("a", authorization="Credential=clerk-key"), "a"),
    ],
    ids=["signed", "nameless", "plain", "unreadable"],
)
def test_client_is_named_with_its_account(known: Caller, name: str) -> None:
    assert known.name == name


# ---------------------------------------------------------------------------- what brokers know


async def announced(world: World, service: MessagingService) -> set[str]:
    """Return what the next heartbeats of the proxy name."""
    names: set[str] = set()

    def heard(_connection: Connection, data: HeartbeatData) -> None:
        names.update(each.group_name for each in data.producer_data_set)
        names.update(each.group_name for each in data.consumer_data_set)

    for broker in world.group.brokers:
        broker.heard = heard
    await trio.sleep(60)
    return names


ILLEGAL = ["", "a b", "a/b", "\n", "x" * 300]


@pytest.mark.parametrize("name", ILLEGAL, ids=["none", "blank", "slash", "line", "long"])
async def test_illegal_names_are_in_no_heartbeat(world: World, name: str) -> None:
    # A broker refuses such a heartbeat whole: it would ask no client of the proxy back.
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    message = pb.Message(topic=pb.Resource(name=name), body=b"x")
    message.system_properties.message_type = pb.TRANSACTION
    beat = pb.HeartbeatRequest(client_type=pb.PUSH_CONSUMER, group=pb.Resource(name=name))
    async with service.open():
        await service.telemetry(pb.TelemetryCommand(settings=producer("T")), Caller("good"))
        with pytest.raises(RefusedError) as caught:
            await service.heartbeat(beat, Caller("a"))
        assert caught.value.code == pb.ILLEGAL_CONSUMER_GROUP
        with pytest.raises(RefusedError) as caught:
            await service.send_message(pb.SendMessageRequest(messages=[message]), Caller("b"))
        assert caught.value.code == pb.ILLEGAL_TOPIC
        answer = await service.telemetry(
            pb.TelemetryCommand(settings=producer("T", name)), Caller("c")
        )
        assert answer is not None
        assert answer.status.code == pb.ILLEGAL_TOPIC
        beat.client_type = pb.PRODUCER
        await service.heartbeat(beat, Caller("d"))
        assert await announced(world, service) == {"T", "DLEDGER_PROXY"}


async def test_topic_too_long_for_a_group_is_not_announced(world: World) -> None:
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    async with service.open():
        settings = producer("T", "%RETRY%" + "x" * 248)
        await service.telemetry(pb.TelemetryCommand(settings=settings), Caller("a"))
        assert await announced(world, service) == {"T", "DLEDGER_PROXY"}


async def test_heartbeats_name_no_more_than_brokers_take(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "ANNOUNCED_MAX", 3)
    service = MessagingService(world.client(), ("127.0.0.1", 8081))
    async with service.open():
        now_s = trio.current_time() + 600
        service.clients.take_settings("p", producer("T"), now_s)
        for number in range(5):
            service.clients.take_settings(f"c{number}", consumer(f"group-{number}"), now_s)
            await trio.testing.wait_all_tasks_blocked()
        assert await announced(world, service) == {"T", "DLEDGER_PROXY", "group-0", "group-1"}
        service.clients.take_settings("q", producer("Bills"), now_s)
        service.clients.end("c0")
        await trio.testing.wait_all_tasks_blocked()
        assert await announced(world, service) == {"T", "Bills", "DLEDGER_PROXY", "group-1"}


def test_announced_names_fit_into_a_heartbeat() -> None:
    assert service_module.ANNOUNCED_MAX < GROUPS_PER_HEARTBEAT


def test_long_name_of_a_client_is_none() -> None:
    """Clients are kept by their names, a hundred thousand of them."""
    for chars, known in ((CLIENT_ID_CHARS_MAX, True), (CLIENT_ID_CHARS_MAX + 1, False)):
        caller = Caller.of({"x-mq-client-id": "c" * chars}, "", None)
        assert bool(caller.name) is known


PLAIN = pb.Resource(name="Orders")
INSIDE = pb.Resource(resource_namespace="shop", name="Orders")
WHOLE = pb.Resource(name="shop%Orders")


def stored(topic: str) -> MessageExt:
    plain: dict[str, Any] = {"queue_id": 0, "body": b"one", "properties": b"", "queue_offset": 0}
    return MessageExt(memoryview(encode_record(topic=topic, **plain)), 0)


def question(topic: str) -> Question:
    return Question(stored(topic), 0, 0, "g", cast(Any, None))


@pytest.mark.parametrize("named", [PLAIN, INSIDE, WHOLE], ids=["plain", "inside", "whole"])
@pytest.mark.parametrize("is_listed", [True, False], ids=["settings", "sent"])
async def test_check_back_names_topic_as_its_client_does(
    named: pb.Resource, is_listed: bool
) -> None:
    # A client that has a namespace puts it before the name it gets, and ends the transaction so.
    topics = [named] if is_listed else []
    settings = pb.Settings(client_type=pb.PRODUCER, publishing=pb.Publishing(topics=topics))
    got: list[pb.TelemetryCommand] = []
    full = "shop%Orders" if named != PLAIN else "Orders"
    async with open_world() as world:
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        async with service.open():
            service.open_stream(Caller("a"), got.append)
            await service.telemetry(pb.TelemetryCommand(settings=settings), Caller("a"))
            service.clients.produces("a", named, trio.current_time())
            service._ask_back(question(full))
    (command,) = got
    assert command.recover_orphaned_transaction_command.message.topic == named


@pytest.mark.parametrize("group", ["", "shop"], ids=["plain", "inside"])
async def test_operators_name_topic_as_its_client_does(group: str) -> None:
    table = ClientTable()
    subscription = pb.Subscription(group=pb.Resource(resource_namespace=group, name="clerks"))
    settings = pb.Settings(client_type=pb.PUSH_CONSUMER, subscription=subscription)
    got: list[pb.TelemetryCommand] = []
    table.open_stream("a", got.append, 0)
    table.take_settings("a", settings, 0)
    operators = Operators(table, TrioClock(), Random(1))
    await operators.of_group("shop%clerks" if group else "clerks").consume_directly(
        stored("shop%Orders")
    )
    (command,) = got
    assert command.verify_message_command.message.topic == (INSIDE if group else WHOLE)


def ask_for_stack(nonce: str) -> pb.TelemetryCommand:
    command = pb.PrintThreadStackTraceCommand(nonce=nonce)
    return pb.TelemetryCommand(print_thread_stack_trace_command=command)


def made() -> tuple[Operators, ClientTable]:
    table = ClientTable()
    return Operators(table, TrioClock(), Random(1)), table


async def test_answer_belongs_to_its_nonce() -> None:
    operators, _ = made()
    stack = pb.TelemetryCommand(thread_stack_trace=pb.ThreadStackTrace(thread_stack_trace="main"))

    def answer(command: pb.TelemetryCommand) -> None:
        operators.answered("another", pb.TelemetryCommand())
        operators.answered(command.print_thread_stack_trace_command.nonce, stack)

    assert await operators.ask(Stream(answer, 1, Client("a", 0)), ask_for_stack) == stack


async def test_silent_client_is_waited_for_briefly() -> None:
    operators, _ = made()
    began_s = trio.current_time()
    assert await operators.ask(Stream(lambda _: None, 1, Client("a", 0)), ask_for_stack) is None
    assert trio.current_time() - began_s == operators_module.ANSWER_S


async def test_number_of_questions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_module, "QUESTIONS_MAX", 1)
    operators, _ = made()
    pushed: list[pb.TelemetryCommand] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(
                operators.ask, Stream(pushed.append, 1, Client("a", 0)), ask_for_stack
            )
    assert len(pushed) == 1


async def test_group_reports_each_of_its_clients() -> None:
    operators, table = made()
    for name in ("a", "b"):
        table.heard(name, 0, group="workers")

    def answer(command: pb.TelemetryCommand) -> None:
        nonce = command.print_thread_stack_trace_command.nonce
        trace = pb.ThreadStackTrace(nonce=nonce, thread_stack_trace="main: busy")
        operators.answered(nonce, pb.TelemetryCommand(thread_stack_trace=trace))

    table.open_stream("a", answer, 0)
    table.open_stream("b", lambda _: None, 0)
    group = operators.of_group("workers")
    info = await group.running_info(with_stacks=True)
    assert info.jstack == "a\nmain: busy\nb\nno answer"
    assert info.properties["clients"] == "a,b"
    assert (await group.running_info(with_stacks=False)).jstack is None


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (pb.OK, "CR_SUCCESS"),
        (pb.FAILED_TO_CONSUME_MESSAGE, "CR_LATER"),
        (pb.VERIFY_FIFO_MESSAGE_UNSUPPORTED, "CR_THROW_EXCEPTION"),
    ],
)
def test_verdict_is_that_of_the_client(code: pb.Code, verdict: str) -> None:
    answer = pb.TelemetryCommand(status=pb.Status(code=code, message="as it was"))
    assert verdict_of(answer)[0] == verdict
    assert "as it was" in verdict_of(answer)[1]


def test_silence_is_a_verdict_of_its_own() -> None:
    assert verdict_of(None)[0] == "CR_RETURN_NULL"
