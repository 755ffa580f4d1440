"""A server under pressure: half frames, idle connections, unread answers; others are served."""

from typing import Any

import pytest
import trio
import trio.testing

from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import GRACE_S, ConnectionLimits
from dledger.remoting.errors import AccessRefusedError, ConnectionLostError
from dledger.remoting.handling import DEFERRED, Limiter
from dledger.remoting.memory_budget import BudgetLimits, MemoryBudget
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.frame import FrameDecoder, encode_command
from dledger.remoting.server import RemotingServer, ServerLimits

ECHO = 900
ADMIN = 901
HOLD = 902
BEAT = 903
GUARDED = 904
KIB = 1024
FRAME = 256 * KIB
MANY = 10_000
LIMITS = ConnectionLimits(max_frame_bytes=FRAME, max_write_buffer_bytes=1 << 30)


def echo(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    return response_to(asked, 0, None, {}, asked.body)


def beat(connection: Connection, asked: RemotingCommand) -> RemotingCommand:
    connection.note_heartbeat()
    return response_to(asked)


def guarded(_: Connection, asked: RemotingCommand) -> RemotingCommand:
    raise AccessRefusedError("no")


def table() -> ProcessorTable:
    processors = ProcessorTable()
    limiter = Limiter("test", MANY)
    for code, handler in (
        (ECHO, echo),
        (ADMIN, echo),
        (HOLD, lambda *_: DEFERRED),
        (BEAT, beat),
        (GUARDED, guarded),
    ):
        processors.register(code, handler, limiter)
    return processors


async def serving(
    nursery: trio.Nursery,
    network: Any,
    *,
    total: int = 1 << 30,
    unfinished: int = 2 * FRAME,
    **limits: Any,
) -> RemotingServer:
    server = RemotingServer(
        network,
        table(),
        limits=ServerLimits(reserved_codes=frozenset({ADMIN}), connection=LIMITS, **limits),
        budget=MemoryBudget(
            BudgetLimits(total_bytes=total, unfinished_bytes=unfinished, max_frame_bytes=FRAME)
        ),
    )
    await nursery.start(server.serve, "b", 1)
    return server


def held_bytes(server: RemotingServer) -> int:
    return sum(connection._decoder.pending_bytes for connection in server.connections)


async def raw(network: Any, data: bytes = b"") -> Any:
    stream = await network.connect("b", 1, timeout_s=1)
    if data:
        await stream.send_all(data)
    return stream


async def asked(stream: Any, code: int) -> RemotingCommand:
    decoder, answers = FrameDecoder(), list[RemotingCommand]()
    await stream.send_all(encode_command(request(code)))
    while not answers:
        answers = decoder.feed(await stream.receive_some(65_536))
    return answers[0]


async def test_server_bounds_half_frames_and_serves_others(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network)
    half = encode_command(request(ECHO, {}, bytes(FRAME - KIB)))[: FRAME - 10 * KIB]
    known = RemotingClient(nursery, memory_network)
    await known.invoke("b:1", request(ECHO))
    for _ in range(150):
        stream = await memory_network.connect("b", 1, timeout_s=1)
        nursery.start_soon(stream.send_all, half)
        await trio.testing.wait_all_tasks_blocked()
        assert held_bytes(server) <= 3 * FRAME
    body = bytes(FRAME // 2)
    assert (await known.invoke("b:1", request(ECHO, {}, b"small"), 60)).body == b"small"
    assert (await known.invoke("b:1", request(ECHO, {}, body), 60)).body == body
    newcomer = RemotingClient(nursery, memory_network)
    assert (await newcomer.invoke("b:1", request(ECHO, {}, b"new"), 60)).body == b"new"
    assert server.budget.frames.given_way > 0
    await trio.sleep(300)
    assert held_bytes(server) == server.budget.frames.used_bytes == 0


async def test_idle_connections_do_not_lock_a_new_client_out(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network, max_connections=40)
    client = RemotingClient(nursery, memory_network)
    await client.invoke("b:1", request(ECHO))
    for _ in range(200):
        await raw(memory_network)
        await trio.sleep(0.01)
    assert len(server.connections) <= 40
    await trio.sleep(GRACE_S)
    newcomer = RemotingClient(nursery, memory_network)
    assert (await newcomer.invoke("b:1", request(ECHO))).code == 0
    assert (await client.invoke("b:1", request(ECHO))).code == 0


async def test_a_request_that_access_control_refuses_proves_nothing(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network)
    await asked(await raw(memory_network), GUARDED)
    await asked(await raw(memory_network), ECHO)
    assert sorted(connection.is_proven for connection in server.connections) == [False, True]


async def test_server_with_all_busy_answers_administration(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network, max_connections=10, reserved_connections=2)
    for _ in range(8):
        await asked(await raw(memory_network), BEAT)
    await trio.sleep(10)
    tool, stranger = await raw(memory_network), await raw(memory_network)
    assert (await asked(tool, ADMIN)).code == 0
    refused = await asked(stranger, ECHO)
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert refused.ext["outcome"] == "not_stored"
    assert "server.max_connections" in (refused.remark or "")
    assert await stranger.receive_some(100) == b""
    await trio.testing.wait_all_tasks_blocked()
    assert len(server.connections) == 9


async def test_server_over_budget_refuses_all_but_administration(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network, total=FRAME)
    holding = await raw(memory_network)
    for _ in range(2):
        await holding.send_all(encode_command(request(HOLD, {}, bytes(FRAME // 2))))
    await trio.testing.wait_all_tasks_blocked()
    client = RemotingClient(nursery, memory_network)
    refused = await client.invoke("b:1", request(ECHO, {}, b"x"))
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert refused.ext["outcome"] == "not_stored"
    assert "server.memory_budget_bytes" in (refused.remark or "")
    assert (await client.invoke("b:1", request(ADMIN))).code == 0
    assert server.budget.refused == 1
    await holding.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert (await client.invoke("b:1", request(ECHO))).code == 0
    assert server.budget.used_bytes == 0


async def test_server_over_budget_ends_clients_that_do_not_read(nursery: trio.Nursery) -> None:
    near, far = trio.testing.lockstep_stream_pair()
    budget = MemoryBudget(BudgetLimits(total_bytes=4 * FRAME, max_frame_bytes=FRAME))

    class Stream:
        peer_address, local_address = ("p", 1), ("h", 2)
        send_all, receive_some, aclose = near.send_all, near.receive_some, near.aclose

    limits = ConnectionLimits(max_frame_bytes=FRAME, write_buffer_bytes=1 << 30)
    connection = Connection(Stream(), table(), limits=limits, budget=budget)  # type: ignore[arg-type]  # has what a connection uses
    nursery.start_soon(connection.run)
    frame = encode_command(request(ECHO, {}, bytes(FRAME // 2)))

    async def ask_without_reading() -> None:
        for _ in range(20):
            await far.send_all(frame)
            await trio.sleep(0.5)

    with pytest.raises(trio.BrokenResourceError):
        await ask_without_reading()
    assert connection.close_reason.startswith("its unread answers")
    await trio.testing.wait_all_tasks_blocked()
    assert (budget.given_way, budget.used_bytes) == (1, 0)


async def test_server_reads_one_frame_above_the_limit_of_large_ones(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    await serving(nursery, memory_network)
    client = RemotingClient(nursery, memory_network)
    body = bytes(FRAME - 200)
    assert (await client.invoke("b:1", request(ECHO, {}, body), 5)).body == body


async def test_connection_without_a_place_is_refused_as_not_stored(
    nursery: trio.Nursery, memory_network: Any
) -> None:
    server = await serving(nursery, memory_network, max_connections=1)
    first, second = (RemotingClient(nursery, memory_network) for _ in range(2))
    await first.invoke("b:1", request(ECHO))
    with pytest.raises(ConnectionLostError):
        await second.invoke("b:1", request(ECHO))
    assert server.places.refused == 1
