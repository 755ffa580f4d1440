"""Stopping a process before the power of its disk goes.

A machine without power answers nothing. A file system that is shut down does: a flush that races
with the shutdown may be reported as done though nothing of it reaches the disk (seen with ext4 on
Linux 6.18), and a process that still runs would acknowledge it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import trio

from jepsen_like.nemesis.ground import FaultError

STOP_WITHIN_S: Final = 5.0
"""A process that is stopped does nothing any more after this, or the machine is hopeless."""


async def stand_still(pid: int) -> None:
    """Stop a process; no thread of it runs in user space when this returns.

    A call that a thread is inside of may go on: the thread does not come back from it. A cancelled
    call leaves the process stopped or about to stop.

    Raises:
        FaultError: It still ran after `STOP_WITHIN_S`.
        ProcessLookupError: There is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    with trio.move_on_after(STOP_WITHIN_S):
        while not _stands_still(pid):  # noqa: ASYNC110  # the kernel gives no event
            await trio.sleep(0.001)
        return
    raise FaultError(f"process {pid} did not stop within {STOP_WITHIN_S} s")


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or inside the kernel."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            continue  # that thread has ended
    return all(state in "TtDZX" for state in states)
