"""Clocks for tests: one on trio's time, which a test may make virtual, and one moved by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

EPOCH_MS: Final = 1_700_000_000_000
"""Date of both clocks at their second 0."""


@dataclass
class VirtualClock:
    """A `remoting.seams.Clock` on trio's time, its date included.

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
    """A `remoting.seams.Clock` that stands still until a test, or a wait, moves it.

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
