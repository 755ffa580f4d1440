"""Blocking work: inline while it is cheap, in worker threads once it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

T = TypeVar("T")

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread keeps the interpreter; Python's own 5 ms would be most of a flush's latency."""

INLINE_LIMIT_S: Final = 0.001
"""Work cheaper than this runs on the event loop: a thread hand-over costs about 0.1 ms and twice
the wake-ups."""

DURATION_WEIGHT: Final = 0.2
"""Weight of the newest duration in the moving average: a slow disk shows after a few runs, one
hiccup is not a trend."""

TRIAL_LIMIT_S: Final = 0.02
"""Work that is slower in a thread is never tried inline: a trial stops everything else."""

RUNS_BETWEEN_TRIALS: Final = 32
"""So that trials of work that stays slow cost the event loop about 3 % of its flushes."""

INLINE_INTERVAL_S: Final = 0.005
"""Work that comes less often goes to a thread: at two hundred hand-overs a second they take 2 % of
a processor, and a disk that other processes use stops nothing else here."""

INTERVAL_MAX_S: Final = 4 * INLINE_INTERVAL_S
"""Longer pauses count as this one, so that a few runs after them show what comes now."""

STALL_S: Final = 0.01
"""Inline work that takes longer has held up everything else: a file system that is busy with other
files makes a flush of this one wait."""

RUNS_AFTER_STALL: Final = 500
"""Runs in a thread after such a one: at a thousand flushes a second half a second, at ten a
minute."""

THREADS_PER_KIND: Final = 1
"""What one kind does (flushing one disk) gains nothing from two at a time."""


class AdaptiveExecutor:
    """Runs blocking work inline while it is cheap and in a worker thread once it is not.

    A flush that takes 0.1 ms is cheaper inline than through a thread; one that takes 5 ms would
    stop every other connection. The decision is made per kind from a moving average of measured
    durations, and work that comes seldom goes to a thread. In a thread a duration contains the wait
    for the interpreter, which under load is much longer than the work: so from time to time work
    that does not look very slow is tried inline, and a disk that has become fast is noticed. The
    first run of a kind goes to a thread: nothing is known yet. After one that has held up the loop
    the next ones do, too, and so does all work while other work is in a thread: a flush waits for
    the disk that a checkpoint uses.
    """

    def __init__(self, *, inline_limit_s: float = INLINE_LIMIT_S) -> None:
        self._inline_limit_s = inline_limit_s
        self._kinds: dict[str, _Measured] = {}
        self._in_threads = 0
        # A worker that has finished waits this long for the interpreter while the loop is busy.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def average_s(self, kind: str) -> float | None:
        """Return the moving average of *kind* in seconds; None before its first run."""
        measured = self._kinds.get(kind)
        if measured is None:
            return None
        return measured.threaded_s if measured.inline_s is None else measured.inline_s

    def runs_inline(self, kind: str) -> bool:
        """Tell where the next work of *kind* would run."""
        measured = self._kinds.get(kind)
        if measured is None or measured.threaded_s is None or self._in_threads:
            # Inline work must not overtake, nor run beside, work of its kind that is in a thread;
            # and beside other work it may wait for the disk.
            return False
        if measured.runs_in_threads:
            return False
        if measured.interval_at(time.perf_counter()) > INLINE_INTERVAL_S:
            return False
        if measured.inline_s is not None and measured.inline_s < self._inline_limit_s:
            return True
        return measured.threaded_s < TRIAL_LIMIT_S and (
            measured.inline_s is None or measured.runs_since_inline >= RUNS_BETWEEN_TRIALS
        )

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now and measure it."""
        measured = self._known(kind)
        started = time.perf_counter()
        measured.note_begin(started)
        try:
            return work()
        finally:
            measured.note_inline(time.perf_counter() - started, self._inline_limit_s)

    def _known(self, kind: str) -> _Measured:
        measured = self._kinds.get(kind)
        if measured is None:
            measured = self._kinds[kind] = _Measured(trio.CapacityLimiter(THREADS_PER_KIND))
        return measured

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* to its end and return its result; errors pass through."""
        known = self._known(kind)
        if self.runs_inline(kind):
            await trio.lowlevel.checkpoint()
            if not self._in_threads:
                return self.run_inline(work, kind=kind)

        def timed() -> T:
            started = time.perf_counter()
            known.note_begin(started)
            try:
                return work()
            finally:
                known.note_threaded(time.perf_counter() - started, self._inline_limit_s)

        self._in_threads += 1
        try:
            return await trio.to_thread.run_sync(timed, limiter=known.limiter)
        finally:
            self._in_threads -= 1


class ThreadExecutor:
    """Runs blocking work in worker threads, always: for work that belongs to another owner.

    One thread per kind, as in `AdaptiveExecutor`; nothing is measured, and no work of another
    else's runs on the event loop.
    """

    def __init__(self) -> None:
        self._limiters: dict[str, trio.CapacityLimiter] = {}

    def runs_inline(self, kind: str) -> bool:
        """Tell that it never does."""
        return False

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now, because the caller asks for it."""
        return work()

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* to its end in a thread and return its result; errors pass through."""
        limiter = self._limiters.get(kind)
        if limiter is None:
            limiter = self._limiters[kind] = trio.CapacityLimiter(THREADS_PER_KIND)
        return await trio.to_thread.run_sync(work, limiter=limiter)


@dataclass(slots=True)
class _Measured:
    """What is known about one kind of work."""

    limiter: trio.CapacityLimiter
    # Moving averages; None before the first run of that way.
    inline_s: float | None = None
    threaded_s: float | None = None
    runs_since_inline: int = 0
    # Runs that go to a thread whatever they take.
    runs_in_threads: int = 0
    begun_s: float | None = None
    # Moving average of what passes between the begins of two runs; None before the second.
    interval_s: float | None = None

    def interval_at(self, now_s: float) -> float:
        """Return that average if the next run begins now."""
        if self.begun_s is None:
            return INTERVAL_MAX_S
        return _moved(self.interval_s, min(now_s - self.begun_s, INTERVAL_MAX_S))

    def note_begin(self, now_s: float) -> None:
        if self.begun_s is not None:
            self.interval_s = self.interval_at(now_s)
        self.begun_s = now_s

    def note_inline(self, took_s: float, inline_limit_s: float) -> None:
        self.runs_since_inline = 0
        if took_s > STALL_S:
            self.runs_in_threads = RUNS_AFTER_STALL
        tried = self.inline_s is None or self.inline_s >= inline_limit_s
        self.inline_s = took_s if tried else _moved(self.inline_s, took_s)

    def note_threaded(self, took_s: float, inline_limit_s: float) -> None:
        self.runs_since_inline += 1
        self.runs_in_threads = max(self.runs_in_threads - 1, 0)
        self.threaded_s = _moved(self.threaded_s, took_s)
        if took_s < inline_limit_s:  # waiting for the interpreter included: it is cheap for sure
            self.inline_s = took_s


def _moved(average_s: float | None, took_s: float) -> float:
    return took_s if average_s is None else average_s + DURATION_WEIGHT * (took_s - average_s)
