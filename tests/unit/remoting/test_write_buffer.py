"""Frames leave in order, whatever a socket takes at once."""

import random
import weakref
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from typing_extensions import Buffer

from dledger.remoting.write_buffer import BURST_S, SEND_BYTES, WriteBuffer


@dataclass
class Socket:
    """A stream that takes as much at once as *takes* has, and everything when it may wait."""

    takes: list[int] = field(default_factory=list)
    got: bytearray = field(default_factory=bytearray)
    waited: int = 0
    error: OSError | None = None
    peer_address: tuple[str, int] = ("127.0.0.1", 1)
    local_address: tuple[str, int] = ("127.0.0.1", 2)

    def send_some_nowait(self, data: Buffer) -> int:
        if self.error is not None:
            raise self.error
        size = min(self.takes.pop(0) if self.takes else 1 << 30, memoryview(data).nbytes)
        self.got += memoryview(data)[:size]
        return size

    async def send_all(self, data: Buffer) -> None:
        self.waited += 1
        await trio.lowlevel.checkpoint()
        self.got += memoryview(data)

    async def receive_some(self, max_bytes: int) -> Buffer:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


def buffer_over(socket: Socket, reasons: list[str] | None = None) -> WriteBuffer:
    noted = [] if reasons is None else reasons
    return WriteBuffer(socket, 30.0, sent=lambda: None, broken=noted.append)


async def running(nursery: trio.Nursery, socket: Socket) -> WriteBuffer:
    out = buffer_over(socket)
    nursery.start_soon(out.run)
    await trio.testing.wait_all_tasks_blocked()
    return out


async def test_write_buffer_sends_in_the_turn_of_the_put(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    out.put(b"head", b"body")
    assert (bytes(socket.got), out.unsent_bytes, out.handed_total) == (b"headbody", 0, 8)
    assert socket.waited == 0


async def test_write_buffer_that_waits_holds_no_part(nursery: trio.Nursery) -> None:
    class Body(bytearray): ...

    out = await running(nursery, Socket(takes=[0]))
    body = Body(b"x" * SEND_BYTES)
    held = weakref.ref(body)
    out.put(b"head", body)
    del body
    await trio.testing.wait_all_tasks_blocked()
    assert (out.unsent_bytes, held()) == (0, None)


async def test_write_buffer_joins_what_follows_in_a_burst(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    for number in range(10):
        out.put(b"%d" % number, b"")
    assert bytes(socket.got) == b"0"
    await trio.testing.wait_all_tasks_blocked()
    assert (bytes(socket.got), socket.waited) == (b"0123456789", 1)
    await trio.sleep(2 * BURST_S)
    out.put(b"next", b"")
    assert bytes(socket.got[-4:]) == b"next"


async def test_write_buffer_holds_until_it_is_released(nursery: trio.Nursery) -> None:
    socket = Socket()
    out = await running(nursery, socket)
    out.is_held = True
    out.put(b"one", b"")
    out.put(b"two", b"")
    assert not socket.got
    out.release()
    assert (bytes(socket.got), socket.waited) == (b"onetwo", 0)


async def test_write_buffer_reports_a_broken_socket(nursery: trio.Nursery) -> None:
    reasons: list[str] = []
    socket = Socket(error=BrokenPipeError(32, "broken pipe"))
    out = buffer_over(socket, reasons)
    nursery.start_soon(out.run)
    await trio.testing.wait_all_tasks_blocked()
    out.put(b"head", b"body")
    assert reasons == ["broken: [Errno 32] broken pipe"]
    assert out.handed_total == 8, "it may have left: the outcome of a request in it is unknown"


async def test_write_buffer_of_a_full_socket_hands_nothing_over(nursery: trio.Nursery) -> None:
    socket = Socket(takes=[0])
    out = await running(nursery, socket)
    out.put(b"head", b"body")
    assert (out.handed_total, out.unsent_bytes) == (0, 8)
    await trio.testing.wait_all_tasks_blocked()
    assert (bytes(socket.got), out.handed_total, out.unsent_bytes) == (b"headbody", 8, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_write_buffer_keeps_order_through_partial_sends(
    nursery: trio.Nursery, seed: int
) -> None:
    rng = random.Random(seed)
    socket = Socket(takes=[rng.choice([0, 1, 7, 300, SEND_BYTES]) for _ in range(200)])
    out = buffer_over(socket)
    nursery.start_soon(out.run)
    expected = bytearray()
    for _ in range(300):
        head = rng.randbytes(rng.randrange(1, 40))
        body = rng.randbytes(rng.choice([0, 0, 10, 1000, 70_000, SEND_BYTES + 3]))
        expected += head + body
        out.is_held = rng.random() < 0.3
        out.put(head, memoryview(body) if rng.random() < 0.5 else body)
        out.release()
        assert out.handed_total >= len(socket.got)
        assert out.unsent_bytes == out.queued_total - len(socket.got)
        if rng.random() < 0.5:
            await trio.sleep(rng.choice([0, BURST_S / 2, 2 * BURST_S]))
    await trio.testing.wait_all_tasks_blocked()
    assert socket.got == expected
    assert (out.unsent_bytes, out.handed_total) == (0, len(expected))
