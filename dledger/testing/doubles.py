"""Seams for tests: clocks, an executor without threads, networks.

A clock is on trio's time or moved by hand; a network is inside the process, without sockets, or the
machine's with partitions.

Connections of several nodes that a test cuts: `PartedNetwork` over this one. Nodes that may not
talk find no way, and lose what they had.
"""

from __future__ import annotations

import errno
import os
import ssl
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio
import trio.testing
from typing_extensions import Buffer

from dledger.remoting.addresses import join_address
from dledger.remoting.seams import Listener, Network, ServerTls, Stream

# ---------------------------------------------------------------------------------- clocks


EPOCH_MS: Final = 1_700_000_000_000
"""Date of both clocks at their second 0."""


@dataclass
class VirtualClock:
    """A `dledger.remoting.seams.Clock` on trio's time, its date included.

    Under `trio.testing.MockClock` a test moves durations and date together.

    Attributes:
        skew_ms: How far the date is ahead; a test may change it at any time.
        epoch_ms: Date at second 0 of trio's time.
    """

    skew_ms: int = 0
    epoch_ms: int = EPOCH_MS

    @classmethod
    def from_today(cls) -> VirtualClock:
        """Return a clock that begins at the machine's date."""
        return cls(epoch_ms=round((time.time() - trio.current_time()) * 1000))

    def monotonic(self) -> float:
        """Return seconds of trio's time."""
        return trio.current_time()

    def wall_ms(self) -> int:
        """Return the date in milliseconds."""
        return self.epoch_ms + self.skew_ms + int(trio.current_time() * 1000)

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds*."""
        await trio.sleep(seconds)

    def time_out(self, seconds: float) -> trio.CancelScope:
        """Cancel the block after *seconds*."""
        return trio.move_on_after(seconds)


@dataclass
class ManualClock:
    """A `dledger.remoting.seams.Clock` that stands still until a test, or a wait, moves it.

    For code without an event loop, and for tests in which a wait takes no time at all.

    Attributes:
        now_s: Seconds of its time; a test may change it at any time.
        skew_ms: How far the date is ahead of them.
    """

    now_s: float = 0.0
    skew_ms: int = 0

    def monotonic(self) -> float:
        """Return seconds of this clock."""
        return self.now_s

    def wall_ms(self) -> int:
        """Return the date in milliseconds."""
        return EPOCH_MS + self.skew_ms + int(self.now_s * 1000)

    async def sleep(self, seconds: float) -> None:
        """Let *seconds* pass at once."""
        await trio.lowlevel.checkpoint()
        self.now_s += seconds

    @contextmanager
    def time_out(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Cancel the block at its first checkpoint that waits, *seconds* later."""
        with trio.move_on_after(0) as scope:
            yield scope
        if scope.cancelled_caught:
            self.now_s += seconds


# ---------------------------------------------------------------------------------- an executor


T = TypeVar("T")


class InlineExecutor:
    """A `dledger.remoting.seams.Executor` that runs everything on the event loop.

    It is one that has not measured yet: `runs_inline` is false, so that callers go the way of a
    disk worth waiting for.

    Attributes:
        runs: How often work of each kind was run.
    """

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    def runs_inline(self, kind: str) -> bool:
        """Tell that it does not."""
        return False

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now."""
        self.runs[kind] += 1
        return work()

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* after a checkpoint; errors pass through."""
        await trio.lowlevel.checkpoint()
        return self.run_inline(work, kind=kind)


# ---------------------------------------------------------------------------------- in memory


Address = tuple[str, int]

BACKLOG_CONNECTIONS: Final = 1024
"""Connections that wait to be accepted; `connect` waits behind them. As `dledger.remoting.tcp`."""

FIRST_PORT: Final = 50_000
"""Ports of the connecting side, and of listeners that do not care, are counted from here."""

ANY_HOSTS: Final = ("0.0.0.0", "", "::")
"""A listener at one of these is reached by every name."""


