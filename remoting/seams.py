"""The world as product code sees it: clock, randomness, network, worker threads.

Real implementations stand in `remoting.machine` and `remoting.tcp`; a simulation brings its own.
The disk has its seam in `dledger.commitlog.seams`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import trio
from typing_extensions import Buffer

T = TypeVar("T")

TlsMode = Literal["disabled", "permissive", "enforcing"]


class Clock(Protocol):
    """Time. Durations by `monotonic`, stamps that people see by `wall_ms`."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch; may jump."""

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* on the monotonic clock. A checkpoint."""

    def time_out(self, seconds: float) -> AbstractContextManager[trio.CancelScope]:
        """Cancel the block after *seconds* on the monotonic clock.

        Returns:
            To be entered at once; ``cancelled_caught`` of what that gives is whether the time
            ended the block.
        """


class Rng(Protocol):
    """Randomness; `random.Random` has this shape."""

    def random(self) -> float:
        """Return a float in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""

    def randbytes(self, n: int, /) -> bytes:
        """Return *n* random bytes."""


class Stream(Protocol):
    """A two-way byte stream. One task may send while another receives."""

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the other end."""

    @property
    def local_address(self) -> tuple[str, int]:
        """Host and port of this end."""

    async def send_all(self, data: Buffer) -> None:
        """Send all of *data*.

        Raises:
            trio.BrokenResourceError: The connection broke; some bytes may have been sent.
            trio.ClosedResourceError: This end was closed.
        """

    async def receive_some(self, max_bytes: int) -> Buffer:
        """Return at least one byte, or an empty buffer at the end of the stream.

        Raises:
            trio.BrokenResourceError: The connection broke.
            trio.ClosedResourceError: This end was closed.
        """

    async def aclose(self) -> None:
        """Close both directions at once; wakes tasks that are blocked in it. Idempotent."""


class ResettableStream(Stream, Protocol):
    """A stream that can end so that the other end knows at once that nothing more comes."""

    def reset_at_close(self) -> None:
        """Have the other end see a reset when this end is closed; what is unsent is lost."""


def reset_at_close(stream: Stream) -> None:
    """Call `ResettableStream.reset_at_close` where *stream* is such a one."""
    if (reset := getattr(stream, "reset_at_close", None)) is not None:
        reset()


class DirectStream(Stream, Protocol):
    """A stream that takes bytes in the turn that has them, while no other send is under way."""

    def send_some_nowait(self, data: Buffer) -> int:
        """Send the beginning of *data* without waiting; return how many bytes: 0 when it is full.

        Raises OSError: the connection broke, or this end was closed.
        """


def send_at_once(stream: Stream) -> Callable[[Buffer], int] | None:
    """Return `DirectStream.send_some_nowait` of *stream*; None when it is no such stream."""
    found: Callable[[Buffer], int] | None = getattr(stream, "send_some_nowait", None)
    return found


class Listener(Protocol):
    """A bound server socket."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and the port really bound (useful after asking for port 0)."""

    async def accept(self) -> Stream:
        """Return the next connection. A lack of descriptors, and any other `OSError`, is waited
        out and logged, not raised."""

    async def aclose(self) -> None:
        """Stop listening. Idempotent."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS for a listener. `permissive` reads the first byte: 0x16 starts TLS, else plain."""

    mode: TlsMode
    context: ssl.SSLContext | None = None


class Network(Protocol):
    """Connections between programs."""

    async def listen(self, host: str, port: int, *, tls: ServerTls | None = None) -> Listener:
        """Bind and listen. Raises OSError: the address cannot be bound."""

    async def connect(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> Stream:
        """Connect. Raises OSError: refused, unreachable or timed out; nothing was sent."""


class Executor(Protocol):
    """Runs blocking work. Decides by measuring whether a worker thread is worth its price."""

    def runs_inline(self, kind: str) -> bool:
        """Tell whether work of *kind* is known to be cheap enough for the event loop right now."""

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* on the event loop, without a checkpoint, and measure it; see `runs_inline`."""

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* to its end and return its result; errors pass through.

        Args:
            kind: Name under which durations are measured, e.g. ``"flush"``. Work that turns out
                cheap runs inline on the event loop, work that turns slow in a worker thread.
        Cancellation: Work that has begun is finished and its result thrown away.
        """
