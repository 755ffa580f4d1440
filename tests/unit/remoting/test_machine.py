"""Work inline and in threads.

The machine's clock and randomness.
"""

import ctypes
import errno
import gc
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import trio
import trio.testing

from dledger.remoting.machine import (
    BLOCKS_PER_ROW,
    FULL_INTERVAL_S,
    INLINE_INTERVAL_S,
    MIN_LOG_DESCRIPTORS,
    NEW_MAX,
    NEW_MIN,
    OWN_DESCRIPTORS,
    RUNS_AFTER_STALL,
    AdaptiveExecutor,
    DescriptorShares,
    GarbageCollection,
    SystemRng,
    TrioClock,
    run_command,
    share_descriptors,
)
from tests.harness.beside import beside

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


async def test_command_that_fails_raises_with_its_status() -> None:
    await run_command(["true"])
    for words in (["sh", "-c", "exit 3"], ["no-such-command"]):
        with pytest.raises(OSError, match=r"exit status 3|No such file"):
            await run_command(words)


async def test_command_is_killed_when_it_is_cancelled() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_command, ["sh", "-c", "trap '' TERM; tail -f /dev/null & wait"])
        await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()


class Measured:
    """Work that takes a given time, by the clock the executor reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.where: list[int] = []
        monkeypatch.setattr("dledger.remoting.machine.time.perf_counter", lambda: self.now)

    def taking(self, seconds: float) -> Callable[[], str]:
        def work() -> str:
            self.where.append(threading.get_ident())
            self.now += seconds
            return "done"

        return work


async def test_cheap_work_moves_inline_and_slow_work_to_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    here = threading.get_ident()
    assert not executor.runs_inline("flush")
    assert await executor.run(work.taking(0), kind="flush") == "done"
    assert executor.runs_inline("flush")
    await executor.run(work.taking(0), kind="flush")
    await executor.run(work.taking(0.15), kind="flush")
    assert not executor.runs_inline("flush")
    await executor.run(work.taking(0), kind="flush")
    assert [ident == here for ident in work.where] == [False, True, True, False]


async def test_work_that_becomes_cheap_again_comes_back_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    await executor.run(work.taking(0.03), kind="flush")
    assert not executor.runs_inline("flush")
    for _ in range(10):
        await executor.run(work.taking(0), kind="flush")
    assert executor.runs_inline("flush")
    assert work.where[-1] == threading.get_ident()


async def test_slow_work_is_tried_inline_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, under load, all work appears slow; only a trial inline shows that it is not."""
    now = 0.0
    monkeypatch.setattr("dledger.remoting.machine.time.perf_counter", lambda: now)
    executor = AdaptiveExecutor(inline_limit_s=0.001)
    here = threading.get_ident()
    where: list[str] = []

    def work() -> None:
        nonlocal now
        inline = threading.get_ident() == here
        where.append("i" if inline else "t")
        now += inline_s if inline else 0.005

    inline_s = 0.004
    for _ in range(60):
        await executor.run(work, kind="flush")
    assert "".join(where) == "ti" + "t" * 32 + "i" + "t" * 25
    where.clear()
    inline_s = 0.0001
    for _ in range(80):
        await executor.run(work, kind="flush")
    assert "".join(where).endswith("i" * 10)


async def test_work_that_held_up_the_loop_stays_in_threads_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor()
    for seconds in (0, 0, 0.1):
        await executor.run(work.taking(seconds), kind="flush")
    here = threading.get_ident()
    assert [ident == here for ident in work.where] == [False, True, True]
    for _ in range(RUNS_AFTER_STALL + 1):
        await executor.run(work.taking(0), kind="flush")
    inline = [ident == here for ident in work.where[3:]]
    assert inline == [False] * RUNS_AFTER_STALL + [True]


