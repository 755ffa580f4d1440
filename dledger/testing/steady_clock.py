"""A clock whose wall time follows trio's clock: a test that moves the one moves the other."""

from __future__ import annotations

import time

import trio


class SteadyClock:
    """Time as trio tells it, wall time included; begins at the machine's."""

    def __init__(self) -> None:
        self._offset_s = time.time() - trio.current_time()

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        return trio.current_time()

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return round((self._offset_s + trio.current_time()) * 1000)

    async def sleep(self, seconds: float) -> None:
        """Sleep for *seconds*."""
        await trio.sleep(seconds)

    def time_out(self, seconds: float) -> trio.CancelScope:
        """Cancel the block after *seconds*."""
        return trio.move_on_after(seconds)
