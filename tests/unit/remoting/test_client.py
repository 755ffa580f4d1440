"""The pool of connections, and the outcome of the message that a failed call reports.

Places of connections: which gets one, which gives way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
import trio.testing

from dledger.commitlog.errors import LocalProtocolError
from dledger.remoting.addresses import join_address, split_address
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import (
    ENDED_PER_S,
    GRACE_S,
    MAX_UNPROVEN,
    NEW_AT_ONCE,
    SILENT_S,
    TURN_S,
    TURNS_MAX,
    Admission,
    Places,
    Turn,
)
from dledger.remoting.errors import ConnectFailedError, ConnectionLostError, RequestTimedOutError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand, SerializeType, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.protocol.signature import Credentials, is_signed_by
from dledger.remoting.server import RemotingServer
from dledger.remoting.tcp import TcpNetwork
from tests.harness.beside import beside

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


@dataclass(eq=False)
class Peer:
    """A connection as places see it."""

    address: str = "a"
    last_activity_s: float = 0.0
    busy: bool = False
    is_closed: bool = False
    is_proven: bool = False

    @property
    def peer_address(self) -> tuple[str, int]:
        return (self.address, 1)

    @peer_address.setter
    def peer_address(self, _: tuple[str, int]) -> None:
        raise AssertionError

    def is_busy(self, now_s: float) -> bool:
        return self.busy

    def give_way(self, reason: str) -> None:
        self.is_closed = True


def filled(places: Places[Peer], count: int, *, proven: bool, now_s: float = 0.0) -> list[Peer]:
    peers = [Peer() for _ in range(count)]
    for peer in peers:
        assert places.admit(peer, now_s) is Admission.SERVED
        if proven:
            places.prove(peer)
    return peers


def test_idle_connections_of_one_address_lock_no_client_out() -> None:
    places: Places[Peer] = Places(4_096, 32)
    idle = []
    for number in range(4_096):
        idle.append(Peer())
        assert places.admit(idle[-1], number * 0.01) is Admission.SERVED
    client = Peer("b", last_activity_s=41)
    assert places.admit(client, 41.0) is Admission.SERVED
    assert idle[0].is_closed
    assert not client.is_closed
    # An eighth of the places is all that connections without a request get.
    assert places.count <= 4_096 // 8 + 51


def test_places_end_the_oldest_without_a_request_first() -> None:
    places: Places[Peer] = Places(4, 0)
    first, second, third, fourth = (Peer() for _ in range(4))
    for at, peer in enumerate((first, second, third)):
        places.admit(peer, at * 0.01)
        if peer is first:
            places.prove(peer)
    places.admit(fourth, 0.04)
    assert places.admit(Peer(), 10.0) is Admission.SERVED
    assert [peer.is_closed for peer in (first, second, third, fourth)] == [
        *(False, True, False, False)
    ]


def test_the_address_with_most_idle_connections_gives_way() -> None:
    places: Places[Peer] = Places(4, 0)
    lonely, many = Peer("b"), [Peer("a") for _ in range(3)]
    for peer in (lonely, *many):
        places.admit(peer, 0.0)
    places.admit(Peer("c"), GRACE_S)
    assert not lonely.is_closed
    assert many[0].is_closed


def test_a_connection_that_has_just_come_is_given_time() -> None:
    places: Places[Peer] = Places(2, 0)
    peers = filled(places, 2, proven=False)
    assert places.admit(Peer(), GRACE_S / 2) is Admission.REFUSED
    assert not any(peer.is_closed for peer in peers)
    assert places.refused == 1


def test_places_end_the_longest_silent_not_a_busy_one() -> None:
    places: Places[Peer] = Places(3, 0)
    busy, silent, recent = filled(places, 3, proven=True)
    busy.busy, recent.last_activity_s = True, 100.0
    silent.last_activity_s = 10.0
    assert places.admit(Peer(), 101.0) is Admission.SERVED
    assert [busy.is_closed, silent.is_closed, recent.is_closed] == [False, True, False]


def test_where_all_are_busy_administration_has_places_left() -> None:
    places: Places[Peer] = Places(6, 2)
    peers = filled(places, 4, proven=True)
    for peer in peers:
        peer.busy = True
    first, second, third = (Peer() for _ in range(3))
    now = 2 * SILENT_S
    assert places.admit(first, now) is Admission.RESERVE
    assert places.admit(second, now) is Admission.RESERVE
    assert places.admit(third, now) is Admission.REFUSED
    # One that sits in the reserve gives way to the next.
    assert places.admit(third, now + GRACE_S) is Admission.RESERVE
    assert first.is_closed
    places.leave(peers[0])
    assert places.admit(Peer(), now + 2) is Admission.SERVED


def test_places_come_back_once() -> None:
    places: Places[Peer] = Places(10, 0)
    one = filled(places, 1, proven=True)[0]
    places.leave(one)
    places.leave(one)
    assert places.count == 0


def test_places_bound_the_connections_a_flood_ends() -> None:
    places: Places[Peer] = Places(4_096, 0)
    now = 0.0
    for _ in range(600):
        places.admit(Peer(), now)
    now = 10.0
    flood = [places.admit(Peer(), now + number / 10_000) for number in range(5_000)]
    assert places.given_way == ENDED_PER_S
    assert flood.count(Admission.REFUSED) == 5_000 - ENDED_PER_S
    assert places.admit(Peer(), now + 1.0) is Admission.SERVED


def test_places_bound_a_flood_within_the_grace() -> None:
    places: Places[Peer] = Places(10_000, 32)
    admitted = [places.admit(Peer(), number * 0.0001) for number in range(4_000)]
    assert admitted.count(Admission.SERVED) == NEW_AT_ONCE * MAX_UNPROVEN
    assert places.count == NEW_AT_ONCE * MAX_UNPROVEN
    assert places.admit(Peer("b"), GRACE_S + 0.2) is Admission.SERVED


CODE = 900
CLIENTS = 200
HANDLER_S = 0.001


class Spent:
    """A clock that only handlers move, and what each turn took by it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turn = _NotedTurn(self)

    def handle(self, _: Connection, asked: RemotingCommand) -> RemotingCommand:
        self.now_s += HANDLER_S
        return response_to(asked, 0, None, {}, asked.body)


