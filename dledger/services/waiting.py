"""Wait for an event, but not for ever, on the clock of the seam."""

from __future__ import annotations

import trio

from remoting.seams import Clock


async def wait_for(event: trio.Event, clock: Clock, timeout_s: float) -> bool:
    """Wait until *event* is set or *timeout_s* has passed; tell whether it is set.

    Cancellation: Nothing is left behind.
    """
    with clock.time_out(timeout_s):
        await event.wait()
    return event.is_set()
