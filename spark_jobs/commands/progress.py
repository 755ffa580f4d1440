"""Progress of a long command on Spark: lines about its tasks, for people and logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

EVERY_S: Final = 2.0
"""Work that takes less time has no line."""


def task_line(tracker: Any, after_s: float, began_s: dict[int, float]) -> str:
    """Return how far Spark is with what it does now, and how long that takes at this pace.

    Args:
        tracker: A `pyspark.StatusTracker`.
        after_s: Seconds since the command began.
        began_s: Likewise, when each stage was first met; those that are new are added.
    """
    found = {number: tracker.getStageInfo(number) for number in tracker.getActiveStageIds()}
    stages = {number: stage for number, stage in found.items() if stage is not None}
    if not stages:
        return f"{after_s:.0f} s: Spark plans, or reads what was found"
    done = sum(stage.numCompletedTasks for stage in stages.values())
    tasks = sum(stage.numTasks for stage in stages.values())
    spent_s = after_s - min(began_s.setdefault(number, after_s) for number in stages)
    left = f", about {spent_s * (tasks - done) / done:,.0f} s left" if done and spent_s else ""
    return f"{after_s:.0f} s: {done:,} of {tasks:,} tasks of this step are done{left}"


@contextmanager
def task_lines(
    report: Callable[[str], object], every_s: float = EVERY_S
) -> Iterator[Callable[[Any], None]]:
    """Report every two seconds how far Spark is; yield what takes its tracker, once there is one.

    A thread does it, since the block waits for Spark; it has ended when the block has.
    """
    over = threading.Event()
    trackers: list[Any] = []
    stages_s: dict[int, float] = {}
    began_s = time.monotonic()

    def look() -> None:
        while not over.wait(every_s):
            after_s = time.monotonic() - began_s
            for tracker in trackers:
                report(task_line(tracker, after_s, stages_s))
            if not trackers:
                report(f"{after_s:.0f} s: Spark starts")

    thread = threading.Thread(target=look, name="task lines", daemon=True)
    thread.start()
    try:
        yield trackers.append
    finally:
        over.set()
        thread.join()
