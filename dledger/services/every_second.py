"""What a broker looks at once a second, on every role, in one task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remoting.seams import Clock

PERIOD_S: Final = 1.0
"""A disk that is written at a GiB a second loses one percent of a small disk in that time; rates
are shown over ten seconds and more."""


async def every_second(clock: Clock, *looks: Callable[[], None]) -> None:
    """Call each of *looks* now and every second, in their order, for ever.

    Args:
        looks: Cheap, and must not raise.
    """
    while True:
        for look in looks:
            look()
        await clock.sleep(PERIOD_S)
