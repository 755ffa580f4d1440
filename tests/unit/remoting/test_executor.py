"""Work inline and in threads."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from remoting.executor import INLINE_INTERVAL_S, RUNS_AFTER_STALL, AdaptiveExecutor


class Measured:
    """Work that takes as long as it says, by the clock the executor reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.where: list[int] = []
        monkeypatch.setattr("remoting.executor.time.perf_counter", lambda: self.now)

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
    """In a thread, under load, all work looks slow; only a trial inline shows that it is not."""
    now = 0.0
    monkeypatch.setattr("remoting.executor.time.perf_counter", lambda: now)
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


async def test_nothing_runs_inline_beside_work_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr("remoting.executor.time.perf_counter", lambda: now)
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
    assert executor.average_s("other") is None


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


async def test_cancelled_work_is_finished() -> None:
    executor = AdaptiveExecutor()
    finished: list[bool] = []

    def work() -> None:
        time.sleep(0.02)
        finished.append(True)

    with trio.move_on_after(0.001):
        await executor.run(work, kind="x")
    assert finished == [True]
