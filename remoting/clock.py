"""The machine's clock, and its local time."""

from __future__ import annotations

import time

import trio


def local_offset_ms(wall_ms: int) -> int:
    """Return the milliseconds that this machine's local time (``TZ``) is ahead of UTC then."""
    return time.localtime(wall_ms / 1000).tm_gmtoff * 1000


def thread_cpu_s() -> float:
    """Return the processor time of this thread, in seconds."""
    return time.thread_time()


class TrioClock:
    """The machine's clock; durations on trio's clock, so that tests may replace that alone."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        return trio.current_time()

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch; may jump."""
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds*."""
        await trio.sleep(seconds)

    def time_out(self, seconds: float) -> trio.CancelScope:
        """Cancel the block after *seconds*."""
        return trio.move_on_after(seconds)
