"""What clients with a namespace are asked about: topics as they name them themselves."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from dledger.client.core.broker_requests import Question
from dledger.client.core.message_ext import MessageExt
from dledger.commitlog.record import encode_record
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.clients import ClientTable
from dledger.proxy.operators import Operators
from dledger.proxy.service import MessagingService
from dledger.remoting.machine import TrioClock
from tests.unit.client.fake_cluster import open_world

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
    autojump_clock: MockClock, named: pb.Resource, is_listed: bool
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
async def test_operators_name_topic_as_its_client_does(
    autojump_clock: MockClock, group: str
) -> None:
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
