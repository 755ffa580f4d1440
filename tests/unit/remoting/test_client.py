"""The pool of connections, and the outcome of the message that a failed call reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from dledger.commitlog.errors import LocalProtocolError
from dledger.remoting.addresses import join_address, split_address
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import ConnectFailedError, ConnectionLostError, RequestTimedOutError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.signature import Credentials, is_signed_by
from dledger.remoting.server import RemotingServer
from dledger.remoting.tcp import TcpNetwork

ECHO, SILENT, HANG_UP, NOTE = 900, 901, 902, 903


class Broker:
    """A server with a handler for each way a call can go."""

    def __init__(self, network: Any) -> None:
        self.noted: list[bytes] = []
        table = ProcessorTable()
        limiter = Limiter("test", 1000)
        table.register(ECHO, lambda _, a: response_to(a, 0, None, {}, a.body), limiter)
        table.register(SILENT, lambda _, a: DEFERRED, limiter)
        table.register(HANG_UP, self._hang_up, limiter)
        table.register(NOTE, lambda _, a: self.noted.append(bytes(a.body)), limiter)
        self.server = RemotingServer(network, table)

    def _hang_up(self, connection: Connection, asked: RemotingCommand) -> None:
        connection.close("hang up")


@pytest.fixture
async def broker(nursery: trio.Nursery, memory_network: Any) -> Broker:
    made = Broker(memory_network)
    await nursery.start(made.server.serve, "b", 1)
    return made


@pytest.fixture
def client(nursery: trio.Nursery, memory_network: Any) -> RemotingClient:
    return RemotingClient(nursery, memory_network)


async def test_callers_share_one_connection_per_address(
    client: RemotingClient, broker: Broker, memory_network: Any
) -> None:
    async with trio.open_nursery() as calls:
        for _ in range(10):
            calls.start_soon(client.invoke, "b:1", request(ECHO))
    assert memory_network.connects.total() == 1
    assert client.addresses == ("b:1",)


async def test_broken_connection_is_made_again(
    client: RemotingClient, broker: Broker, memory_network: Any
) -> None:
    with pytest.raises(ConnectionLostError) as raised:
        await client.invoke("b:1", request(HANG_UP))
    assert raised.value.outcome == "unknown"
    assert raised.value.retriable
    assert (await client.invoke("b:1", request(ECHO, {}, b"again"))).body == b"again"
    assert memory_network.connects.total() == 2


async def test_refused_connection_means_not_stored(client: RemotingClient) -> None:
    with pytest.raises(ConnectFailedError, match="no connection to absent:9") as raised:
        await client.invoke("absent:9", request(ECHO))
    assert raised.value.outcome == "not_stored"
    assert raised.value.refresh_route


async def test_call_without_an_answer_is_unknown_and_stays_connected(
    client: RemotingClient, broker: Broker
) -> None:
    with pytest.raises(RequestTimedOutError) as raised:
        await client.invoke("b:1", request(SILENT))
    assert trio.current_time() == pytest.approx(3, abs=0.1)
    assert raised.value.outcome == "unknown"
    assert (await client.invoke("b:1", request(ECHO))).code == 0


async def test_connecting_counts_against_the_time_of_the_call(nursery: trio.Nursery) -> None:
    class Tarpit:
        async def connect(self, host: str, port: int, **_: Any) -> Any:
            await trio.sleep_forever()

    client = RemotingClient(nursery, Tarpit())  # type: ignore[arg-type]  # it only connects
    with pytest.raises(ConnectFailedError, match="within 2 s") as raised:
        await client.invoke("b:1", request(ECHO), 2)
    assert trio.current_time() == pytest.approx(2, abs=0.1)
    assert raised.value.outcome == "not_stored"


async def test_oneway_is_delivered_and_not_waited_for(
    client: RemotingClient, broker: Broker
) -> None:
    await client.invoke_oneway("b:1", request(NOTE, {}, b"psst"))
    await trio.testing.wait_all_tasks_blocked()
    assert broker.noted == [b"psst"]


async def test_server_asks_the_client_back(nursery: trio.Nursery, memory_network: Any) -> None:
    table = ProcessorTable()
    table.register(40, lambda _, a: response_to(a, 0, "rebalanced"), Limiter("callbacks", 10))
    broker = Broker(memory_network)
    await nursery.start(broker.server.serve, "b", 1)
    client = RemotingClient(nursery, memory_network, table)
    await client.invoke("b:1", request(ECHO))
    [connection] = broker.server.connections
    assert (await connection.invoke(request(40), 1)).remark == "rebalanced"


async def test_disconnect_and_close_end_calls_as_lost(
    client: RemotingClient, broker: Broker
) -> None:
    ends: list[str] = []

    async def call() -> None:
        try:
            await client.invoke("b:1", request(SILENT), 60)
        except ConnectionLostError as error:
            ends.append(error.outcome)

    ends_it: list[Callable[[], None]] = [lambda: client.disconnect("b:1"), client.close]
    for end in ends_it:
        async with trio.open_nursery() as calls:
            calls.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            end()
    assert ends == ["unknown", "unknown"]
    with pytest.raises(ConnectFailedError, match="closed"):
        await client.invoke("b:1", request(ECHO))


@pytest.mark.real_time
async def test_over_real_sockets(nursery: trio.Nursery) -> None:
    broker = Broker(TcpNetwork())
    host, port = await nursery.start(broker.server.serve, "127.0.0.1", 0)
    client = RemotingClient(nursery, TcpNetwork())
    body = bytes(range(256)) * 12_000
    answer = await client.invoke(f"{host}:{port}", request(ECHO, {}, body))
    assert answer.body == body
    with pytest.raises(ConnectFailedError):
        await client.invoke("127.0.0.1:1", request(ECHO))


@pytest.mark.parametrize(("address", "parts"), [("h:1", ("h", 1)), ("[::1]:9876", ("::1", 9876))])
def test_address_is_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    ["", "h", ":1", "h:", "h:x", "h:65536", "h:-1", "::1", "::1:2", "[h]:1", "[::1]", "[::1:2"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(LocalProtocolError):
        split_address(address)


async def test_every_request_is_signed_with_what_it_is_sent_as(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    seen: list[RemotingCommand] = []
    table = ProcessorTable()

    def note(_: Connection, asked: RemotingCommand) -> RemotingCommand | None:
        seen.append(asked)
        return None if asked.is_oneway else response_to(asked)

    table.register(NOTE, note, Limiter("test", 10))
    await nursery.start(RemotingServer(memory_network, table).serve, "b", 1)
    credentials = Credentials("order-service", "0123456789")
    client = RemotingClient(nursery, memory_network, credentials=credentials)
    for serialize in SerializeType:
        command = request(NOTE, {"topic": "T"}, b"body", serialize=serialize)
        await client.invoke("b:1", command)
        # A second try of the same request is signed again.
        command.body = b"other"
        await client.invoke_oneway("b:1", command)
    await trio.testing.wait_all_tasks_blocked()
    assert [bytes(asked.body) for asked in seen] == [b"body", b"other"] * 3
    assert {asked.ext["AccessKey"] for asked in seen} == {"order-service"}
    assert all(is_signed_by(asked, "0123456789") for asked in seen)


async def test_without_credentials_nothing_is_added(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    seen: list[RemotingCommand] = []
    table = ProcessorTable()
    table.register(NOTE, lambda _, asked: seen.append(asked), Limiter("test", 10))
    await nursery.start(RemotingServer(memory_network, table).serve, "b", 1)
    await RemotingClient(nursery, memory_network).invoke_oneway("b:1", request(NOTE, {"a": "b"}))
    await trio.testing.wait_all_tasks_blocked()
    assert [asked.ext for asked in seen] == [{"a": "b"}]


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "x." + "y" * 300])
async def test_a_name_that_no_resolver_takes_is_no_connection(
    client: RemotingClient, host: str
) -> None:
    with pytest.raises(ConnectFailedError, match="no connection to"):
        await client.invoke(f"{host}:1", request(ECHO))
