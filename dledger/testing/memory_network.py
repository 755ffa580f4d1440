"""A network inside the process: real listeners and streams, no sockets, on trio's time.

Connections of several nodes that a test cuts: `dledger.testing.parted_network` over this one.
"""

from __future__ import annotations

import errno
import ssl
from collections import Counter
from contextlib import suppress
from typing import Final

import trio
import trio.testing
from typing_extensions import Buffer

from remoting.seams import ServerTls

Address = tuple[str, int]

BACKLOG_CONNECTIONS: Final = 1024
"""Connections that wait to be accepted; `connect` waits behind them. As `remoting.tcp`."""

FIRST_PORT: Final = 50_000
"""Ports of the connecting side, and of listeners that do not care, are counted from here."""

ANY_HOSTS: Final = ("0.0.0.0", "", "::")
"""A listener at one of these is reached by every name."""


class MemoryStream:
    """One end of a connection in memory (`remoting.seams.Stream`).

    What is sent and not read is kept without a limit: a sender never waits for its reader.
    """

    def __init__(
        self,
        inner: trio.abc.HalfCloseableStream,
        peer_address: Address = ("127.0.0.1", 0),
        local_address: Address = ("127.0.0.1", 0),
        *,
        latency_s: float = 0.0,
    ) -> None:
        self.inner = inner
        self.peer_address = peer_address
        self.local_address = local_address
        self._latency_s = latency_s

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        if self._latency_s:
            await trio.sleep(self._latency_s)
        await self.inner.send_all(bytes(data))

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        return await self.inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close both directions at once."""
        await self.inner.aclose()


class MemoryListener:
    """A bound port in memory (`remoting.seams.Listener`)."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.address = address
        self._network = network
        self.arriving, self._arrived = trio.open_memory_channel[MemoryStream](BACKLOG_CONNECTIONS)

    async def accept(self) -> MemoryStream:
        """Return the next connection."""
        return await self._arrived.receive()

    async def aclose(self) -> None:
        """Stop listening; connections that were not accepted end."""
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
        with trio.CancelScope(shield=True), suppress(trio.WouldBlock, trio.ClosedResourceError):
            while True:
                await self._arrived.receive_nowait().aclose()
        self._arrived.close()
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """A `remoting.seams.Network` of one process; refused where nothing listens. TLS is ignored.

    Attributes:
        listeners: What listens, by its address.
        silent: Addresses that never answer: connecting to them times out.
        connects: How often each address was tried.
    """

    def __init__(self, *, host: str = "127.0.0.1", latency_s: float = 0.0) -> None:
        """Have no listener yet.

        Args:
            host: What connecting sides are called.
            latency_s: What a connection and every send take, so that virtual time passes.
        """
        self.listeners: dict[Address, MemoryListener] = {}
        self.silent: set[Address] = set()
        self.connects: Counter[Address] = Counter()
        self._host = host
        self._latency_s = latency_s
        self._next_port = FIRST_PORT

    def _free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> MemoryListener:
        """Bind and listen.

        Raises:
            OSError: The address is taken.
        """
        await trio.lowlevel.checkpoint()
        address = (host, port or self._free_port())
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {host}:{port}: in use")
        listener = self.listeners[address] = MemoryListener(self, address)
        return listener

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> MemoryStream:
        """Connect.

        Raises:
            OSError: Nothing listens, or the address is silent; nothing was sent.
        """
        await trio.sleep(self._latency_s)
        # What the machine's network does with a name: some are none, and end as no OSError.
        host.encode("idna")
        port.to_bytes(8, "big", signed=True)
        address = (host, port)
        self.connects[address] += 1
        if address in self.silent:
            await trio.sleep(timeout_s)
            raise TimeoutError(f"no connection to {host}:{port} within {timeout_s} s")
        listener = self._listener_at(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{host}:{port} refused")
        near, far = trio.testing.memory_stream_pair()
        here = (self._host, self._free_port())
        theirs = MemoryStream(far, here, address, latency_s=self._latency_s)
        try:
            await listener.arriving.send(theirs)
        except trio.BrokenResourceError as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{host}:{port} refused") from error
        return MemoryStream(near, address, here, latency_s=self._latency_s)

    def _listener_at(self, address: Address) -> MemoryListener | None:
        host, port = address
        for known in (host, *ANY_HOSTS):
            if (listener := self.listeners.get((known, port))) is not None:
                return listener
        return None
