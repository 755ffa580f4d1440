"""What a connection has still to send: at once where the socket takes it, else by one task.

::

    put ─┬─ idle, no burst ──► socket, in the same turn ─┐ full: what is left
         └─ else ────────────► parts that wait ◄─────────┘
                                      │ run: joined, one send after the other
                                      ▼
                                    socket
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio
from typing_extensions import Buffer

from dledger.remoting.seams import Stream, send_at_once

# Parts up to this size are joined into one send; larger ones go out uncopied.
JOIN_BYTES: Final = 64 * 1024
# One send call carries at most this much, so that the write deadline measures progress.
SEND_BYTES: Final = 256 * 1024
# A frame that follows another one so soon waits for those after it: one send call for all.
BURST_S: Final = 0.000_1
# How a stream shows that it is of no more use. An error of this machine's (EIO, ENOBUFS) is no
# other: it ends the connection it came with.
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class WriteBuffer:
    """The unsent frames of one connection, in their order.

    Attributes:
        handed_total: Bytes of them that may have left.
        last_sent_s: When it was last empty after a send, on trio's clock.
    """

    __slots__ = (
        "_at_once", "_broken", "_idle", "_is_sending", "_last_put_s", "_parts", "_send_began_s",
        "_sent", "_stream", "_timeout_s", "handed_total", "is_held", "last_sent_s", "queued_total",
        "unsent_bytes",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        timeout_s: float,
        *,
        sent: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        """Begin empty; what is put in before `run` waits for it.

        Args:
            sent: Called after every send, when `unsent_bytes` has become less.
            broken: Called with the reason when a send in the turn of its `put` fails.
        """
        self.unsent_bytes = 0
        self.queued_total = 0
        self.handed_total = 0
        self.last_sent_s = -math.inf
        self.is_held = False
        self._stream = stream
        self._at_once = send_at_once(stream)
        self._timeout_s = timeout_s
        self._sent = sent
        self._broken = broken
        self._parts: list[Buffer] = []
        self._idle = trio.lowlevel.ParkingLot()
        self._is_sending = False
        self._send_began_s = 0.0
        self._last_put_s = -math.inf

    def unread_for_s(self, now_s: float) -> float:
        """Return how long the peer has taken nothing of what is being sent."""
        return now_s - self._send_began_s if self._is_sending else 0.0

    def put(self, head: bytes, body: Buffer) -> None:
        """Send *head* and *body* after all before them. Never blocks."""
        parts = self._parts
        size = len(head)
        parts.append(head)
        if type(body) is not bytes:
            view = memoryview(body).cast("B")
            if view.nbytes:
                parts.append(view)
                size += view.nbytes
        elif body:
            parts.append(body)
            size += len(body)
        self.queued_total += size
        self.unsent_bytes += size
        if not self._idle:
            return
        if self._at_once is not None:
            if self.is_held:
                return
            now_s = trio.current_time()
            is_burst = now_s - self._last_put_s < BURST_S
            self._last_put_s = now_s
            if not is_burst:
                self._send_at_once()
                return
        self._idle.unpark_all()

    def release(self) -> None:
        """Send what was put in while `is_held`."""
        self.is_held = False
        if self._parts and self._idle and self._at_once is not None:
            self._last_put_s = trio.current_time()
            self._send_at_once()

    def clear(self) -> None:
        """Drop what is unsent."""
        self._parts.clear()
        self.unsent_bytes = 0

    def _send_at_once(self) -> None:
        """Give the socket what it takes now; leave the rest to `run`."""
        assert self._at_once is not None
        pieces = pieces_of(self._parts)
        self._parts = []
        for at, piece in enumerate(pieces):
            size = len(piece)
            self.handed_total += size
            try:
                taken = self._at_once(piece)
            except OSError as error:
                self._parts = [*pieces[at:]]
                self._broken(f"broken: {error}")
                return
            self.unsent_bytes -= taken
            if taken < size:
                # The rest is counted as handed over when it is sent, the piece from its first byte.
                self.handed_total -= size - taken
                self._parts = [memoryview(piece)[taken:], *pieces[at + 1 :]]
                self._idle.unpark_all()
                break
        else:
            self.last_sent_s = self._last_put_s
        self._sent()

    async def run(self) -> None:
        """Send what waits until the peer has taken nothing for `timeout_s`.

        Raises:
            trio.BrokenResourceError, trio.ClosedResourceError, OSError: The connection has ended.
        Cancellation: What is unsent stays; of a piece being sent a part may have left.
        """
        while True:
            # One scope for many sends: its deadline moves with each. When it passes between
            # two of them nothing is lost.
            with trio.CancelScope() as scope:
                await self._send_all(scope)
            if self._is_sending:
                return

    async def _send_all(self, scope: trio.CancelScope) -> None:
        while not scope.cancel_called:  # what is left then has a scope of its own
            while not self._parts:
                await self._idle.park()
            await self._send_waiting(scope)

    async def _send_waiting(self, scope: trio.CancelScope) -> None:
        parts, self._parts = self._parts, []
        pieces = pieces_of(parts)
        for at, piece in enumerate(pieces):
            if scope.cancel_called:  # between two sends
                self._parts[:0] = pieces[at:]
                return
            size = len(piece)
            self.handed_total += size
            self._send_began_s = now = trio.current_time()
            scope.deadline = now + self._timeout_s
            self._is_sending = True
            await self._stream.send_all(piece)
            self._is_sending = False
            self.unsent_bytes -= size
            if at + 1 == len(pieces):
                self.last_sent_s = trio.current_time()
            self._sent()


def pieces_of(parts: list[Buffer]) -> list[bytes | memoryview]:
    """Join small neighbours, leave large parts uncopied, cut what is too large for one send."""
    pieces: list[bytes | memoryview] = []
    run: list[Buffer] = []
    run_bytes = 0
    for part in parts:
        size = len(part) if type(part) is bytes else memoryview(part).nbytes
        if run and run_bytes + size > SEND_BYTES:
            pieces.append(b"".join(run))
            run, run_bytes = [], 0
        if size <= JOIN_BYTES:
            run.append(part)
            run_bytes += size
            continue
        if run:
            pieces.append(b"".join(run))
            run, run_bytes = [], 0
        view = memoryview(part)
        pieces.extend(view[start : start + SEND_BYTES] for start in range(0, size, SEND_BYTES))
    if run:
        pieces.append(b"".join(run))
    return pieces
