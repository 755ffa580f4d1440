"""How long requests may keep one turn of the event loop: then everything else runs first.

A turn runs each task that is ready. When thousands of clients ask at the same moment, as with their
heartbeats after a fail-over, a turn would last until all of them have their answers, and the
heartbeats between members would wait as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

TURN_S: Final = 0.02
"""A connection that becomes ready later in a turn is served in the next one: a fifth of the
interval between two heartbeats of members, and some hundred requests."""

TURNS_MAX: Final = 50
"""A request waits for no more turns than these, a second or so, however many others there are."""


class Turn(trio.abc.Instrument):
    """The turn of the event loop that goes on; to be added to its instruments.

    Attributes:
        ends_s: When no further request is begun in it, in seconds of the loop's clock.
    """

    def __init__(self, now_s: Callable[[], float] = trio.current_time) -> None:
        self._now_s = now_s
        self.ends_s = math.inf

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self.ends_s = self._now_s() + TURN_S

    @property
    def is_over(self) -> bool:
        """Whether requests have had their share of the turn."""
        return self._now_s() >= self.ends_s

    async def wait_for_next(self) -> None:
        """Return in a turn that has time left, or after `TURNS_MAX`.

        Cancellation: Takes effect later: what was received before the wait is not lost.
        """
        for _ in range(TURNS_MAX):
            if not self.is_over:
                return
            await trio.lowlevel.cancel_shielded_checkpoint()
