"""This machine behind `dledger.remoting.seams`: its clock, randomness and threads; its process.

What a daemon sets for its own process: descriptors, freed memory, garbage collection. A flood of
clients must not take the descriptors that segments and queues need: a broker that cannot open its
next segment has to end, one that closes a connection has not.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from dledger.remoting.log import get_logger
from dledger.remoting.seams import Clock

# ---------------------------------------------------------------------------------- clock


def local_offset_ms(wall_ms: int) -> int:
    """Return the milliseconds that this machine's local time (``TZ``) is ahead of UTC then."""
    return time.localtime(wall_ms / 1000).tm_gmtoff * 1000


def thread_cpu_s() -> float:
    """Return the processor time of this thread, in seconds."""
    return time.thread_time()


class TrioClock:
    """The machine's clock; durations on trio's clock, so that tests may replace that alone."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        return trio.current_time()

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch; may jump."""
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds*."""
        await trio.sleep(seconds)

    def time_out(self, seconds: float) -> trio.CancelScope:
        """Cancel the block after *seconds*."""
        return trio.move_on_after(seconds)


# ---------------------------------------------------------------------------------- programs


async def run_command(words: Sequence[str]) -> None:
    """Run a program to its end; it reads nothing.

    Raises OSError: It cannot be run, or ends with an error.
    Cancellation: It is killed.
    """

    async def kill(process: trio.Process) -> None:
        process.kill()

    try:
        await trio.run_process(words, stdin=subprocess.DEVNULL, deliver_cancel=kill)
    except subprocess.CalledProcessError as error:
        raise ChildProcessError(str(error)) from error


# ---------------------------------------------------------------------------------- randomness


class SystemRng:
    """Randomness that cannot be predicted at start: a generator seeded by the operating system."""

    def __init__(self) -> None:
        self._random = random.Random(random.SystemRandom().randbytes(32))

    def random(self) -> float:
        """Return a float in [0, 1)."""
        return self._random.random()

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""
        return self._random.randrange(stop)

    def randbytes(self, n: int, /) -> bytes:
        """Return *n* random bytes."""
        return self._random.randbytes(n)


# ---------------------------------------------------------------------------------- worker threads


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
    durations; work that comes seldom, the first run of a kind, and all work while other work is in
    a thread go to a thread. From time to time work that does not look very slow is tried inline,
    and a disk that has become fast is noticed.
    """

    def __init__(self, *, inline_limit_s: float = INLINE_LIMIT_S) -> None:
        self._inline_limit_s = inline_limit_s
        self._kinds: dict[str, _Measured] = {}
        self._in_threads = 0
        # A worker that has finished waits this long for the interpreter while the loop is busy.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

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


CONNECTIONS_SHARE: Final = 0.5
"""At most this share of the descriptors are clients; files and members have the rest."""

OWN_DESCRIPTORS: Final = 32
"""Descriptors of the process itself: standard streams, event loop, listeners, links to members and
NameServers, lock and Raft files, and what a checkpoint opens for a moment. A broker of three was
seen to have 27 with its log's files, and 35 while it wrote a checkpoint."""

MIN_LOG_DESCRIPTORS: Final = 16
"""Of segments, entry index and key index: those that are written, and the ones before."""

LOG_SHARE: Final = 0.15
"""At most this share of the descriptors are the log's: a file that is not used gives its own back,
and is opened again for a read of old messages."""

DESCRIPTORS_PER_QUEUE_FILE: Final = 2
"""A mapped file has one of its own and one that the mapping holds."""

MIN_QUEUE_FILES: Final = 4
"""Fewer would have every message open a file."""

QUEUE_FILES_SHARE: Final = 0.25
"""At most this share of the descriptors are consume queue files."""

LARGE_BLOCK_BYTES: Final = 128 * 1024
"""glibc's own bound before it begins to move it: blocks from here on are mappings of their own."""

ARENAS_MAX: Final = 2
"""Heaps of threads; each keeps blocks that the others cannot use, and glibc makes 8 a processor."""

# <malloc.h>: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
_MALLOC: Final = {-1: LARGE_BLOCK_BYTES, -3: LARGE_BLOCK_BYTES, -8: ARENAS_MAX}

CGROUPS: Final = "/sys/fs/cgroup"
OWN_CGROUPS: Final = "/proc/self/cgroup"

LOOK_INTERVAL_S: Final = 1.0

NEW_MIN: Final = 5_000
"""New objects, frozen ones are none, below which a look does nothing: a later one covers them."""

NEW_MAX: Final = 20_000
"""Above it there are too many new objects for one turn of the loop: a table fills up, a snapshot
was read, or thousands of connections wait again after a request, with 26 objects each. They are
frozen as they are. A collection of 53,000 took 50 ms."""

BLOCKS_MIN: Final = 1_000_000
"""Below twice this number of blocks of memory nothing is collected from all objects. Blocks stand
for objects: to count frozen ones the interpreter goes through them, 13 milliseconds for a million.
"""