async def test_work_that_comes_seldom_stays_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hand-over costs nothing to speak of, and a disk may be busy for others at any time."""
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor()
    here = threading.get_ident()

    async def runs(count: int, pause_s: float) -> list[bool]:
        work.where.clear()
        for _ in range(count):
            work.now += pause_s
            await executor.run(work.taking(0.0001), kind="flush")
        return [ident == here for ident in work.where]

    assert await runs(20, 2 * INLINE_INTERVAL_S) == [False] * 20
    assert (await runs(20, INLINE_INTERVAL_S / 4))[-5:] == [True] * 5
    # A pause is no trend: what comes after it comes as often as before.
    await runs(1, 3600.0)
    assert (await runs(20, INLINE_INTERVAL_S / 4))[-5:] == [True] * 5
    assert not executor.runs_inline("checkpoint")


async def test_nothing_runs_inline_beside_work_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Measured(monkeypatch)
    executor = AdaptiveExecutor()
    await executor.run(work.taking(0), kind="flush")
    assert executor.runs_inline("flush")
    begun, end = threading.Event(), threading.Event()

    def checkpoint() -> None:
        begun.set()
        end.wait(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(executor.run, checkpoint, kind="checkpoint"))
        await trio.to_thread.run_sync(begun.wait)
        assert not executor.runs_inline("flush")
        await executor.run(work.taking(0), kind="flush")
        end.set()
    assert work.where[-1] != threading.get_ident()
    assert executor.runs_inline("flush")


async def test_very_slow_work_is_never_tried_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dledger.remoting.machine.time.perf_counter", lambda: now)
    executor = AdaptiveExecutor()
    inline: list[bool] = []
    here = threading.get_ident()

    def work() -> None:
        nonlocal now
        inline.append(threading.get_ident() == here)
        now += 0.1

    for _ in range(100):
        await executor.run(work, kind="reserve")
    assert not any(inline)


async def test_kinds_are_measured_apart_and_errors_pass_through() -> None:
    executor = AdaptiveExecutor(inline_limit_s=0.02)

    def failing() -> None:
        raise OSError(errno.EIO, "disk")

    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            await executor.run(failing, kind="fsync")
    assert executor.runs_inline("fsync")
    assert not executor.runs_inline("other")


async def test_inline_work_still_lets_others_run() -> None:
    executor = AdaptiveExecutor(inline_limit_s=10)
    await executor.run(lambda: None, kind="x")
    with trio.testing.assert_checkpoints():
        await executor.run(lambda: None, kind="x")


async def test_inline_work_does_not_run_beside_a_thread_of_its_kind() -> None:
    executor = AdaptiveExecutor(inline_limit_s=0.02)
    running = 0
    together = 0

    def work() -> None:
        nonlocal running, together
        running += 1
        together = max(together, running)
        time.sleep(0.001)
        running -= 1

    async with trio.open_nursery() as workers:
        for _ in range(20):
            workers.start_soon(lambda: executor.run(work, kind="x"))
    assert together == 1


async def test_clock_waits_on_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    clock = TrioClock()
    before = clock.monotonic()
    await clock.sleep(1000)
    assert clock.monotonic() - before == pytest.approx(1000)
    assert abs(clock.wall_ms() - time.time() * 1000) < 60_000


def test_rng_gives_what_was_asked_for() -> None:
    rng = SystemRng()
    assert len(rng.randbytes(17)) == 17
    assert 0 <= rng.random() < 1
    assert {rng.randrange(2) for _ in range(200)} == {0, 1}


RAISED = """
import resource
from dledger.remoting.machine import raise_open_files
limit = raise_open_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(limit == soft == hard, soft)
"""


@pytest.mark.parametrize(
    ("wanted", "open_files", "shares"),
    [
        (4_096, None, DescriptorShares(4_096, 200, None)),
        (4_096, 20_000, DescriptorShares(4_096, 200, 400 + 3_000)),
        (4_096, 1_024, DescriptorShares(512, 128, 256 + 153)),
        (4_096, 100, DescriptorShares(28, 12, 24 + 16)),
        (4_096, 1, DescriptorShares(1, 4, 8 + 16)),
    ],
)
def test_connections_and_queue_files_share_the_descriptors(
    wanted: int, open_files: int | None, shares: DescriptorShares
) -> None:
    assert share_descriptors(wanted, 200, open_files) == shares


@pytest.mark.parametrize("open_files", [100, 128, 256, 1_024, 65_536])
def test_all_shares_together_fit_into_the_limit(open_files: int) -> None:
    shares = share_descriptors(1_000_000, 200, open_files)
    assert shares.file_descriptors is not None
    assert shares.connections + shares.file_descriptors + OWN_DESCRIPTORS <= open_files
    assert shares.file_descriptors >= 2 * shares.queue_files + MIN_LOG_DESCRIPTORS


def test_process_with_few_descriptors_takes_what_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(hard, 512)
    command = f"ulimit -Sn {few // 2} && ulimit -Hn {few} && exec {sys.executable} -c '{RAISED}'"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", str(few)]


FLOOD = """
import re
from pathlib import Path
from dledger.remoting.machine import give_freed_memory_back

def resident_kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

if {bounded}:
    give_freed_memory_back()
# The first large block that is freed makes the library take later ones from its heap.
first = bytearray(b"x") * (8 << 20)
del first
before = resident_kib()
frames, small = [], []
for _ in range(20):
    frames.append(bytearray(b"x") * (1 << 20))
    small.append(b"x" * 50_000)
