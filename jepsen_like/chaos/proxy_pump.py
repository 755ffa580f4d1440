"""One direction of a proxied connection, pumped between its sockets."""

from __future__ import annotations

import os
from collections import deque
from enum import Enum
from math import inf
from typing import Final

import trio

from dledger.jepsen_like.nemesis.ground import HEALTHY
from dledger.remoting.seams import Rng

RECEIVE_BYTES: Final = 256 << 10
"""How much is read from a socket at once; what is being sent of it may pass a cut that comes."""

WINDOW_BYTES: Final = 1 << 20
"""Bytes waiting in one direction at which nothing more is read, so that the sender waits too."""

SLICE_S: Final = 0.05
"""Seconds of traffic that a slow link gets at once, so that its bytes trickle."""

SLICE_BYTES_MIN: Final = 512
"""But not less than this."""

GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
"""What a socket ends with; closed: a task was about to go on when its connection was reset here."""


class Link:
    """What happens from one process to another, on all their connections.

    *busy_until_s*: when the bytes a limited link has taken are through.
    """

    def __init__(self) -> None:
        self.fault = HEALTHY
        self.is_cut = False
        self.busy_until_s = 0.0

    @property
    def is_quick(self) -> bool:
        """Whether what comes may go on at once: it is whole, and nothing slows it."""
        fault = self.fault
        return not (self.is_cut or fault.delay_s or fault.jitter_s or fault.bytes_per_s)


class Ending(Enum):
    """How a direction ends, behind all its bytes."""

    END = 0
    RESET = 1


class Direction:
    """`read` takes bytes in, `deliver` lets those out that had to wait.

    Until `begin`, when the target has been dialled, all bytes wait.
    """

    opposite: Direction
    _sink: trio.SocketStream

    def __init__(self, link: Link, source: trio.SocketStream, rng: Rng) -> None:
        self.link = link
        self._source = source
        self._rng = rng
        self._early: list[bytes] | None = []
        self._waiting: deque[tuple[float, bytes | Ending]] = deque()
        self._waiting_bytes = 0
        self._last_due_s = 0.0
        self._is_sending = self._has_ended = self._is_done = False
        self._parked = trio.lowlevel.ParkingLot()

    def begin(self, sink: trio.SocketStream) -> None:
        """Let bytes out at *sink* from now on, those that have come first."""
        self._sink = sink
        early, self._early = b"".join(self._early or ()), None
        self._waiting_bytes = 0
        self.take(early)

    @property
    def has_waiting(self) -> bool:
        """Whether something has been taken in and not let out."""
        return bool(self._waiting) or self._is_sending

    def link_changed(self) -> None:
        """Go by the link's new behaviour, with what is waiting too."""
        fault = self.link.fault
        longest_s = inf if fault.bytes_per_s else fault.delay_s + fault.jitter_s
        latest_s = trio.current_time() + longest_s
        self._last_due_s = min(self._last_due_s, latest_s)
        self._waiting = deque((min(due_s, latest_s), it) for due_s, it in self._waiting)
        self._parked.unpark_all()

    # -- in --------------------------------------------------------------------------------

    async def read(self) -> None:
        """Take in what the source sends, until it ends."""
        while not self._has_ended:
            while self._waiting_bytes >= WINDOW_BYTES:
                await self._parked.park()
            try:
                data = await self._source.receive_some(RECEIVE_BYTES)
            except GONE:
                self._end(Ending.RESET)
                return
            if data:
                self.take(bytes(data))
            else:
                self._end(Ending.END)

    def take(self, data: bytes) -> None:
        """Let *data* go on, at once or later."""
        if self._early is None and self.link.is_quick and not self.has_waiting:
            data = data[self._send_now(data) :]
        self._waiting_bytes += len(data)
        if self._early is not None:
            self._early.append(data)
            return
        limit = self.link.fault.bytes_per_s
        size = max(SLICE_BYTES_MIN, int(limit * SLICE_S)) if limit else RECEIVE_BYTES
        for at in range(0, len(data), size):
            self._wait(len(data[at : at + size]), data[at : at + size])

    def _send_now(self, data: bytes) -> int:
        try:
            return os.write(self._sink.socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._sink_broke()
            return len(data)

    def _end(self, ending: Ending) -> None:
        self._has_ended = True
        self._wait(0, ending)

    def _wait(self, size: int, what: bytes | Ending) -> None:
        """Let *what* wait until *size* bytes that come now are through, behind all before them."""
        link, due_s = self.link, trio.current_time()
        if link.fault.bytes_per_s:
            due_s = max(link.busy_until_s, due_s) + size / link.fault.bytes_per_s
            link.busy_until_s = due_s
        due_s += link.fault.delay_s + self._rng.random() * link.fault.jitter_s
        self._last_due_s = max(due_s, self._last_due_s)
        self._waiting.append((self._last_due_s, what))
        self._parked.unpark_all()

    # -- out -------------------------------------------------------------------------------

    async def deliver(self) -> Ending:
        """Let out what waits, each when it is due and the link is whole, until all is over.

        After its own end this direction still has to pass on that its source turns out to be reset.
        """
        while True:
            what = await self._next()
            if what is Ending.RESET:
                return what
            self._is_sending = True
            try:
                if isinstance(what, bytes):
                    await self._sink.send_all(what)
                    self._waiting_bytes -= len(what)
                else:
                    await self._sink.send_eof()
                    self._is_done = True
                    if self.opposite._is_done:
                        return what
            except GONE:
                self._sink_broke()
            self._is_sending = False
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

    def _sink_broke(self) -> None:
        """The sink has ended; the other side learns it over the other direction."""
        self._has_ended = True
        self.opposite._end(Ending.RESET)