BLOCKS_PER_ROW: Final = 50
"""Blocks that a row of a table may take: a queue with its topic was seen to take about 40."""

FULL_INTERVAL_S: Final = 600.0
"""Between two full collections: a table that fills up doubles several times within a minute."""

NEVER: Final = 1_000_000_000

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Share of the descriptors for each use."""

    connections: int
    queue_files: int
    file_descriptors: int | None


def share_descriptors(
    wanted_connections: int, wanted_queue_files: int, open_files: int | None
) -> DescriptorShares:
    """Return the shares of a process.

    Args:
        wanted_queue_files: As many as are of use; 0 for a process that has none.
        open_files: Its limit; None: there is none.
    """
    if open_files is None:
        return DescriptorShares(wanted_connections, wanted_queue_files, None)
    for_files = int(open_files * QUEUE_FILES_SHARE) // DESCRIPTORS_PER_QUEUE_FILE
    queue_files = min(wanted_queue_files, max(MIN_QUEUE_FILES, for_files))
    of_log = max(MIN_LOG_DESCRIPTORS, int(open_files * LOG_SHARE))
    of_files = queue_files * DESCRIPTORS_PER_QUEUE_FILE + of_log
    left = open_files - OWN_DESCRIPTORS - of_files
    connections = min(wanted_connections, int(open_files * CONNECTIONS_SHARE), left)
    return DescriptorShares(max(1, connections), queue_files, of_files)


def raise_open_files() -> int | None:
    """Raise this process's limit of open files as far as it may; return it, None without one."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        hard = soft  # macOS takes no unlimited one
    return None if hard == resource.RLIM_INFINITY else hard


def memory_bytes(cgroups: str = CGROUPS, own: str = OWN_CGROUPS) -> int:
    """Return how much memory this process may use: the machine's, or less in a container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(cgroups, own)])


def _cgroup_limits(cgroups: str, own: str) -> list[int]:
    """Return the limits of the groups that this process is in, by both versions of them."""
    files = [f"{cgroups}/memory.max", f"{cgroups}/memory/memory.limit_in_bytes"]
    for line in _text_of(own).splitlines():
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0":
            while path.strip("/"):
                files.append(f"{cgroups}{path}/memory.max")
                path = path.rpartition("/")[0]
        elif "memory" in kinds.split(","):
            files.append(f"{cgroups}/memory{path}/memory.limit_in_bytes")
    texts = (_text_of(file).strip() for file in files)
    return [int(text) for text in texts if text.isdecimal()]  # "max": none


def _text_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def give_freed_memory_back() -> None:
    """Have the C library return each freed block of 128 KiB or more to the machine, at once.

    glibc raises that bound by itself up to 32 MiB: what one flood of large frames took stays with
    the process, in pieces that the next one does not fit into. With the bound fixed a large block
    costs its page faults each time, so this is for daemons that seldom have one. Elsewhere than
    with glibc nothing happens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    for option, value in _MALLOC.items():
        set_option(option, value)


class GarbageCollection:
    """Collects the garbage of a daemon that holds millions of objects for a long time.

    A full collection of a hundred thousand queues stops the event loop for a third of a second.
    Here a collection covers only what is new; what survives is frozen, so that no later one covers
    it, until there is twice as much memory in use as before, beyond what rows of tables take.
    """

    def __init__(self, clock: Clock) -> None:
        self.rows: Callable[[], int] = lambda: 0
        self._clock = clock
        self._blocks = BLOCKS_MIN
        self._rows = 0
        self._full_at = clock.monotonic()

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Leave old objects to `run` while the block runs: what it reads at its start, too."""
        young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        gc.freeze()  # modules stay
        self._blocks = max(BLOCKS_MIN, sys.getallocatedblocks())
        try:
            yield
        finally:
            gc.set_threshold(young, middle, old)
            gc.unfreeze()

    async def run(self) -> None:
        """Collect once a second, until cancelled. To be called within `in_charge`."""
        while True:
            self.look()
            await self._clock.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Collect what became garbage among new objects, if there are enough of them."""
        new = len(gc.get_objects())
        if new < NEW_MIN:
            return
        now = self._clock.monotonic()
        if now - self._full_at >= FULL_INTERVAL_S and self._has_doubled():
            self._collect_all(now)
            return
        if new <= NEW_MAX:
            gc.collect()
        gc.freeze()

    def _has_doubled(self) -> bool:
        of_rows = max(self.rows() - self._rows, 0) * BLOCKS_PER_ROW
        return sys.getallocatedblocks() > 2 * self._blocks + of_rows

    def _collect_all(self, now: float) -> None:
        gc.unfreeze()
        found = gc.collect()
        gc.freeze()
        self._blocks = max(BLOCKS_MIN, sys.getallocatedblocks())
        self._rows = self.rows()
        self._full_at = now
        log.info("full_garbage_collection", found=found, blocks=self._blocks)