held = resident_kib() - before
frames.clear()
print(held, resident_kib() - before)
"""


def test_freed_large_blocks_go_back_to_the_machine() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("another C library than glibc")
    left = {}
    for bounded in (True, False):
        code = FLOOD.format(bounded=bounded)
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        held, left[bounded] = map(int, said.stdout.split())
        assert held > 18 * 1024
    assert left[True] < 3 * 1024
    assert left[False] > 10 * 1024, "else this test shows nothing"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = trio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.set()
        await trio.sleep_forever()


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return first


def watched(node: Node) -> Callable[[], bool]:
    """Return a function that keeps no reference, as an assertion of a value would."""
    reference = weakref.ref(node)
    return lambda: reference() is None


class Blocks:
    """Memory of the process, as the test has it."""

    def __init__(self, count: int) -> None:
        self.count = count


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    blocks = Blocks(2_000_000)
    monkeypatch.setattr("dledger.remoting.machine.sys.getallocatedblocks", lambda: blocks.count)
    return blocks


@pytest.fixture
def collection(blocks: Blocks) -> Iterator[GarbageCollection]:
    gc.collect()
    collection = GarbageCollection(Clock())  # type: ignore[arg-type]  # two methods will do
    with collection.in_charge():
        yield collection
    gc.collect()
    gc.freeze()  # as tests/conftest.py has left it


def look(
    collection: GarbageCollection, seconds: float = 0.0, new_objects: int = NEW_MIN + 500
) -> None:
    """Check when that many objects are new, and a few more."""
    collection._clock.now += seconds  # type: ignore[attr-defined]  # the clock above
    new: list[list[int]] = [[] for _ in range(new_objects)]
    collection.look()
    assert len(new) == new_objects


def test_garbage_stays_frozen_until_memory_has_doubled(
    collection: GarbageCollection, blocks: Blocks
) -> None:
    old = cycle()
    is_gone = watched(old)
    look(collection, new_objects=NEW_MAX)
    del old
    look(collection, FULL_INTERVAL_S)
    assert not is_gone(), "it was frozen, and is not looked at"
    collection._clock.now = 0.0  # type: ignore[attr-defined]  # the clock above
    blocks.count = 4_000_001
    look(collection)
    assert not is_gone(), "memory has doubled, but the last full look was just now"
    look(collection, FULL_INTERVAL_S)
    assert is_gone()


def test_garbage_is_not_looked_for_where_tables_grow(
    collection: GarbageCollection, blocks: Blocks
) -> None:
    collection.rows = lambda: 100_000
    old = cycle()
    is_gone = watched(old)
    look(collection)
    del old
    blocks.count = 4_000_000 + 100_000 * BLOCKS_PER_ROW
    look(collection, FULL_INTERVAL_S)
    assert not is_gone(), "rows take that much"
    blocks.count += 1
    look(collection)
    assert is_gone()


def test_a_look_counts_no_frozen_objects(
    collection: GarbageCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        raise AssertionError("this goes through every object there is")

    monkeypatch.setattr("dledger.remoting.machine.gc.get_freeze_count", count)
    look(collection)
    look(collection, new_objects=NEW_MAX)
    look(collection, FULL_INTERVAL_S)


def test_garbage_among_new_objects_is_collected(collection: GarbageCollection) -> None:
    frozen = gc.get_freeze_count()
    new = cycle()
    is_gone = watched(new)
    look(collection, new_objects=NEW_MIN - 2_000)
    del new
    assert gc.get_freeze_count() <= frozen, "too few to look at"
    look(collection)
    assert is_gone()


def test_objects_in_place_of_old_ones_are_new(collection: GarbageCollection) -> None:
    waiting: list[list[int]] = [[] for _ in range(2 * NEW_MAX)]
    gc.freeze()
    counts = gc.get_count()[1:]
    for place in range(len(waiting)):
        waiting[place] = []
    assert gc.get_count()[1:] == counts, "the interpreter counts none of them"
    ids = set(map(id, waiting))
    assert ids <= set(map(id, gc.get_objects()))
    collection.look()
    assert ids.isdisjoint(map(id, gc.get_objects())), "frozen, all of them"
    assert not gc.get_objects(generation=2)


async def test_garbage_collection_runs_every_second(collection: GarbageCollection) -> None:
    new = cycle()
    is_gone = watched(new)
    del new
    many: list[list[int]] = [[] for _ in range(NEW_MIN)]
    async with beside(collection.run):
        await collection._clock.sleeps.wait()  # type: ignore[attr-defined]  # the clock above
    assert is_gone()
    assert gc.get_freeze_count() >= len(many)


def test_garbage_collection_gives_the_interpreter_its_part_back() -> None:
    before = gc.get_threshold()
    with GarbageCollection(Clock()).in_charge():  # type: ignore[arg-type]  # see above
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > before[2]
        gc.freeze()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as tests/conftest.py has left it
