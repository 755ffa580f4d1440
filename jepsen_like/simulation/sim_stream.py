"""Links, machines, ends of connections and bound ports of a simulated network.

What happens to bytes on their way is decided by the network that carries them: `Carrier`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

import trio
from typing_extensions import Buffer

from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.jepsen_like.simulation.event_trace import Event, Trace
from dledger.jepsen_like.simulation.virtual_time import Gate, Timer

LATENCY_S: Final = 0.0005
"""One way between two healthy hosts."""

JITTER_S: Final = 0.0005
"""And up to this much more, by chance."""

FIFO_GAP_S: Final = 1e-9
"""Bytes of one connection arrive at least so far apart."""

WINDOW_BYTES: Final = 1 << 20
"""Bytes sent and not read at which a sender waits."""

HELD_FRAMES: Final = 32
"""Frames of old connections a link keeps; older ones are lost."""

YIELD_CHANCE: Final = 0.125
"""How often a send gives other tasks their turn, as a full socket would."""


class Carrier(Protocol):
    """Carries what streams send."""

    @property
    def trace(self) -> Trace:
        """Where arrivals are noted."""

    @property
    def random(self) -> Callable[[], float]:
        """Draws from [0, 1)."""

    def send(self, stream: SimStream, data: bytes | None) -> None:
        """Carry bytes, or the end, to the other end of *stream*."""

    def send_reset(self, stream: SimStream) -> None:
        """Notify the other end that nothing is read here any more."""


def _with_latency(fault: LinkFault) -> LinkFault:
    return replace(fault, delay_s=fault.delay_s + LATENCY_S, jitter_s=fault.jitter_s + JITTER_S)


UNHARMED: Final = _with_latency(HEALTHY)
"""What a link without a fault does."""


class Link:
    """One direction between two hosts."""

    __slots__ = ("busy_until_s", "fault", "held", "is_cut", "is_plain", "late", "source", "target")

    def __init__(self, source: Host, target: Host) -> None:
        self.source = source
        self.target = target
        self.fault = _with_latency(HEALTHY)
        self.is_cut = False
        self.is_plain = True
        self.busy_until_s = 0.0
        self.held: deque[tuple[int, bytes]] = deque(maxlen=HELD_FRAMES)
        self.late: deque[tuple[Timer, SimStream, bytes | None, float]] = deque()
        """What it was given while it was slow, and when what came before it arrives."""

    @property
    def is_healthy(self) -> bool:
        """Whether everything passes, in time."""
        return not self.is_cut and self.is_plain and self.fault == UNHARMED

    def set(self, fault: LinkFault) -> None:
        """Behave like *fault* from now on."""
        self.fault = _with_latency(fault)
        self.is_plain = fault.is_plain and not self.held


class Host:
    """A machine: what a node is on the network, over all its incarnations.

    Attributes:
        is_up: It has power.
        gate: The gate of the process that runs on it now.
        streams: The ends its process has open.
        unanswered: Ends of ended processes to which bytes came while it had no power. The other
            machine sends them again until this one answers that it knows no such connection.
    """

    __slots__ = (
        "address",
        "gate",
        "is_up",
        "listeners",
        "name",
        "next_port",
        "number",
        "streams",
        "unanswered",
    )

    def __init__(self, name: str, number: int, address: str) -> None:
        self.name = name
        self.number = number
        self.address = address
        self.is_up = True
        self.gate = Gate()
        self.streams: dict[int, SimStream] = {}
        self.listeners: dict[int, SimListener] = {}
        self.unanswered: dict[int, SimStream] = {}
        self.next_port = 50_000


class SimStream:
    """One end of a connection (`dledger.remoting.seams.Stream`)."""

    __slots__ = (
        "_clock_gate",
        "_inbox",
        "_is_closed",
        "_is_ended",
        "_is_gone",
        "_is_reset",
        "_network",
        "_readers",
        "_rest",
        "_senders",
        "_unread",
        "host",
        "last_at_s",
        "link",
        "local_address",
        "number",
        "of_members",
        "peer",
        "peer_address",
        "queued",
        "sent_frames",
    )

    peer: SimStream

    def __init__(
        self,
        network: Carrier,
        host: Host,
        link: Link,
        number: int,
        local_address: tuple[str, int],
        peer_address: tuple[str, int],
        *,
        of_members: bool,
    ) -> None:
        self.host = host
        self.link = link
        self.number = number
        self.local_address = local_address
        self.peer_address = peer_address
        self.of_members = of_members
        self.queued: list[bytes | None] = []
        self.sent_frames = 0
        self._network = network
        self._clock_gate = host.gate
        self._inbox: deque[bytes | memoryview] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._senders = trio.lowlevel.ParkingLot()
        self._is_closed = False
        self._is_ended = False
        self._is_reset = False
        self._is_gone = False
        self.last_at_s = 0.0
        self._rest = b""
        self._unread = 0
        host.streams[number] = self

    # -- the seam --------------------------------------------------------------------------

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*."""
        if self._is_closed:
            raise trio.ClosedResourceError("this end was closed")
        if self._is_reset:
            raise trio.BrokenResourceError("connection reset by peer")
        if self._is_gone:
            await trio.lowlevel.checkpoint()
            return
        sent = bytes(data)
        if not sent:
            await trio.lowlevel.checkpoint()
            return
        network = self._network
        self._unread += len(sent)
        network.send(self, sent)
        if self._unread > WINDOW_BYTES:
            await self._wait_for_space()
        elif network.random() < YIELD_CHANCE:
            await trio.lowlevel.checkpoint()

    async def _wait_for_space(self) -> None:
        while self._unread > WINDOW_BYTES and not (self._is_closed or self._is_reset):
            await self._senders.park()
        if self._is_closed:
            raise trio.ClosedResourceError("this end was closed")
        if self._is_reset:
            raise trio.BrokenResourceError("connection reset by peer")

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return what has arrived, or nothing at the end of the stream."""
        if self._is_closed:
            raise trio.ClosedResourceError("this end was closed")
        if not (self._inbox or self._is_ended or self._is_reset):
            await self._readers.park()
            if self._is_closed:
                raise trio.ClosedResourceError("this end was closed")
        else:
            await trio.lowlevel.checkpoint()
        inbox = self._inbox
        if not inbox:
            if self._is_reset:
                raise trio.BrokenResourceError("connection reset by peer")
            return b""
        data = inbox.popleft()
        if len(data) > max_bytes:
            whole = memoryview(data)
            data = whole[:max_bytes]
            inbox.appendleft(whole[max_bytes:])
        self.peer.on_its_way(-len(data))
        return data

    async def aclose(self) -> None:
        """Close both directions at once. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.host.streams.pop(self.number, None)
            unread = bool(self._inbox)
            self._inbox.clear()
            self._readers.unpark_all()
            self._senders.unpark_all()
            if not (self._is_gone or self._is_reset):
                if unread:
                    self._network.send_reset(self)
                else:
                    self._network.send(self, None)
        await trio.lowlevel.checkpoint()

    # -- what the network does -------------------------------------------------------------

    def arrived(self, data: bytes | None) -> None:
        """Bytes of the other end are here; None: it has closed."""
        if self._is_gone or self._is_closed:
            # No process: the machine answers for the process, if it has power.
            if data is None:
                return
            if self.host.is_up:
                self._network.send_reset(self)
            else:
                self.host.unanswered[self.number] = self
            return
        gate = self._clock_gate
        if not gate.is_open:
            gate.hold(self.arrived, data)
            return
        if self._is_reset:
            return
        if data is None:
            self._is_ended = True
        else:
            self._network.trace.note(
                Event.FRAME, self.host.number, self.number << 32 | len(data), zlib.crc32(data)
            )
            self._inbox.append(data)
        self._readers.unpark_all()

    def was_reset(self, _: object = None) -> None:
        """The connection is broken."""
        gate = self._clock_gate
        if not gate.is_open:
            gate.hold(self.was_reset, None)
            return
        if self._is_reset or self._is_closed or self._is_gone:
            return
        self._is_reset = True
        self._network.trace.note(Event.RESET, self.host.number, self.number)
        self.host.streams.pop(self.number, None)
        self._inbox.clear()
        self._readers.unpark_all()
        self._senders.unpark_all()

    def abandon(self) -> None:
        """The process has ended: nothing that its tasks still do leaves the host."""
        self._is_gone = True

    def on_its_way(self, more: int) -> None:
        """This number of bytes more, or fewer, were sent here and have not been read there."""
        self._unread += more
        if self._senders and self._unread <= WINDOW_BYTES:
            self._senders.unpark_all()

    def arrival_s(self, now_s: float, size: int, chance: float) -> float:
        """When *size* bytes sent now are at the other end; later than all before them."""
        link = self.link
        fault = link.fault
        if fault.bytes_per_s:
            link.busy_until_s = max(link.busy_until_s, now_s) + size / fault.bytes_per_s
            now_s = link.busy_until_s
        at_s = now_s + fault.delay_s + chance * fault.jitter_s
        if at_s <= self.last_at_s:
            at_s = self.last_at_s + FIFO_GAP_S
        self.last_at_s = at_s
        return at_s

    def whole_frames(self, data: bytes) -> list[bytes]:
        """Return the frames that *data* completes; the rest waits for more."""
        data = self._rest + data if self._rest else data
        frames: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= 4:
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            if at + size > end:
                break
            frames.append(data[at : at + size])
            at += size
        self._rest = data[at:]
        return frames

    @property
    def has_rest(self) -> bool:
        """Whether the begin of a frame waits for its end."""
        return bool(self._rest)


class SimListener:
    """A bound port (`dledger.remoting.seams.Listener`)."""

    __slots__ = ("_acceptors", "_gate", "_host", "_is_closed", "_streams", "address")

    def __init__(self, host: Host, address: tuple[str, int]) -> None:
        self.address = address
        self._host = host
        self._gate = host.gate
        self._streams: deque[SimStream] = deque()
        self._acceptors = trio.lowlevel.ParkingLot()
        self._is_closed = False

    async def accept(self) -> SimStream:
        """Return the next connection."""
        if not self._streams and not self._is_closed:
            await self._acceptors.park()
        else:
            await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise trio.ClosedResourceError("the listener was closed")
        return self._streams.popleft()

    def offer(self, stream: SimStream) -> None:
        """A connection has come in."""
        if not self._gate.is_open:
            self._gate.hold(self.offer, stream)
            return
        self._streams.append(stream)
        self._acceptors.unpark_all()

    async def aclose(self) -> None:
        """Stop listening. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._host.listeners.get(self.address[1]) is self:
                del self._host.listeners[self.address[1]]
            self._acceptors.unpark_all()
        await trio.lowlevel.checkpoint()
