"""Offsets of a consumer group on the brokers, or in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.consumer.offsets import BrokerOffsets, LocalOffsets, UnkeptOffsets, offsets_path
from client.core.client_instance import ClientInstance
from client.core.errors import RequestFailedError
from client.core.route import MessageQueue
from commitlog.disk import OsDisk
from commitlog.errors import ConfigError
from dledger.testing.doubles import InlineExecutor
from remoting.protocol.codes import RequestCode
from remoting.protocol.command import RemotingCommand, response_to
from tests.unit.client.consumer.consuming import QUEUE
from tests.unit.client.fake_cluster import World

OTHER = MessageQueue("T", "g", 1)


async def test_brokers_keep_offsets_and_say_which_are_stored(
    world: World, client: ClientInstance
) -> None:
    store = BrokerOffsets(client, "c")
    assert await store.load(QUEUE) is None
    assert await store.save({QUEUE: 5, OTHER: 7}) == {QUEUE, OTHER}
    assert (await store.load(QUEUE), await store.load(OTHER)) == (5, 7)
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert {ext["sync"] for ext in asked} == {"true"}
    for broker in world.groups["g"].brokers:
        broker.answer_commit = lambda a: response_to(a, 1, "no")
    assert await store.save({QUEUE: 6}) == set()


async def test_offsets_keep_the_lock_tokens_of_their_round(
    world: World, client: ClientInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.consumer.offsets.MAX_COMMITS_AT_ONCE", 1)
    tokens = {QUEUE: 7, OTHER: 7}

    def lock_again(command: RemotingCommand) -> RemotingCommand:
        tokens.update({QUEUE: 40, OTHER: 40})
        return response_to(command)

    for broker in world.groups["g"].brokers:
        broker.answer_commit = lock_again
    store = BrokerOffsets(client, "c", token=tokens.get)
    assert await store.save({QUEUE: 5, OTHER: 7}) == {QUEUE, OTHER}
    asked = [s.command.ext for s in world.seen if s.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert [ext["lockToken"] for ext in asked] == ["7", "7"]


async def test_offset_without_an_answer_is_an_error_not_absent(
    world: World, client: ClientInstance
) -> None:
    await client.route("T")
    world.groups["g"].committed["c", "T", 0] = 1
    for broker in world.groups["g"].brokers:
        broker.answer_query = lambda a: response_to(a, 1, "no")
    with pytest.raises(RequestFailedError):
        await BrokerOffsets(client, "c").load(QUEUE)


async def test_a_file_keeps_offsets_in_the_form_of_the_java_client(tmp_path: Path) -> None:
    path = offsets_path(str(tmp_path), "10.0.0.1", "", "c")
    assert path == f"{tmp_path}/10.0.0.1@DEFAULT/c/offsets.json"
    store = LocalOffsets(OsDisk(), InlineExecutor(), path)
    assert await store.load(QUEUE) is None
    assert await store.save({QUEUE: 5}) == {QUEUE}
    assert await store.save({OTHER: 7}) == {OTHER}
    again = LocalOffsets(OsDisk(), InlineExecutor(), path)
    assert (await again.load(QUEUE), await again.load(OTHER)) == (5, 7)
    text = (tmp_path / "10.0.0.1@DEFAULT" / "c" / "offsets.json").read_text()
    assert text == (
        '{"offsetTable":{{"brokerName":"g","queueId":0,"topic":"T"}:5,'
        '{"brokerName":"g","queueId":1,"topic":"T"}:7}}'
    )


async def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.write_text("no offsets")
    store = LocalOffsets(OsDisk(), InlineExecutor(), str(path))
    with pytest.raises(ConfigError, match="holds no offsets"):
        await store.load(QUEUE)
    with pytest.raises(ConfigError):
        await store.save({QUEUE: 1})
    assert path.read_text() == "no offsets"


async def test_unkept_offsets_are_forgotten() -> None:
    store = UnkeptOffsets()
    assert await store.save({QUEUE: 3}) == {QUEUE}
    assert await store.load(QUEUE) is None
