"""The clients a proxy knows: streams, settings, groups, silence."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from trio.testing import MockClock

from dledger.proxy import clients as module
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.clients import EXPIRY_S, SILENCE_S_MAX, TOPICS_MAX, ClientTable
from dledger.proxy.service import MessagingService
from tests.unit.client.fake_cluster import open_world


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


def test_newest_stream_of_a_producer_is_asked() -> None:
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
        stream = table.producer_stream("Orders")
        assert stream is not None
        stream.push(pb.TelemetryCommand())
        assert got[-1] == expected
        table.close_stream("a", third, 0)
        table.close_stream("a", first, 0)


def test_silent_client_without_stream_is_forgotten() -> None:
    table = ClientTable()
    table.take_settings("a", producer("Orders"), 0)
    table.take_settings("b", consumer("workers"), 0)
    stream = table.open_stream("b", lambda _: None, 0)
    assert stream is not None
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
        table.produces("a", f"t{number}", 0)
    assert len(table.topics) == TOPICS_MAX


def test_client_is_alive_by_its_stream_or_its_calls() -> None:
    table = ClientTable()
    table.heard("c", 0)
    assert table.is_alive("c", SILENCE_S_MAX - 1)
    assert not table.is_alive("c", SILENCE_S_MAX)
    stream = table.open_stream("c", lambda _: None, 0)
    assert stream is not None
    assert table.is_alive("c", 1_000)
    table.close_stream("c", stream, 1_000)
    assert table.is_alive("c", 1_000 + SILENCE_S_MAX - 1)
    table.end("c")
    assert not table.is_alive("c", 1_000)


@pytest.fixture
async def service(autojump_clock: MockClock) -> AsyncIterator[MessagingService]:
    async with open_world() as world:
        service = MessagingService(world.client(), ("127.0.0.1", 8081))
        async with service.open():
            yield service


def caller(client_id: str, access_key: str) -> Caller:
    signed = f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, Signature=00"
    return Caller(client_id, authorization=signed)


async def test_client_is_one_of_its_account(service: MessagingService) -> None:
    # What a check-back has is for accounts that may send to its topic.
    mine, other = caller("a", "clerk-key"), caller("a", "other-key")
    stream = service.open_stream(mine, lambda _: None)
    settings = pb.TelemetryCommand(settings=producer("T"))
    await service.telemetry(settings, mine)
    foreign = service.open_stream(other, lambda _: None)
    assert foreign is not None
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
