"""A node's clocks: its own pace, its own idea of the date, and a gate that stops it.

A paused node does not wake: its waits, its network and its disk are held behind the gate until
it is resumed. Tasks that could run at the moment of the pause run up to their next wait. What is
not stopped are trio's own deadlines (``move_on_after`` around a request): they pass while the node
stands still, where in a stopped process they would pass at the moment it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio

from jepsen_like.simulation.virtual_time import START_S, Timer, VirtualTime

EPOCH_MS: Final = 1_700_000_000_000
"""What the date is when virtual time begins, for a clock without offset."""

SPREAD_S: Final = 1e-7
"""Waits of one node end this much apart, so that no two of them share an instant by design."""

SPREAD_STEPS: Final = 7
"""How many different ends there are before they repeat; all below a microsecond."""


class Gate:
    """Lets things happen to a node, or keeps them in order while it is paused."""

    __slots__ = ("_held", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self._held: list[tuple[Callable[[Any], object], Any]] = []

    def hold(self, call: Callable[[Any], object], argument: object) -> None:
        """Keep *call(argument)* for when the gate opens."""
        self._held.append((call, argument))

    def pass_(self, call: Callable[[Any], object], argument: object) -> None:
        """Do *call(argument)* now, or when the gate opens."""
        if self.is_open:
            call(argument)
        else:
            self._held.append((call, argument))

    def close(self) -> None:
        """From now on nothing happens to the node."""
        self.is_open = False

    def open(self) -> None:
        """Let happen what was held, in order, and all that follows."""
        self.is_open = True
        held, self._held = self._held, []
        for call, argument in held:
            call(argument)


class SimClock:
    """`remoting.seams.Clock` of one node.

    Args:
        number: Number of the node; makes the ends of its waits its own.
        offset_ms: How far its date is ahead of the world's.
        drift_ppm: How much faster it runs, in millionths; both of its clocks.
    """

    __slots__ = ("_rate", "_since_s", "_spread", "_then_s", "_time", "_wall_ms", "gate", "number")

    def __init__(
        self,
        time: VirtualTime,
        gate: Gate,
        *,
        number: int = 0,
        offset_ms: int = 0,
        drift_ppm: float = 0.0,
    ) -> None:
        self._time = time
        self.gate = gate
        self.number = number
        self._rate = 1.0 + drift_ppm / 1e6
        self._since_s = time.now_s
        self._then_s = time.now_s
        self._wall_ms = EPOCH_MS + offset_ms + (time.now_s - START_S) * 1000.0
        self._spread = 0

    def monotonic(self) -> float:
        """Return seconds of this node's time; never goes back."""
        return self._then_s + (self._time.now_s - self._since_s) * self._rate

    def wall_ms(self) -> int:
        """Return this node's date in milliseconds; jumps on request."""
        return int(self._wall_ms + (self._time.now_s - self._since_s) * self._rate * 1000.0)

    def jump(self, by_ms: int) -> None:
        """Move the date; durations are not touched."""
        self._wall_ms += by_ms

    def drift(self, ppm: float) -> None:
        """Run faster or slower from now on."""
        self._then_s, wall_ms = self.monotonic(), float(self.wall_ms())
        self._wall_ms, self._since_s = wall_ms, self._time.now_s
        self._rate = 1.0 + ppm / 1e6

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of this node's time, and while it is paused."""
        await self.wait(self._delay_s(seconds))

    @contextmanager
    def time_out(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Cancel the block after *seconds* of this node's time, but not while it is paused."""
        gate, scope = self.gate, trio.CancelScope()

        def end(_: object) -> None:
            gate.pass_(_cancel, scope)

        timer = self._time.call_later(self._delay_s(seconds), end, None)
        try:
            with scope:
                yield scope
        finally:
            timer.cancel()

    def _delay_s(self, seconds: float) -> float:
        self._spread = spread = (self._spread + 1) % SPREAD_STEPS
        delay_s = max(seconds, 0.0) / self._rate
        return delay_s + SPREAD_S * (1 + spread + self.number / 64)

    async def wait(self, delay_s: float) -> None:
        """Wait for *delay_s* of the world's time, and while this node is paused."""
        sleeper = _Sleeper(self.gate)
        sleeper.timer = self._time.call_later(delay_s, sleeper.wake, None)
        await trio.lowlevel.wait_task_rescheduled(sleeper.abort)


class _Sleeper:
    """A task that waits. No closures that know each other: those are left to the collector."""

    __slots__ = ("_gate", "_task", "timer")

    timer: Timer

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._task: trio.lowlevel.Task | None = trio.lowlevel.current_task()

    def wake(self, _: object) -> None:
        task = self._task
        if task is None:
            return
        if self._gate.is_open:
            self._task = None
            trio.lowlevel.reschedule(task)
        else:
            self._gate.hold(self.wake, None)

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        self.timer.cancel()
        return trio.lowlevel.Abort.SUCCEEDED


def _cancel(scope: trio.CancelScope) -> None:
    scope.cancel()
