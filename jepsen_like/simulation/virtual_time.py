"""Virtual time for one `trio.run`: it stands still while anything runs, then jumps.

All timers of the simulation stand in one heap here, outside trio's own: a timer is a heap entry and
a call, not a task, and can be held back while its node is paused. Whenever no task can run, the
answer to trio is to move the time to the next timer or deadline and not to wait at all.

A node has clocks of its own (`SimClock`): its pace, its idea of the date, and a `Gate` that holds
its waits, network and disk while it is paused. Tasks that could run at the moment of the pause run
up to their next wait. Trio's own deadlines pass while the node stands still.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, TypeVar, cast

import trio
import trio._core._run as scheduler

T = TypeVar("T")

START_S: Final = 1000.0
"""Where time begins: above zero, because deadlines are often times minus something."""

LEAST_STEP_S: Final = 1e-9
"""A deadline moves the time by at least this."""

IDLE_TURNS_MAX: Final = 16
"""So often in a row may nothing be left to happen before the run counts as stuck."""

POLLED_TURNS: Final = 8
"""Descriptors are read once in this number of turns: twice before a run counts as stuck."""


ASKED_IN_ONE_INSTANT: Final = 1000
"""Turns of the scheduler after which an instant has taken its time."""

NUDGE_S: Final = 1e-6
"""What such an instant takes."""


class SimulationError(Exception):
    """The simulation itself cannot go on; it is no statement about the simulated."""


class Timer:
    """One thing that will happen; `cancel` makes it nothing."""

    __slots__ = ("argument", "call")

    def __init__(self, call: Callable[[Any], object], argument: object) -> None:
        self.call: Callable[[Any], object] | None = call
        self.argument: object = argument

    def cancel(self) -> None:
        """Let it not happen. Idempotent."""
        self.call = None
        self.argument = None


class VirtualTime(trio.abc.Clock):
    """The clock of a whole run.

    Attributes:
        now_s: Seconds of virtual time; starts at `START_S`.
        stuck: Nothing was ever going to happen again.
        give_up: Ends the run then; set by `run_virtual`.
        nudges: How often there was too much work in one instant, and time moved on by itself.
    """

    def __init__(self) -> None:
        self.now_s = START_S
        self.nudges = 0
        self.stuck = False
        self.give_up: Callable[[], None] | None = None
        self._asked_at_s = 0.0
        self._asked = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._idle_turns = 0

    # -- what trio asks --------------------------------------------------------------------

    def start_clock(self) -> None:
        """Nothing to start."""

    def current_time(self) -> float:
        """Return seconds of virtual time; work takes none, but a loop does not stop time."""
        now_s = self.now_s
        if now_s != self._asked_at_s:
            self._asked_at_s = now_s
            self._asked = 0
        else:
            self._asked += 1
            if self._asked >= ASKED_IN_ONE_INSTANT:
                self._asked = 0
                self.nudges += 1
                self.now_s = now_s = now_s + NUDGE_S
        return now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to whatever comes first, the next timer or *deadline*, and return 0."""
        timers = self._timers
        while timers and timers[0][0] <= deadline:
            at, _, timer = heappop(timers)
            call = timer.call
            if call is None:
                continue
            if at > self.now_s:
                self.now_s = at
            self._idle_turns = 0
            timer.call = None
            call(timer.argument)
            return 0.0
        if deadline == math.inf:
            # Trio wakes itself through a descriptor when a run ends: give it a chance to be read.
            self._idle_turns += 1
            if self._idle_turns < IDLE_TURNS_MAX:
                return 0.0
            if self.stuck or self.give_up is None:
                raise SimulationError("even the clean-up waits for what will never happen")
            self.stuck = True
            self._idle_turns = 0
            self.give_up()
            return 0.0
        self._idle_turns = 0
        # Time goes on even when a deadline is a rounding error away: code that computes with its
        # own clock and waits for the rest would otherwise wait for nothing, without end.
        self.now_s = max(self.now_s + LEAST_STEP_S, deadline)
        return 0.0

    # -- what the simulation asks ----------------------------------------------------------

    def call_at(self, at_s: float, call: Callable[[Any], object], argument: object) -> Timer:
        """Let *call(argument)* happen at *at_s*; those of one instant happen in the order asked.

        It happens outside of any task: it may wake tasks and set timers, it must not raise.
        """
        timer = Timer(call, argument)
        self._count = count = self._count + 1
        heappush(self._timers, (at_s, count, timer))
        return timer

    def call_later(self, delay_s: float, call: Callable[[Any], object], argument: object) -> Timer:
        """Let *call(argument)* happen *delay_s* from now."""
        return self.call_at(self.now_s + delay_s if delay_s > 0 else self.now_s, call, argument)

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of virtual time, whatever the clock of any node shows."""
        timer = self.call_later(seconds, trio.lowlevel.reschedule, trio.lowlevel.current_task())

        def abort(_: object) -> trio.lowlevel.Abort:
            timer.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


class _Chance(Random):
    """Trio's chance: it shuffles the tasks of every turn, of which most have one."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        if len(x) > 1:
            super().shuffle(x)


