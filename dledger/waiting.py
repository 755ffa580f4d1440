"""Waiting on the clock of the seam: for an event with a time limit, and every second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from remoting.seams import Clock


async def wait_for(event: trio.Event, clock: Clock, timeout_s: float) -> bool:
    """Wait until *event* is set or *timeout_s* has passed; return whether it is set.

    Cancellation: Nothing is left behind.
    """
    with clock.time_out(timeout_s):
        await event.wait()
    return event.is_set()


PERIOD_S: Final = 1.0
"""A disk that is written at a GiB a second loses one percent of a small disk in that time; rates
are shown over ten seconds and more."""


async def every_second(clock: Clock, *calls: Callable[[], None]) -> None:
    """Call each of *calls* now and every second, in their order, without end.

    Args:
        calls: Cheap, and must not raise.
    Cancellation: Between two calls.
    """
    while True:
        for call in calls:
            call()
        await clock.sleep(PERIOD_S)
