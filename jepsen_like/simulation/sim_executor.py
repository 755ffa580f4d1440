"""Blocking work of a node: done in virtual time, never in a thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

from jepsen_like.simulation.sim_clock import SimClock
from jepsen_like.simulation.sim_disk import Mount

T = TypeVar("T")

WORK_S: Final = 0.0008
"""What blocking work usually takes: one flush of a common disk."""


class SimExecutor:
    """`remoting.seams.Executor` of one incarnation of a node.

    The work is done at once and its result held back for as long as the disk takes. Meanwhile
    what it flushed is on its way: a power cut still decides sector by sector.
    """

    __slots__ = ("_clock", "_mount", "_rng")

    def __init__(self, clock: SimClock, mount: Mount, rng: random.Random) -> None:
        self._clock = clock
        self._mount = mount
        self._rng = rng

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work*, let the disk's time pass, and return its result; errors pass through."""
        mount = self._mount
        flight = mount.take_off()
        try:
            return work()
        finally:
            try:
                await self._clock.wait(WORK_S * (0.5 + self._rng.random()) + mount.delay_s)
            finally:
                mount.land(flight)