class MemoryStream:
    """One end of a connection in memory (`dledger.remoting.seams.Stream`).

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
    """A bound port in memory (`dledger.remoting.seams.Listener`)."""

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
            raise OSError(errno.EADDRINUSE, f"cannot listen on {join_address(host, port)}: in use")
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
        address, where = (host, port), join_address(host, port)
        self.connects[address] += 1
        if address in self.silent:
            await trio.sleep(timeout_s)
            raise TimeoutError(f"no connection to {where} within {timeout_s} s")
        listener = self._listener_at(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{where} refused")
        near, far = trio.testing.memory_stream_pair()
        here = (self._host, self._free_port())
        theirs = MemoryStream(far, here, address, latency_s=self._latency_s)
        try:
            await listener.arriving.send(theirs)
        except trio.BrokenResourceError as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{where} refused") from error
        return MemoryStream(near, address, here, latency_s=self._latency_s)

    def _listener_at(self, address: Address) -> MemoryListener | None:
        host, port = address
        for known in (host, *ANY_HOSTS):
            if (listener := self.listeners.get((known, port))) is not None:
                return listener
        return None


# ---------------------------------------------------------------------------------- with partitions


@dataclass(slots=True, eq=False)
class Partition:
    """The side of each node, and every connection that may have to end."""

    owners: dict[Address, str] = field(default_factory=dict)
    """Whose listener an address is."""
    _side_of: dict[str, int] = field(default_factory=dict)
    _streams: weakref.WeakSet[PartedStream] = field(default_factory=weakref.WeakSet)

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether two nodes are on different sides; a node on none talks to all."""
        sides = self._side_of
        return one in sides and other in sides and sides[one] != sides[other]

    def hold(self, stream: PartedStream) -> None:
        """Take note of a connection."""
        self._streams.add(stream)

    async def part(self, sides: Sequence[Iterable[str]]) -> None:
        """Cut every connection between two of *sides*; replaces an earlier partition."""
        self._side_of = {name: place for place, names in enumerate(sides) for name in names}
        for stream in list(self._streams):
            if self.is_cut(stream.one, stream.other):
                await stream.break_off()

    def heal(self) -> None:
        """Let everybody talk to everybody."""
        self._side_of = {}


@dataclass(slots=True, eq=False, weakref_slot=True)
class PartedStream:
    """A connection between two nodes that a partition breaks."""

    one: str
    other: str
    _stream: Stream
    _broken: bool = False

    @property
    def peer_address(self) -> Address:
        """Host and port of the other end."""
        return self._stream.peer_address

    @property
    def local_address(self) -> Address:
        """Host and port of this end."""
        return self._stream.local_address

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        try:
            await self._stream.send_all(data)
        except trio.ClosedResourceError as error:
            raise self._as_seen_from_here(error) from error

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or nothing at the end of the stream."""
        try:
            return await self._stream.receive_some(max_bytes)
        except trio.ClosedResourceError as error:
            raise self._as_seen_from_here(error) from error

    async def aclose(self) -> None:
        """Close both directions at once."""
        await self._stream.aclose()

    async def break_off(self) -> None:
        """End the connection from outside, as the network would."""
        self._broken = True
        await self._stream.aclose()

    def _as_seen_from_here(self, error: trio.ClosedResourceError) -> Exception:
        return trio.BrokenResourceError("cut by a partition") if self._broken else error


@dataclass(frozen=True, slots=True)
class PartedNetwork:
    """The network as one node sees it."""

    name: str
    partition: Partition
    network: Network

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> Listener:
        """Bind and listen; the address is this node's from now on."""
        listener = await self.network.listen(host, port, tls=tls)
        self.partition.owners.setdefault(listener.address, self.name)
        return listener

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> Stream:
        """Connect, unless a partition stands between.

        Raises:
            OSError: Refused, unreachable or timed out; nothing was sent.
        """
        owner_of = self.partition.owners.get
        self._check_way_to(owner_of((host, port), ""))
        stream = await self.network.connect(host, port, timeout_s=timeout_s, tls=tls)
        # Only now is the owner certain, and a partition may have begun meanwhile.
        owner = owner_of((host, port), "")
        try:
            self._check_way_to(owner)
        except OSError:
            with trio.CancelScope(shield=True):
                await stream.aclose()
            raise
        parted = PartedStream(self.name, owner, stream)
        self.partition.hold(parted)
        return parted

    def _check_way_to(self, owner: str) -> None:
        if self.partition.is_cut(self.name, owner):
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
