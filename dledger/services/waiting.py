"""Wait for an event, but not for ever, on the clock of the seam."""

from __future__ import annotations

import trio

from remoting.seams import Clock


async def wait_for(event: trio.Event, clock: Clock, timeout_s: float) -> bool:
    """Wait until *event* is set or *timeout_s* has passed; tell whether it is set.

    Cancellation: Nothing is left behind.
    """
    if event.is_set():
        await trio.lowlevel.checkpoint()
        return True

    async def time_out() -> None:
        await clock.sleep(timeout_s)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(time_out)
        await event.wait()
        nursery.cancel_scope.cancel()
    return event.is_set()
