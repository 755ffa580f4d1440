"""Connections over memory streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from typing_extensions import Buffer

from remoting.connection import DEFAULT_LIMITS, Connection, ConnectionLimits
from remoting.processor import ProcessorTable
from remoting.seams import Stream

AnyStream = trio.abc.HalfCloseableStream


class MemoryStream:
    """A memory stream with addresses, counting its sends."""

    def __init__(self, inner: AnyStream, peer: str = "peer") -> None:
        self.inner = inner
        self.peer_address = (peer, 1)
        self.local_address = ("here", 2)
        self.sends: list[bytes] = []

    async def send_all(self, data: Buffer) -> None:
        self.sends.append(bytes(data))
        await self.inner.send_all(bytes(data))

    async def receive_some(self, max_bytes: int) -> Buffer:
        return await self.inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.inner.aclose()


@dataclass
class Wire:
    """One served connection and the raw other end of its stream."""

    connection: Connection
    near: MemoryStream
    far: MemoryStream
    ended: trio.Event = field(default_factory=trio.Event)


@pytest.fixture
def wire(
    nursery: trio.Nursery,
) -> Callable[..., Wire]:
    """Serve a connection; the test talks to it in raw bytes."""

    def make(
        processors: ProcessorTable | None = None,
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        lockstep: bool = False,
        after_batch: Callable[[], None] | None = None,
    ) -> Wire:
        pair = (
            trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
        )
        near, far = MemoryStream(pair[0]), MemoryStream(pair[1])
        connection = Connection(
            near, processors or ProcessorTable(), limits=limits, after_batch=after_batch
        )
        made = Wire(connection, near, far)

        async def serve() -> None:
            await connection.run()
            made.ended.set()

        nursery.start_soon(serve)
        return made

    return make


@pytest.fixture
def linked(nursery: trio.Nursery) -> Callable[..., tuple[Connection, Connection]]:
    """Serve both ends of one stream."""

    def make(
        left: ProcessorTable | None = None,
        right: ProcessorTable | None = None,
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> tuple[Connection, Connection]:
        pair = trio.testing.memory_stream_pair()
        ends = [
            Connection(MemoryStream(stream), table or ProcessorTable(), limits=limits)
            for stream, table in zip(pair, (left, right), strict=True)
        ]
        for end in ends:
            nursery.start_soon(end.run)
        return ends[0], ends[1]

    return make


class MemoryNetwork:
    """Listeners and connections inside one process; addresses can refuse."""

    def __init__(self) -> None:
        self._doors: dict[tuple[str, int], trio.MemorySendChannel[Stream]] = {}
        self.attempts = 0

    async def listen(self, host: str, port: int, *, tls: object = None) -> MemoryListener:
        send, receive = trio.open_memory_channel[Stream](100)
        self._doors[(host, port)] = send
        return MemoryListener((host, port), receive)

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: object = None
    ) -> MemoryStream:
        self.attempts += 1
        await trio.lowlevel.checkpoint()
        door = self._doors.get((host, port))
        if door is None:
            raise ConnectionRefusedError(f"{host}:{port} refuses")
        near, far = trio.testing.memory_stream_pair()
        try:
            door.send_nowait(MemoryStream(far))
        except trio.BrokenResourceError as error:
            raise ConnectionRefusedError(f"{host}:{port} refuses") from error
        return MemoryStream(near)


class MemoryListener:
    """The accepting end of a MemoryNetwork address."""

    def __init__(self, address: tuple[str, int], accepted: trio.MemoryReceiveChannel[Stream]):
        self.address = address
        self._accepted = accepted

    async def accept(self) -> Stream:
        return await self._accepted.receive()

    async def aclose(self) -> None:
        await self._accepted.aclose()


@pytest.fixture
def memory_network() -> MemoryNetwork:
    return MemoryNetwork()
