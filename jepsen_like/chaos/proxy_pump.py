"""The two directions of a proxied connection, pumped between their sockets.

A `Link` is the direction between two processes, on which those of all their connections lie.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Final

import trio

from dledger.jepsen_like.nemesis.ground import HEALTHY, LinkFault
from dledger.remoting.seams import Rng

RECEIVE_BYTES: Final = 256 << 10
"""How much is read from a socket at once."""

WINDOW_BYTES: Final = 1 << 20
"""Bytes waiting in one direction at which nothing more is read, so that the sender waits too.

One piece is always taken whole: a frame at its cap may stand above it.
"""

SLICE_S: Final = 0.05
"""Seconds of traffic that a slow link gets at once, so that its bytes trickle."""

SLICE_BYTES_MIN: Final = 512
"""But not less than this."""

_RST: Final = struct.pack("ii", 1, 0)


class Link:
    """What happens from *source* to *target*.

    Attributes:
        busy_until_s: When the bytes a limited link has taken are through.
    """

    __slots__ = ("busy_until_s", "fault", "is_cut", "source", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.fault = HEALTHY
        self.is_cut = False
        self.busy_until_s = 0.0

    @property
    def is_quick(self) -> bool:
        """Whether what comes may go on at once: it is whole, and nothing slows it."""
        fault = self.fault
        return not (self.is_cut or fault.delay_s or fault.jitter_s or fault.bytes_per_s)

    def set(self, fault: LinkFault) -> None:
        """Behave like *fault* from now on."""
        self.fault = fault
        if not fault.bytes_per_s:
            self.busy_until_s = 0.0

    def longest_wait_s(self) -> float:
        """Return how long what is under way may still take, as the link behaves now."""
        fault = self.fault
        return inf if fault.bytes_per_s else fault.delay_s + fault.jitter_s


class Ending(Enum):
    """How a direction ends, behind all its bytes."""

    END = 0
    RESET = 1


def reset_socket(sock: socket.socket) -> None:
    """Close *sock* so that the other side sees a reset. Idempotent."""
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        close_socket(sock)


def close_socket(sock: socket.socket) -> None:
    """Close *sock*; tasks waiting for it are woken. Idempotent."""
    if sock.fileno() >= 0:
        trio.lowlevel.notify_closing(sock)
        sock.close()


async def until_readable(sock: socket.socket) -> None:
    """Wait for bytes, or the end, of a socket whose connection is cancelled before it is closed."""
    # A task that was about to go on when that happened must not touch the closed socket.
    await trio.lowlevel.checkpoint_if_cancelled()
    await trio.lowlevel.wait_readable(sock)


class Carrier:
    """One direction: `read` takes bytes in, `deliver` lets those out that had to wait."""

    opposite: Carrier

    def __init__(
        self,
        link: Link,
        source: socket.socket,
        sink: socket.socket,
        *,
        rng: Rng,
        buffer: memoryview,
        reset: Callable[[], None],
    ) -> None:
        """Args:
        source, sink: Not blocking.
        buffer: Scratch space; its content is used up before any other task runs.
        reset: Breaks the connection at once, on both sides.
        """
        self.link = link
        self.is_done = False
        self._source = source
        self._sink = sink
        self._rng = rng
        self._buffer = buffer
        self._reset = reset
        self._waiting: deque[tuple[float, bytes | Ending]] = deque()
        self._waiting_bytes = 0
        self._last_due_s = 0.0
        self._is_sending = False
        self._is_sink_gone = False
        self._is_source_broken = False
        self._has_ended = False
        self._parked = trio.lowlevel.ParkingLot()

    # -- from outside ----------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether something has been taken in and not let out."""
        return bool(self._waiting) or self._is_sending

    def link_changed(self) -> None:
        """Go by the link's new behaviour, with what is waiting too."""
        latest_s = trio.current_time() + self.link.longest_wait_s()
        self._last_due_s = min(self._last_due_s, latest_s)
        self._waiting = deque((min(due_s, latest_s), it) for due_s, it in self._waiting)
        self._parked.unpark_all()

    def source_broke(self) -> None:
        """The other direction found the socket this one reads from reset."""
        self._is_source_broken = True
        if self._has_ended:
            self._end(Ending.RESET)

    # -- in --------------------------------------------------------------------------------

    async def read(self) -> None:
        """Take in what the source sends, until it ends."""
        while not self._has_ended:
            while self._waiting_bytes >= WINDOW_BYTES:
                await self._parked.park()
            await until_readable(self._source)
            if self._is_sink_gone:
                return
            self._read_once()

    def _read_once(self) -> None:
        try:
            size = self._source.recv_into(self._buffer, self._bytes_at_once())
        except BlockingIOError:
            return
        except OSError:
            self._end(Ending.RESET)
            return
        if size:
            self.take(self._buffer[:size])
        else:
            self._end(Ending.RESET if self._is_source_broken else Ending.END)

    def _bytes_at_once(self) -> int:
        limit = self.link.fault.bytes_per_s
        if not limit:
            return RECEIVE_BYTES
        return min(RECEIVE_BYTES, max(SLICE_BYTES_MIN, int(limit * SLICE_S)))

    def take(self, data: memoryview) -> None:
        """Let *data* go on, at once or later."""
        if self.has_waiting or not self.link.is_quick:
            self._wait(self._due_s(len(data)), bytes(data))
            return
        rest = self._send_now(data)
        if rest:
            self._wait(trio.current_time(), bytes(rest))

    def _due_s(self, size: int) -> float:
        """Return when *size* bytes that come now are through, behind all before them."""
        fault, due_s = self.link.fault, trio.current_time()
        if fault.bytes_per_s:
            due_s = max(self.link.busy_until_s, due_s) + size / fault.bytes_per_s
            self.link.busy_until_s = due_s
        due_s += fault.delay_s + self._rng.random() * fault.jitter_s
        self._last_due_s = max(due_s, self._last_due_s)
        return self._last_due_s

    def _send_now(self, data: memoryview) -> memoryview:
        """Return what the sink has no space for."""
        try:
            return data[self._sink.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            self._sink_broke()
            return data[:0]

    def _end(self, ending: Ending) -> None:
        self._has_ended = True
        self._wait(self._due_s(0), ending)

    def _wait(self, due_s: float, what: bytes | Ending) -> None:
        self._waiting.append((due_s, what))
        if isinstance(what, bytes):
            self._waiting_bytes += len(what)
        self._parked.unpark_all()

    # -- out -------------------------------------------------------------------------------

    async def deliver(self) -> None:
        """Let out what waits, each when it is due and the link is whole.

        Returns when the connection is over: reset, or both directions done. After its own end
        this direction still has to tell its sink when the source turns out to have ended.
        """
        while True:
            what = await self._next()
            if what is Ending.RESET:
                self._reset()
                return
            if what is Ending.END:
                self._shut_down()
                self.is_done = True
                if self.opposite.is_done:
                    return
            else:
                await self._let_out(what)

    async def _let_out(self, data: bytes) -> None:
        self._is_sending = True
        await self._send(data)
        self._is_sending = False
        self._waiting_bytes -= len(data)
        self._parked.unpark_all()

    async def _next(self) -> bytes | Ending:
        while True:
            wait_s = inf
            if self._waiting and not self.link.is_cut:
                wait_s = self._waiting[0][0] - trio.current_time()
                if wait_s <= 0:
                    return self._waiting.popleft()[1]
            with trio.move_on_after(wait_s):
                await self._parked.park()

    async def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self._is_sink_gone:
            if self.link.is_cut:
                await self._parked.park()
                continue
            size_before = len(rest)
            rest = self._send_now(rest)
            if len(rest) == size_before:
                await trio.lowlevel.wait_writable(self._sink)

    def _shut_down(self) -> None:
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._sink_broke()

    def _sink_broke(self) -> None:
        """The sink has ended; the other side learns it over the other direction."""
        if not self._is_sink_gone:
            self._is_sink_gone = True
            self.opposite.source_broke()
