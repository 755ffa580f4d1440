"""A network inside the process: connections that can be cut, on trio's (virtual) time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import TypeVar

import trio
import trio.testing
from typing_extensions import Buffer

from remoting.seams import ServerTls

T = TypeVar("T")

LATENCY_S = 0.0005
"""One way, so that virtual time passes and tasks interleave."""


class MemoryStream:
    """One end of a connection in memory."""

    def __init__(
        self, send: trio.testing.MemorySendStream, receive: trio.testing.MemoryReceiveStream
    ) -> None:
        self._send = send
        self._receive = receive
        self.peer_address = ("127.0.0.1", 0)
        self.local_address = ("127.0.0.1", 0)

    async def send_all(self, data: Buffer) -> None:
        await trio.sleep(LATENCY_S)
        await self._send.send_all(bytes(data))

    async def receive_some(self, max_bytes: int) -> Buffer:
        return await self._receive.receive_some(max_bytes)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close both directions without a checkpoint."""
        self._send.close()
        self._receive.close()


@dataclass
class _Host:
    """The listeners and connections of one node."""

    streams: list[tuple[str, MemoryStream]] = field(default_factory=list)


class MemoryListener:
    """A bound port in memory."""

    def __init__(self, network: MemoryNetwork, address: tuple[str, int]) -> None:
        self.address = address
        self._network = network
        self.send, self._receive = trio.open_memory_channel[MemoryStream](1000)

    async def accept(self) -> MemoryStream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self._network.listeners.pop(self.address, None)
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """All ports and connections. `view(name)` is the Network that node *name* is given."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], MemoryListener] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.cut: set[frozenset[str]] = set()
        self._open: list[tuple[frozenset[str], MemoryStream]] = []

    def view(self, name: str) -> NodeNetwork:
        """Return the network as node *name* sees it."""
        return NodeNetwork(self, name)

    def isolate(self, name: str, others: list[str]) -> None:
        """Cut *name* off from *others*; open connections break."""
        self.cut |= {frozenset((name, other)) for other in others}
        kept = []
        for pair, stream in self._open:
            if pair in self.cut:
                stream.close()
            else:
                kept.append((pair, stream))
        self._open = kept

    def heal(self) -> None:
        """Let everybody connect again."""
        self.cut.clear()

    def connect(self, name: str, address: tuple[str, int]) -> MemoryStream:
        """Open a connection; OSError when nobody listens or the link is cut."""
        listener = self.listeners.get(address)
        pair = frozenset((name, self.owners.get(address, "")))
        if listener is None or pair in self.cut:
            raise ConnectionRefusedError(f"{address} cannot be reached")
        to_them, from_us = trio.testing.memory_stream_one_way_pair()
        to_us, from_them = trio.testing.memory_stream_one_way_pair()
        mine, theirs = MemoryStream(to_them, from_them), MemoryStream(to_us, from_us)
        self._open += [(pair, mine), (pair, theirs)]
        listener.send.send_nowait(theirs)
        return mine


class NodeNetwork:
    """The Network seam of one node."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self._name = name

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> MemoryListener:
        await trio.lowlevel.checkpoint()
        address = (host, port)
        listener = self._network.listeners[address] = MemoryListener(self._network, address)
        self._network.owners[address] = self._name
        return listener

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: SSLContext | None = None
    ) -> MemoryStream:
        await trio.sleep(LATENCY_S)
        # What the real edge does with a name: some are none, and do not end as an OSError.
        host.encode("idna")
        port.to_bytes(8, "big", signed=True)
        return self._network.connect(self._name, (host, port))


class InlineExecutor:
    """Runs everything on the loop, one turn later."""

    def runs_inline(self, kind: str) -> bool:
        return False

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        return work()

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        await trio.lowlevel.checkpoint()
        return work()
