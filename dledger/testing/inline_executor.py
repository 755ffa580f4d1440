"""An executor for tests: blocking work without threads, one turn of the event loop later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class InlineExecutor:
    """A `remoting.seams.Executor` that runs everything on the event loop.

    It is one that has not measured yet: `runs_inline` is false, so that callers go the way of a
    disk worth waiting for.

    Attributes:
        runs: How often work of each kind was run.
    """

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    def runs_inline(self, kind: str) -> bool:
        """Tell that it does not."""
        return False

    def run_inline(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* here and now."""
        self.runs[kind] += 1
        return work()

    async def run(self, work: Callable[[], T], *, kind: str) -> T:
        """Run *work* after a checkpoint; errors pass through."""
        await trio.lowlevel.checkpoint()
        return self.run_inline(work, kind=kind)
