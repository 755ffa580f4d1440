"""Waiting: for a level-triggered wake-up, for an event with a time limit, for the next second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from dledger.remoting.seams import Clock

# --------------------------------------------------------------------------------- for another task


class Wakeup:
    """Wakes the one task that waits on it. `set` never blocks and is idempotent."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: trio.lowlevel.Task | None = None

    def set(self) -> None:
        """Wake the waiter now, or let its next wait return at once."""
        self._is_set = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            trio.lowlevel.reschedule(waiting)

    async def wait(self) -> None:
        """Wait until set, then clear. A checkpoint.

        Raises:
            RuntimeError: Another task waits.
        Cancellation: A set that was not noticed yet stays set.
        """
        if self._waiting is not None:
            raise RuntimeError("two tasks wait for one wake-up")
        if self._is_set:
            await trio.lowlevel.checkpoint()
        else:
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        self._is_set = False

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def wait_or(self, clock: Clock, seconds: float) -> bool:
        """Wait until set or until *seconds* have passed; return whether it was set."""
        with clock.time_out(seconds):
            await self.wait()
            return True
        return False


class WakeAll:
    """Wakes every task that waits on it; a later wait ends with the next `set`."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake all that wait now. Never blocks."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next `set`. A checkpoint."""
        await self._event.wait()


# ---------------------------------------------------------------------------------- on the clock


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
