"""Randomness of a simulation: a stream for every purpose, all of them from one seed."""

from __future__ import annotations

import random


class SimRng(random.Random):
    """A stream of randomness (`dledger.remoting.seams.Rng`), the same in every interpreter."""


def rng_stream(seed: int, *names: object) -> SimRng:
    """Return the stream of *seed* that *names* name."""
    return SimRng("/".join(map(str, (seed, *names))))
