"""What `remoting.seams.Network` demands of every implementation, as a check."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from dledger.testing.contract import require, require_error, unwrapped
from remoting.seams import Listener, Network, Stream, send_at_once

LIMIT_S: Final = 10.0
"""Nothing here takes so long; what does hangs."""

CHUNK_BYTES: Final = 64 * 1024
LARGE_BYTES: Final = 3 * 1024 * 1024
"""More than sockets and windows hold: its sender waits for its reader."""


@dataclass(slots=True)
class _Ends:
    """Both networks, and where the serving one listens."""

    client: Network
    listener: Listener

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Stream, Stream]]:
        """Give both ends of a new connection, the caller's first; closed when the block ends."""
        host, port = self.listener.address
        ours = await self.client.connect(host, port, timeout_s=LIMIT_S)
        theirs = await self.listener.accept()
        try:
            yield ours, theirs
        finally:
            with trio.CancelScope(shield=True):
                await ours.aclose()
                await theirs.aclose()


@unwrapped
async def check_network(
    client: Network, server: Network | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> None:
    """Check that a network keeps the contract of the seam, without TLS.

    Args:
        client: The network as the connecting side has it.
        server: The same as the serving side has it; None: both have *client*.
        host: An address of the serving side.
        port: A free port there; 0: the implementation finds one.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    server = client if server is None else server
    with trio.move_on_after(10 * LIMIT_S) as scope:
        listener = await server.listen(host, port)
        require(listener.address[1] > 0, "a listener knows the port that is bound")
        require(not port or listener.address[1] == port, "a listener binds the port it was given")
        ends = _Ends(client, listener)
        with require_error(OSError, "listen at an address that is taken"):
            await server.listen(*listener.address)
        await _check_addresses(ends)
        await _check_bytes(ends)
        await _check_both_ways(ends)
        await _check_send_at_once(ends)
        await _check_cancelled_receive(ends)
        await _check_close(ends)
        await _check_peer_closed(ends)
        await _check_listener_closed(ends, server)
    require(not scope.cancelled_caught, "the network hangs: a call that should end does not")


async def _check_addresses(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        require(ours.peer_address == ends.listener.address, "the caller knows whom it called")
        require(theirs.local_address == ends.listener.address, "so does the end it accepted")
        require(theirs.peer_address == ours.local_address, "both sides see the caller's address")
        async with ends.connected() as (second, _):
            require(second.local_address != ours.local_address, "each connection has its own port")


async def _check_bytes(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            await sender.send_all(b"one")
            await sender.send_all(memoryview(b"-two-")[1:4])
            await sender.send_all(bytearray(b"three"))
            first = bytes(await receiver.receive_some(2))
            require(
                0 < len(first) <= 2, "receive_some gives a byte at least, and its limit at most"
            )
            received = first + await _received(receiver, 11 - len(first))
            require(received == b"onetwothree", "bytes arrive once each and in order")


async def _received(stream: Stream, count: int) -> bytes:
    """Return the next *count* bytes, fewer at the end of the stream."""
    received = bytearray()
    while len(received) < count:
        data = await stream.receive_some(min(CHUNK_BYTES, count - len(received)))
        if not data:
            break
        received += data
    return bytes(received)


async def _check_both_ways(ends: _Ends) -> None:
    """One task may send while another receives, however much it is."""
    sent = bytes(range(256)) * (LARGE_BYTES // 256)

    async def carry(sender: Stream, receiver: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, sent)
            received = await _received(receiver, len(sent))
        require(received == sent, "large data arrives whole in both directions at once")

    async with ends.connected() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(carry, ours, theirs)
        nursery.start_soon(carry, theirs, ours)


async def _check_send_at_once(ends: _Ends) -> None:
    """A stream that sends without waiting takes the beginning, and nothing when it is full."""
    async with ends.connected() as (ours, theirs):
        at_once = send_at_once(ours)
        if at_once is None:
            return
        sent = bytes(range(251)) * (LARGE_BYTES // 251)
        taken = 0
        while step := at_once(memoryview(sent)[taken : taken + CHUNK_BYTES]):
            taken += step
            require(step <= CHUNK_BYTES and taken < len(sent), "a full stream takes nothing")
        rest = sent[taken : taken + CHUNK_BYTES]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, rest)
            received = await _received(theirs, taken + len(rest))
        require(received == sent[: taken + len(rest)], "both ways to send keep the order")
        await ours.aclose()
        with require_error(OSError, "send at once on a closed stream"):
            at_once(b"x")


async def _check_cancelled_receive(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        with trio.move_on_after(0.01):
            await theirs.receive_some(CHUNK_BYTES)
        await ours.send_all(b"after")
        require(await _received(theirs, 5) == b"after", "a cancelled receive loses no bytes")


async def _check_close(ends: _Ends) -> None:
    async with ends.connected() as (ours, _):
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with require_error(trio.ClosedResourceError, "receive while its stream is closed"):
                    await ours.receive_some(1)

            nursery.start_soon(receive)
            await trio.sleep(0.01)
            await ours.aclose()
        await ours.aclose()
        with require_error(trio.ClosedResourceError, "send on a closed stream"):
            await ours.send_all(b"x")
        with require_error(trio.ClosedResourceError, "receive on a closed stream"):
            await ours.receive_some(1)


async def _check_peer_closed(ends: _Ends) -> None:
    async with ends.connected() as (ours, theirs):
        await ours.send_all(b"last")
        await ours.aclose()
        require(await _received(theirs, 5) == b"last", "what was sent before a close arrives")
        require(not await theirs.receive_some(1), "then the stream ends, with an empty buffer")
        with require_error(trio.BrokenResourceError, "send to a peer that has closed"):
            while True:
                await theirs.send_all(bytes(CHUNK_BYTES))
                await trio.sleep(0.01)


async def _check_listener_closed(ends: _Ends, server: Network) -> None:
    listener = ends.listener
    async with ends.connected() as (ours, theirs):
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                with require_error(trio.ClosedResourceError, "accept while its listener is closed"):
                    await listener.accept()

            nursery.start_soon(accept)
            await trio.sleep(0.01)
            await listener.aclose()
        await listener.aclose()
        with require_error(trio.ClosedResourceError, "accept on a closed listener"):
            await listener.accept()
        await ours.send_all(b"still")
        require(await _received(theirs, 5) == b"still", "connections outlive their listener")
    with require_error(OSError, "connect where nothing listens"):
        await ends.client.connect(*listener.address, timeout_s=LIMIT_S)
    again = await server.listen(*listener.address)
    await again.aclose()
