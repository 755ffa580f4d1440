"""The machine's network with partitions: nodes that may not talk find no way, and lose what they
had."""

from __future__ import annotations

import errno
import os
import ssl
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio
from typing_extensions import Buffer

from remoting.seams import Listener, Network, ServerTls, Stream

Address = tuple[str, int]


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
