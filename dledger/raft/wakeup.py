"""A level-triggered wake-up: set any number of times, noticed once."""

from __future__ import annotations

import trio

from remoting.seams import Clock


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
