"""How long one turn of the event loop took: for so long nothing else ran, heartbeats included."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import structlog
import trio

from dledger.remoting.connection_limits import TURN_S, Turn
from dledger.remoting.machine import thread_cpu_s

STALL_S: Final = 0.05
"""A turn above it is counted: half of the interval between two heartbeats."""

SLOT_S: Final = 1.0
SLOTS: Final = 60
"""The longest turn of each second is kept for a minute, so that a scrape every minute sees each."""

NOW_S: Final = 5.0
"""What a status answer calls now: tools ask every second."""

STEPS_FOR_S: Final = 600.0
"""For so long after a stall the steps of tasks are measured, so that the log names the longest one
in the next stall. At other times that costs nothing."""

log = structlog.get_logger(__name__)


class _Slot(NamedTuple):
    """The longest turn of a second, and its processor time."""

    ended_s: float
    took_s: float
    cpu_s: float


class LoopStall(Turn):
    """Measures the turns of the event loop it is put into: it reads clocks three times a turn.

    Attributes:
        longest_cpu_s: Processor time of that turn.
        stalls: How many turns took more than `STALL_S`.
    """

    def __init__(self, cpu_clock: Callable[[], float] = thread_cpu_s) -> None:
        super().__init__()
        self._cpu_s = cpu_clock
        self._began_s: float | None = None
        self._began_cpu_s = 0.0
        self._slots: deque[_Slot] = deque(maxlen=SLOTS)
        # A turn that took no longer than the longest of a second that goes on changes nothing.
        self._slot_end_s = self._slot_longest_s = 0.0
        self._garbage = _Garbage(self._now_s)
        self._steps: _Steps | None = None
        self._steps_end_s = self._next_line_s = 0.0
        self.longest_s = self.longest_cpu_s = 0.0
        self.stalls = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the loop of this task while the block runs."""
        # The same clock without the two calls that find it.
        self._now_s = trio.lowlevel.current_clock().current_time
        self._garbage = _Garbage(self._now_s)
        trio.lowlevel.add_instrument(self)
        gc.callbacks.append(self._garbage)
        try:
            yield
        finally:
            gc.callbacks.remove(self._garbage)
            self._measure_no_steps()
            trio.lowlevel.remove_instrument(self)
            self.ends_s = math.inf  # there is no turn whose begin is known any more

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self._began_s = began_s = self._now_s()
        self.ends_s = began_s + TURN_S
        self._began_cpu_s = self._cpu_s()

    def before_io_wait(self, timeout: float) -> None:
        """Note that a turn has ended."""
        began_s = self._began_s
        if began_s is not None:
            now_s = self._now_s()
            if now_s - began_s > self._slot_longest_s or now_s >= self._slot_end_s:
                self.note(now_s - began_s, now_s, self._cpu_s() - self._began_cpu_s)

    def note(self, took_s: float, now_s: float, cpu_s: float = 0.0) -> None:
        """Count a turn of *took_s* that ended at *now_s*, seconds of the monotonic clock."""
        slots = self._slots
        if now_s >= self._slot_end_s:
            slots.append(_Slot(now_s, took_s, cpu_s))
            self._slot_end_s = now_s + SLOT_S
            if self._steps is not None and now_s >= self._steps_end_s:
                self._measure_no_steps()
        elif took_s > slots[-1].took_s:
            slots[-1] = _Slot(slots[-1].ended_s, took_s, cpu_s)
        # Turns that count as stalls are all counted, whatever the longest of this second was.
        self._slot_longest_s = min(slots[-1].took_s, STALL_S)
        if took_s > self.longest_s:
            self.longest_s, self.longest_cpu_s = took_s, cpu_s
        if took_s > STALL_S:
            self.stalls += 1
            self._log(took_s, now_s, cpu_s)

    def _log(self, took_s: float, now_s: float, cpu_s: float) -> None:
        """Write what is known of a stall, one a second, and measure steps from now on."""
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + SLOT_S
            facts = self._garbage.facts(now_s - took_s)
            if self._steps is not None:
                facts |= self._steps.facts()
            log.warning("event_loop_stalled", took_ms=_ms(took_s), cpu_ms=_ms(cpu_s), **facts)
        self._steps_end_s = now_s + STEPS_FOR_S
        if self._steps is None and self._began_s is not None:
            self._steps = _Steps(self._now_s)
            trio.lowlevel.add_instrument(self._steps)

    def _measure_no_steps(self) -> None:
        if self._steps is not None:
            trio.lowlevel.remove_instrument(self._steps)
            self._steps = None

    def recent_s(self) -> float:
        """Return the longest turn of the last minute."""
        return self._recent(SLOT_S * SLOTS).took_s

    def _recent(self, span_s: float) -> _Slot:
        none = _Slot(0.0, 0.0, 0.0)
        if not self._slots:
            return none
        since = self._now_s() - span_s
        recent = (slot for slot in self._slots if slot.ended_s >= since)
        return max(recent, key=lambda slot: slot.took_s, default=none)

    def status(self) -> dict[str, float]:
        """Return what a status answer shows of it."""
        now = self._recent(NOW_S)
        return {
            "longest_ms": _ms(self.longest_s),
            "longest_cpu_ms": _ms(self.longest_cpu_s),
            "last_minute_ms": _ms(self.recent_s()),
            "now_ms": _ms(now.took_s),
            "now_cpu_ms": _ms(now.cpu_s),
            "stalls": self.stalls,
        }


class _Garbage:
    """The newest garbage collection that took longer than a turn should."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._began_s = self._ended_s = self._took_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Take note that a collection begins or ends; called by the interpreter."""
        now_s = self._now_s()
        if phase == "start":
            self._began_s = now_s
        elif now_s - self._began_s > STALL_S / 10:
            self._ended_s, self._took_s = now_s, now_s - self._began_s

    def facts(self, since_s: float) -> dict[str, Any]:
        """Return what the log shows if it ended at *since_s* or later, seconds of the clock."""
        if not self._took_s or self._ended_s < since_s:
            return {}
        return {"garbage_collection_ms": _ms(self._took_s)}


class _Steps(trio.abc.Instrument):
    """The longest step of a task in this turn of the event loop."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._began_s = self._took_s = 0.0
        self._name = ""

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self._took_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Note that a task runs."""
        self._began_s = self._now_s()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Note that it has given the loop back."""
        took_s = self._now_s() - self._began_s
        if took_s > self._took_s:
            self._took_s, self._name = took_s, task.name

    def facts(self) -> dict[str, Any]:
        """Return what the log shows of the longest step."""
        return {"task": self._name, "step_ms": _ms(self._took_s)} if self._took_s else {}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
