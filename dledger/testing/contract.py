"""What the contract checkers share, and that of executors.

A requirement that does not hold fails with one sentence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Final, ParamSpec

import trio
import trio.from_thread

from remoting.seams import Executor

P = ParamSpec("P")


def require(condition: object, sentence: str) -> None:
    """Demand *condition*.

    Raises:
        AssertionError: It does not hold; the text is *sentence*.
    """
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(sentence)


@contextmanager
def require_error(expected: type[BaseException], act: str) -> Iterator[None]:
    """Demand that the block raises *expected*.

    Args:
        act: What the block does, as the subject of the sentence.
    Raises:
        AssertionError: It raises nothing, or something else, which is the cause then.
    """
    __tracebackhide__ = True
    try:
        yield
    except expected:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{act} raises {found}, not {expected.__name__}") from error
    raise AssertionError(f"{act} raises nothing, not {expected.__name__}")


def unwrapped(check: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Let *check* raise the first broken requirement itself, not the group its tasks made of it."""

    @wraps(check)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True
        try:
            await check(*args, **kwargs)
        except BaseExceptionGroup as group:
            broken = group.subgroup(AssertionError)
            while isinstance(broken, BaseExceptionGroup):
                broken = broken.exceptions[0]  # type: ignore[assignment]  # down to a leaf
            if broken is None:
                raise
            raise broken from group

    return run


RUNS: Final = 50
"""Of one kind in a row: enough for one that measures to change its mind."""


class _FailedError(Exception):
    """What the work of a check raises."""


def _fail() -> None:
    raise _FailedError


@unwrapped
async def check_executor(executor: Executor, *, kind: str = "check") -> None:
    """Check that *executor* keeps the contract of the seam.

    Args:
        kind: Name under which it measures the work of this check.
    Raises:
        AssertionError: It does not; the text names the point.
    """
    for number in range(RUNS):
        require(isinstance(executor.runs_inline(kind), bool), "runs_inline gives a bool")
        if executor.runs_inline(kind):
            found = executor.run_inline(partial(int, number), kind=kind)
        else:
            found = await executor.run(partial(int, number), kind=kind)
        require(found == number, "work gives its result")
    with require_error(_FailedError, "run of work that fails"):
        await executor.run(_fail, kind=kind)
    with require_error(_FailedError, "run_inline of work that fails"):
        executor.run_inline(_fail, kind=kind)
    require(await executor.run(lambda: 7, kind=kind) == 7, "work runs after work that failed")
    await _check_one_at_a_time(executor, kind)
    await _check_cancellation(executor, kind)


async def _check_one_at_a_time(executor: Executor, kind: str) -> None:
    running, done = 0, 0

    def work() -> None:
        nonlocal running, done
        running += 1
        require(running == 1, "work of one kind never runs beside work of its kind")
        running -= 1
        done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(RUNS):
            nursery.start_soon(partial(executor.run, work, kind=kind))
    require(done == RUNS, "every work runs exactly once")


async def _check_cancellation(executor: Executor, kind: str) -> None:
    """Work that has begun is finished, and `run` returns or is cancelled after it alone."""
    begun, finished = 0, 0
    with trio.CancelScope() as scope:

        def work() -> None:
            nonlocal begun, finished
            begun += 1
            if _in_thread():
                trio.from_thread.run_sync(scope.cancel)
            else:
                scope.cancel()
            finished += 1

        await executor.run(work, kind=kind)
        await trio.lowlevel.checkpoint()
    require((begun, finished) == (1, 1), "work that has begun is finished when run ends")
    with trio.CancelScope() as scope:
        scope.cancel()
        await executor.run(lambda: None, kind=kind)
        await trio.lowlevel.checkpoint()
        require(False, "a cancelled task goes on after its work")
    require(await executor.run(lambda: 1, kind=kind) == 1, "work runs after a cancellation")


def _in_thread() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return True
    return False
