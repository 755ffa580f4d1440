"""Many requests of one moment are spread over turns of the event loop."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from remoting.connection import Connection
from remoting.processor import Limiter
from remoting.processor_table import ProcessorTable
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.frame import FrameDecoder, encode_command
from remoting.server import RemotingServer
from remoting.turn import TURN_S, TURNS_MAX, Turn

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

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await turn.wait_for_next()
        nursery.cancel_scope.cancel()
    assert TURNS_MAX - 2 <= turns <= TURNS_MAX + 2


async def test_wait_for_next_is_not_cancelled() -> None:
    turn = Turn(lambda: 1.0)
    turn.ends_s = 0.0
    with trio.CancelScope() as scope:
        scope.cancel()
        await turn.wait_for_next()
    assert not scope.cancelled_caught
