"""A level-triggered wake-up: set any number of times, noticed once."""

from __future__ import annotations

import trio

from remoting.seams import Clock


class Wakeup:
    """Wakes the one task that waits on it. `set` never blocks and is idempotent."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the waiter now, or let its next wait return at once."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until set, then clear. A checkpoint.

        Cancellation: A set that was not noticed yet stays set.
        """
        await self._event.wait()
        self._event = trio.Event()

    async def wait_or(self, clock: Clock, seconds: float) -> bool:
        """Wait until set or until *seconds* have passed; tell whether it was set."""
        with clock.time_out(seconds):
            await self.wait()
            return True
        return False
