"""Between a broker and a NameServer of ours only what changed is sent; to others, as RocketMQ."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from dledger.commitlog.disk import OsDisk
from dledger.namesrv.config import NamesrvConfig, NamesrvTable
from dledger.namesrv.name_server import NameServer
from dledger.namesrv.processor import NameServerProcessor
from dledger.remoting.protocol.bodies import RegisterBrokerBody
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import RegisterBrokerHeader
from dledger.state.topics import TopicConfig
from dledger.testing.doubles import VirtualClock
from tests.harness.registering import Line, RegisteringBroker

ADDRESS = "ns1:9876"


class Client:
    """Stands for the remoting client; a NameServer's own handlers answer."""

    def __init__(self, name_server: NameServer, clock: VirtualClock) -> None:
        self.handlers = NameServerProcessor(name_server, clock).handlers()
        self.line = Line()
        self.requests: list[RemotingCommand] = []

    def live(self, _address: str) -> Line:
        return self.line

    def break_line(self) -> None:
        broken, self.line = self.line, Line()
        broken.close("broken")

    async def invoke(
        self, _address: str, command: RemotingCommand, _timeout_s: float
    ) -> RemotingCommand:
        await trio.sleep(0.01)
        self.requests.append(command)
        return self.handlers[RequestCode(command.code)](self.line, command)  # type: ignore[arg-type]  # a fake connection

    async def invoke_oneway(self, address: str, command: RemotingCommand, timeout_s: float) -> None:
        await self.invoke(address, command, timeout_s)

    def take(self) -> list[tuple[int, int]]:
        """Return code and number of topics of the requests since this was called last."""
        taken, self.requests = self.requests, []
        return [(request.code, _topics_in(request)) for request in taken]


def _topics_in(request: RemotingCommand) -> int:
    if request.code != RequestCode.REGISTER_BROKER:
        return 0
    body = RegisterBrokerBody.decode(request.body)
    return len(body.topic_config_serialize_wrapper.topic_config_table)


class World(RegisteringBroker):
    def __init__(self, root: Path, **settings: Any) -> None:
        clock = VirtualClock()
        self.name_server = NameServer(
            NamesrvConfig(namesrv=NamesrvTable(kv_config_path=str(root / "kv.json"), **settings)),
            OsDisk(),
        )
        self.client = Client(self.name_server, clock)
        super().__init__(root, clock, self.client, [ADDRESS])

    def topics(self) -> set[str]:
        return set(self.name_server.routes.all_topics())

    async def begin(self, nursery: trio.Nursery, topics: int = 30) -> list[tuple[int, int]]:
        """Have *count* topics and let them be registered; return the requests for that."""
        if topics:
            await self.change(put=made(0, topics))
        nursery.start_soon(self.registration.run)
        await trio.sleep(1)
        return self.client.take()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.group.close()


def made(first: int, count: int) -> tuple[TopicConfig, ...]:
    return tuple(TopicConfig(f"T{number:05d}", 2, 2) for number in range(first, first + count))


REGISTER, VERSION = int(RequestCode.REGISTER_BROKER), int(RequestCode.QUERY_DATA_VERSION)


async def test_a_new_topic_is_registered_alone_however_many_there_are(
    world: World, nursery: trio.Nursery
) -> None:
    await world.begin(nursery, topics=0)
    encoded = []
    for number, already in ((5, 20), (6, 1_500)):
        await world.change(put=made(number * 10_000, already))
        await trio.sleep(1)
        world.client.take()
        before = world.registration._topics.encoded

        await world.change(put=made(number * 10_000 + 9_000, 1))

        assert world.client.take() == [(REGISTER, 1)]
        encoded.append(world.registration._topics.encoded - before)
        assert f"T{number * 10_000 + 9_000:05d}" in world.topics()
    assert encoded == [1, 1]


async def test_unchanged_table_registers_its_version(world: World, nursery: trio.Nursery) -> None:
    assert [code for code, _ in await world.begin(nursery)] == [REGISTER]

    await trio.sleep(300)

    assert world.client.take() == [(VERSION, 0)] * 10
    assert not world.name_server.routes.scan(int(world.clock.monotonic() * 1000))
    assert {f"T{number:05d}" for number in range(30)} <= world.topics()


async def test_all_topics_go_to_a_name_server_that_forgot_the_broker(
    world: World, nursery: trio.Nursery
) -> None:
    await world.begin(nursery)
    for info in list(world.name_server.routes.broker_live_table.values()):
        world.name_server.routes.disconnect(info.connection or 0)
    assert not world.topics()

    await trio.sleep(31)

    assert [code for code, _ in world.client.take()] == [VERSION, REGISTER]
    assert "T00029" in world.topics()

    world.client.break_line()
    await trio.sleep(1)
    ((code, count),) = world.client.take()
    assert code == REGISTER
    assert count > 30
    assert "T00029" in world.topics()


async def test_bad_differences_send_all_topics(world: World, nursery: trio.Nursery) -> None:
    await world.begin(nursery)
    # Another broker registered this address meanwhile, with another version.
    command, _ = await world.registration._with_all_topics(0)
    body = RegisterBrokerBody.decode(command.body)
    body.topic_config_serialize_wrapper.data_version.counter = 77
    header = RegisterBrokerHeader.decode(command.ext)
    header.body_crc32 = 0
    other = RemotingCommand(REGISTER, ext=dict(header.encode()), body=body.encode())
    await world.client.invoke(ADDRESS, other, 1.0)
    world.client.take()

    await world.change(put=made(100, 1))

    (first, second) = world.client.take()
    assert first == (REGISTER, 1)
    assert second[0] == REGISTER
    assert second[1] > 30
    assert "T00100" in world.topics()


async def test_a_deleted_topic_goes_where_registrations_delete(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    world = World(tmp_path, delete_topic_with_broker_registration=True)
    await world.begin(nursery)

    await world.change(delete=("T00003", "T00004"))

    assert world.client.take() == [(REGISTER, 0)]
    left = world.topics()
    assert "T00005" in left
    assert not {"T00003", "T00004"} & left
    world.group.close()


async def test_after_too_many_changes_all_topics_are_sent(
    world: World, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dledger.state.tables.TOPIC_CHANGES_KEPT", 10)
    await world.begin(nursery, topics=0)

    await world.change(put=made(0, 30))

    ((code, count),) = world.client.take()
    assert code == REGISTER
    assert count > 30
    assert {f"T{number:05d}" for number in range(30)} <= world.topics()