class _NotedTurn(Turn):
    def __init__(self, spent: Spent) -> None:
        super().__init__(lambda: spent.now_s)
        self.longest_s = self._began_s = 0.0

    def after_io_wait(self, timeout: float) -> None:
        super().after_io_wait(timeout)
        self._began_s = self._now_s()

    def before_io_wait(self, timeout: float) -> None:
        self.longest_s = max(self.longest_s, self._now_s() - self._began_s)


async def answered(stream: Any, body: bytes) -> bytes:
    decoder, answers = FrameDecoder(), list[RemotingCommand]()
    await stream.send_all(encode_command(request(CODE, {}, body)))
    while not answers:
        answers = decoder.feed(await stream.receive_some(65_536))
    return bytes(answers[0].body)


@pytest.mark.parametrize("is_bounded", [False, True])
async def test_requests_of_one_moment_share_no_turn(
    nursery: trio.Nursery, memory_network: Any, is_bounded: bool
) -> None:
    spent = Spent()
    processors = ProcessorTable()
    processors.register(CODE, spent.handle, Limiter("test", CLIENTS))
    turn = spent.turn if is_bounded else None
    server = RemotingServer(memory_network, processors, turn=turn)
    await nursery.start(server.serve, "b", 1)
    streams = [await memory_network.connect("b", 1, timeout_s=1) for _ in range(CLIENTS)]
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.add_instrument(spent.turn)
    bodies: set[bytes] = set()

    async def ask(number: int) -> None:
        bodies.add(await answered(streams[number], b"%d" % number))

    try:
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                clients.start_soon(ask, number)
    finally:
        trio.lowlevel.remove_instrument(spent.turn)
    assert bodies == {b"%d" % number for number in range(CLIENTS)}
    assert spent.now_s == pytest.approx(CLIENTS * HANDLER_S)
    all_of_them = spent.turn.longest_s == pytest.approx(CLIENTS * HANDLER_S)
    assert all_of_them != is_bounded
    if is_bounded:
        assert spent.turn.longest_s < TURN_S + 2 * HANDLER_S


async def test_wait_for_next_ends_when_turns_stay_full() -> None:
    turn = Turn(lambda: 1.0)
    turn.ends_s = 0.0
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with beside(count):
        await turn.wait_for_next()
    assert TURNS_MAX - 2 <= turns <= TURNS_MAX + 2


async def test_wait_for_next_is_not_cancelled() -> None:
    turn = Turn(lambda: 1.0)
    turn.ends_s = 0.0
    with trio.CancelScope() as scope:
        scope.cancel()
        await turn.wait_for_next()
    assert not scope.cancelled_caught
