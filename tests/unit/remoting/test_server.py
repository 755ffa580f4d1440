"""Accepting, limits, draining."""

from typing import Any

import pytest
import trio
import trio.testing

from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.errors import ConnectionLostError, RemotingError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.server import RemotingServer, ServerLimits
from dledger.remoting.tcp import TcpNetwork

ECHO = 900


def table(handler: Any) -> ProcessorTable:
    processors = ProcessorTable()
    processors.register(ECHO, handler, Limiter("test", 100))
    return processors


def echo(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, 0, None, {}, asked.body)


async def test_many_clients_are_served_at_once(nursery: trio.Nursery, memory_network: Any) -> None:
    server = RemotingServer(memory_network, table(echo))
    await nursery.start(server.serve, "b", 1)
    answers: list[bytes] = []

    async def call(number: int) -> None:
        client = RemotingClient(nursery, memory_network)
        answer = await client.invoke("b:1", request(ECHO, {}, bytes([number])))
        answers.append(bytes(answer.body))

    async with trio.open_nursery() as calls:
        for number in range(20):
            calls.start_soon(call, number)
    assert sorted(answers) == [bytes([number]) for number in range(20)]
    assert len(server.connections) == 20


async def test_answers_are_reported_with_codes_and_seconds(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    async def later(asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(2)
        return response_to(asked, 17)

    def by_body(connection: Connection, asked: RemotingCommand) -> Any:
        if asked.body == b"deferred":
            nursery.start_soon(reply_later, connection, asked)
            return DEFERRED
        return later(asked) if asked.body == b"later" else echo(connection, asked)

    async def reply_later(connection: Connection, asked: RemotingCommand) -> None:
        await trio.sleep(3)
        connection.reply(asked, response_to(asked, 19))

    seen: list[tuple[int, int, float]] = []
    server = RemotingServer(
        memory_network, table(by_body), on_answer=lambda *answer: seen.append(answer)
    )
    await nursery.start(server.serve, "b", 1)
    client = RemotingClient(nursery, memory_network)
    for body in (b"at once", b"later", b"deferred"):
        await client.invoke("b:1", request(ECHO, {}, body), timeout_s=10)
    assert [(asked, answered, round(s)) for asked, answered, s in seen] == [
        (ECHO, 0, 0),
        (ECHO, 17, 2),
        (ECHO, 19, 3),
    ]


async def test_server_closes_connections_over_its_limit(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = RemotingServer(memory_network, table(echo), limits=ServerLimits(max_connections=1))
    await nursery.start(server.serve, "b", 1)
    first, second = (RemotingClient(nursery, memory_network) for _ in range(2))
    await first.invoke("b:1", request(ECHO))
    with pytest.raises(ConnectionLostError):
        await second.invoke("b:1", request(ECHO))
    first.close()
    await trio.testing.wait_all_tasks_blocked()
    assert (await second.invoke("b:1", request(ECHO))).code == 0


async def test_connect_callback_runs_before_requests(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    def who(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
        return response_to(asked, 0, connection.attributes["name"])

    server = RemotingServer(memory_network, table(who))
    server.on_connect.append(lambda c: c.attributes.update(name=f"c{len(server.connections)}"))
    await nursery.start(server.serve, "b", 1)
    client = RemotingClient(nursery, memory_network)
    assert (await client.invoke("b:1", request(ECHO))).remark == "c1"


async def test_drain_answers_open_requests_then_ends_serving(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    async def slow(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(2)
        return response_to(asked, 0, "done")

    server = RemotingServer(memory_network, table(slow))
    ended = trio.Event()

    async def serve(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        await server.serve("b", 1, task_status=task_status)
        ended.set()

    await nursery.start(serve)
    client = RemotingClient(nursery, memory_network)
    remarks: list[str | None] = []

    async def call() -> None:
        remarks.append((await client.invoke("b:1", request(ECHO), 10)).remark)

    async with trio.open_nursery() as calls:
        calls.start_soon(call)
        await trio.sleep(1)
        calls.start_soon(server.drain, 10)
    assert remarks == ["done"]
    assert trio.current_time() == pytest.approx(2, abs=0.1)
    await ended.wait()
    with pytest.raises(RemotingError) as raised:
        await client.invoke("b:1", request(ECHO))
    assert raised.value.outcome == "not_stored"


@pytest.mark.parametrize("tasks", [1, 20])
async def test_drain_answers_every_request_under_way(
    tasks: int, nursery: trio.Nursery, memory_network: Any
) -> None:
    async def slow(_: Connection, asked: RemotingCommand) -> RemotingCommand:
        await trio.sleep(0.01)
        return response_to(asked, 0, "done")

    server = RemotingServer(memory_network, table(slow))
    await nursery.start(server.serve, "b", 1)
    client = RemotingClient(nursery, memory_network)
    codes: set[int] = set()
    outcomes: set[str] = set()

    async def ask(number: int) -> None:
        await trio.sleep(number / 1000)
        while True:
            try:
                codes.add((await client.invoke("b:1", request(ECHO), 10)).code)
            except RemotingError as error:
                outcomes.add(error.outcome)
                return

    async with trio.open_nursery() as asking:
        for number in range(tasks):
            asking.start_soon(ask, number)
        await trio.sleep(0.5)
        began_s = trio.current_time()
        await server.drain(10)
        assert trio.current_time() - began_s < 0.1  # the client left; no connection had to be cut
    assert outcomes == {"not_stored"}
    assert codes <= {0, 14}
    assert 0 in codes
    assert not client.addresses


async def test_drain_waits_no_longer_than_its_limit(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = RemotingServer(memory_network, table(lambda _, asked: DEFERRED))
    await nursery.start(server.serve, "b", 1)
    client = RemotingClient(nursery, memory_network)

    async def call() -> None:
        with pytest.raises(ConnectionLostError) as raised:
            await client.invoke("b:1", request(ECHO), 60)
        assert raised.value.outcome == "unknown"

    async with trio.open_nursery() as calls:
        calls.start_soon(call)
        await trio.sleep(1)
        await server.drain(5)
    assert trio.current_time() == pytest.approx(6, abs=0.1)
    assert not server.connections


async def test_after_batch_runs_once_per_received_chunk(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    batches: list[int] = []
    held: list[tuple[Connection, RemotingCommand]] = []

    def seal() -> None:
        batches.append(len(held))
        for connection, asked in held:
            connection.reply(asked, response_to(asked))
        held.clear()

    def hold(connection: Connection, asked: RemotingCommand) -> Any:
        held.append((connection, asked))
        return DEFERRED

    server = RemotingServer(memory_network, table(hold), after_batch=seal)
    await nursery.start(server.serve, "b", 1)
    stream = await memory_network.connect("b", 1, timeout_s=1)
    await stream.send_all(b"".join(encode_command(request(ECHO)) for _ in range(10)))
    decoder = FrameDecoder()
    assert len(decoder.feed(await stream.receive_some(65536))) == 10
    assert batches == [10]


@pytest.mark.real_time
async def test_one_bad_peer_does_not_disturb_the_others(nursery: trio.Nursery) -> None:
    limits = ServerLimits(connection=ConnectionLimits(max_frame_bytes=1000))
    server = RemotingServer(TcpNetwork(), table(echo), limits=limits)
    host, port = await nursery.start(server.serve, "127.0.0.1", 0)
    good = RemotingClient(nursery, TcpNetwork())
    await good.invoke(f"{host}:{port}", request(ECHO))
    oversized = (2000).to_bytes(4, "big") + bytes(100)
    for bad in (b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", oversized):
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(bad)
        with trio.fail_after(5):
            assert await stream.receive_some(100) == b""
        await stream.aclose()
    vanishing = await trio.open_tcp_stream(host, port)
    await vanishing.send_all(encode_command(request(ECHO))[:20])
    await vanishing.aclose()
    answer = await good.invoke(f"{host}:{port}", request(ECHO, {}, b"still here"))
    assert answer.body == b"still here"


@pytest.mark.real_time
async def test_address_in_use_is_an_os_error(nursery: trio.Nursery) -> None:
    server = RemotingServer(TcpNetwork(), ProcessorTable())
    host, port = await nursery.start(server.serve, "127.0.0.1", 0)
    with pytest.raises(OSError, match="ddress already in use"):
        await RemotingServer(TcpNetwork(), ProcessorTable()).serve(host, port)