@contextmanager
def seeded_scheduler(seed: int) -> Iterator[None]:
    """Let trio order the tasks of a batch by *seed* alone, for the length of the block.

    Raises SimulationError: this version of trio has no such switch, or it has become another one.
    """
    private: Any = scheduler
    before = getattr(private, "_ALLOW_DETERMINISTIC_SCHEDULING", None)
    chance: Any = getattr(private, "_r", None)
    ordered = "_counter" in getattr(private.Task, "__slots__", ())
    if not (isinstance(before, bool) and hasattr(chance, "shuffle") and ordered):
        raise SimulationError(
            f"trio {trio.__version__} lacks the private names that make its scheduler repeatable "
            "(_ALLOW_DETERMINISTIC_SCHEDULING, _r, Task._counter); 0.35.0 has them"
        )
    private._ALLOW_DETERMINISTIC_SCHEDULING = True
    private._r = _Chance(f"{seed}/scheduler")
    try:
        yield
    finally:
        private._ALLOW_DETERMINISTIC_SCHEDULING = before
        private._r = chance


class _SeldomPolled:
    """Trio's I/O manager for a run that has no I/O but trio's own wake-ups."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._turns = 0
        self.process_events = manager.process_events

    def get_events(self, timeout: float) -> Any:
        """Look at the descriptors in some of the turns; in all that would wait."""
        self._turns += 1
        if timeout <= 0 and self._turns % POLLED_TURNS:
            return ()
        return self._manager.get_events(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _NoInstruments(dict[str, Any]):
    """Takes instruments and calls none: turns of a simulated loop take no virtual time."""

    def add_instrument(self, instrument: object) -> None:
        """Pass it over."""

    def remove_instrument(self, instrument: object) -> None:
        """It was never there."""


def lighten_loop() -> None:
    """Spare the running loop, turn by turn, what a simulation has no use for."""
    runner: Any = scheduler.GLOBAL_RUN_CONTEXT.runner
    if not any(runner.instruments.values()):
        runner.instruments = _NoInstruments()
    runner.io_manager = _SeldomPolled(runner.io_manager)


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep the cyclic collector from running at moments that depend on the interpreter."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def run_virtual(
    seed: int,
    main: Callable[[VirtualTime], Awaitable[T]],
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """Run *main* on virtual time and return what it returns.

    Raises SimulationError: trio cannot be made repeatable, or every task got stuck.
    """
    time = VirtualTime()

    async def scoped() -> T | None:
        lighten_loop()
        with trio.CancelScope() as scope:
            time.give_up = scope.cancel
            return await main(time)
        return None

    with seeded_scheduler(seed), no_collector():
        result = trio.run(scoped, clock=time, instruments=instruments, strict_exception_groups=True)
    if time.stuck:
        raise SimulationError("every task waits for something that will never happen")
    return cast("T", result)


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
    """`dledger.remoting.seams.Clock` of one node.

    Args:
        number: Number of the node; makes the ends of its waits its own.
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
