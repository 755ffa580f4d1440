"""`dledger dlq resend`: which dead letters its options name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from trio.testing import MockClock

from dledger.cli.dlq_command import chosen_queues, resend
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.commitlog.record import decode_record
from dledger.output import CliError
from tests.unit.client.fake_cluster import World, open_world

LETTERS = "%DLQ%billing"
FIRST, SECOND = MessageQueue(LETTERS, "g", 0), MessageQueue(LETTERS, "h", 0)
THIRD = MessageQueue(LETTERS, "h", 1)


@pytest.fixture
async def world(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Two broker groups, "g" and "h", with three dead letters of "billing" each."""

    async with open_world() as cluster:
        monkeypatch.setattr("dledger.cli.commands.open_client", lambda _: cluster.client())
        group, other = cluster.groups["g"], await cluster.add_group("h", 1, 11_000)
        async with cluster.client() as client, Producer(client, "p") as producer:
            for number in range(3):
                message = Message("T", b"%d" % number)
                await producer.send_to(MessageQueue("T", "g", 0), message)
        for stored in list(group.queue("T", 0)):
            for each in (group, other):
                each.store(LETTERS, 0, decode_record(stored))
        for each in (group, other):
            each.topics["%RETRY%billing"] = 1
            each.register()
        yield cluster


def given_back(world: World) -> list[bytes]:
    return sorted(
        body for group in world.groups.values() for body in group.bodies("%RETRY%billing")
    )


async def test_offset_names_one_letter_of_one_queue(world: World) -> None:
    with pytest.raises(CliError, match="offset 1: in several queues, g queue 0, h queue 0; choose"):
        await resend("billing", offset=1)
    assert given_back(world) == []
    await resend("billing", offset=1, broker="h", queue=0)
    assert given_back(world) == [b"1"]


async def test_broker_names_the_letters_of_its_queues(world: World) -> None:
    await resend("billing", broker="g", max_=2)
    assert given_back(world) == [b"0", b"1"]
    await resend("billing", max_=3)
    assert given_back(world) == [b"0", b"0", b"1", b"1", b"2"]
    await resend("billing")
    assert given_back(world) == [b"0", b"0", b"1", b"1", b"2", b"2"]


async def test_group_without_dead_letters_is_named(world: World) -> None:
    with pytest.raises(CliError, match="other has no dead letters"):
        await resend("other")


def test_queues_are_chosen_by_broker_and_number() -> None:
    every = [THIRD, SECOND, FIRST]
    assert chosen_queues(every, None, None, None) == [FIRST, SECOND, THIRD]
    assert chosen_queues(every, "h", None, None) == [SECOND, THIRD]
    assert chosen_queues(every, None, 0, None) == [FIRST, SECOND]
    assert chosen_queues(every, "h", 1, 7) == [THIRD]
    assert chosen_queues([FIRST], None, None, 7) == [FIRST]
    with pytest.raises(CliError, match="no such queue"):
        chosen_queues(every, "g", 1, None)
