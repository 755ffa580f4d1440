"""Randomness of a simulation: a stream for every purpose, all of them from one seed."""

from __future__ import annotations

import random


def rng_stream(seed: int, *names: object) -> random.Random:
    """Return the randomness that *names* name, the same in every interpreter.

    A stream per node and purpose: what one of them draws does not move the others.
    """
    return random.Random("/".join(map(str, (seed, *names))))
