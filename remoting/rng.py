"""Randomness of the operating system."""

from __future__ import annotations

import random


class SystemRng:
    """Randomness that cannot be predicted at start: a generator seeded by the operating system.

    Timers draw from it all the time, so a system call per number would be a waste.
    """

    def __init__(self) -> None:
        self._random = random.Random(random.SystemRandom().randbytes(32))

    def random(self) -> float:
        """Return a float in [0, 1)."""
        return self._random.random()

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""
        return self._random.randrange(stop)

    def randbytes(self, n: int, /) -> bytes:
        """Return *n* random bytes."""
        return self._random.randbytes(n)
