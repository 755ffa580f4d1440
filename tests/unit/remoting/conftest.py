"""Connections over memory streams."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from typing_extensions import Buffer

from dledger.remoting.connection import Connection
from dledger.remoting.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from dledger.remoting.processor_table import ProcessorTable
from dledger.testing.doubles import MemoryNetwork, MemoryStream


class RecordedStream(MemoryStream):
    """A memory stream that keeps what was sent."""

    def __init__(self, inner: trio.abc.HalfCloseableStream) -> None:
        super().__init__(inner)
        self.sends: list[bytes] = []

    async def send_all(self, data: Buffer) -> None:
        self.sends.append(bytes(data))
        await super().send_all(data)


@dataclass
class Wire:
    """One served connection and the raw other end of its stream."""

    connection: Connection
    near: RecordedStream
    far: RecordedStream
    ended: trio.Event = field(default_factory=trio.Event)


@pytest.fixture
def wire(nursery: trio.Nursery) -> Callable[..., Wire]:
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
        near, far = RecordedStream(pair[0]), RecordedStream(pair[1])
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


@pytest.fixture
def memory_network() -> MemoryNetwork:
    return MemoryNetwork()
