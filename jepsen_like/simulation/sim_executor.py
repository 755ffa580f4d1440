"""Blocking work of a node: done in virtual time, never in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from jepsen_like.seeded_rng import SimRng
from jepsen_like.simulation.sim_clock import SimClock
from jepsen_like.simulation.sim_disk import Mount

T = TypeVar("T")

WORK_S: Final = 0.0008
"""What blocking work usually takes: one flush of a common disk."""

SEEN_EARLY: Final = frozenset({"reserve"})
"""Work whose result others find in memory, not in what it returns: it is done when its time is
over. Done at once it would show a file whose name is not durable yet, as no thread does."""

INLINE_CHANCE: Final = 0.5
"""How often a healthy disk passes for one not worth waiting for: both ways must be right."""


class SimExecutor:
    """`remoting.seams.Executor` of one incarnation of a node.

    The work is done at once and its result held back for as long as the disk takes. Meanwhile
    what it flushed is on its way: a power cut still decides sector by sector.
    """

    __slots__ = ("_clock", "_mount", "_rng")

    def __init__(self, clock: SimClock, mount: Mount, rng: SimRng) -> None:
        self._clock = clock
        self._mount = mount
        self._rng = rng

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work*, let the disk's time pass, and return its result; errors pass through."""
        mount = self._mount
        if mount.late_s:
            await self._clock.wait(mount.late_s * self._rng.random())
        if kind in SEEN_EARLY:
            await self._disk_time()
            return work()
        flight = mount.take_off()
        try:
            try:
                return work()
            finally:
                mount.work_done()
        finally:
            try:
                await self._disk_time()
            finally:
                mount.land(flight)

    async def _disk_time(self) -> None:
        await self._clock.wait(WORK_S * (0.5 + self._rng.random()) + self._mount.delay_s)

    def runs_inline(self, kind: str) -> bool:
        """Toss a coin while the disk is healthy; a slow one is never waited for inline."""
        mount = self._mount
        return not (mount.delay_s or mount.late_s) and self._rng.random() < INLINE_CHANCE

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* in no time at all."""
        return work()
