"""Flushes of a running broker that fail or take long, by strace's injection into system calls.

A broker flushes files with fdatasync and folders with fsync. An injected failure keeps the call
from happening: its pages stay dirty and are written some day, until a power cut (`LoopDisk`).

strace counts calls for each thread and system call apart, so a failure meant to come once is ended
by detaching as soon as it has come. Attached, it makes every system call of the broker slower.

Every strace is a child that runs under `timeout` and is ended by its id. The functions block: call
them from a worker thread.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger.jepsen_like.nemesis.ground import FaultError

FLUSH_CALLS: Final = ("fdatasync", "fsync", "msync")
"""System calls that make bytes or names durable."""

DETACH_TIMEOUT_S: Final = 10
"""Seconds strace may take to let go of a process before it is killed."""

TRIAL_S: Final = 5
"""Seconds the trial of `why_not` may take at most."""

_INJECTED: Final = "(INJECTED)"


@functools.cache
def why_not() -> str | None:
    """Return why calls of a running process cannot be made to fail here; None when they can."""
    if sys.platform != "linux":
        return "strace needs Linux"
    for tool in ("strace", "timeout"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    child = subprocess.Popen(["sleep", str(TRIAL_S)])
    try:
        with _attached(child.pid, "error=EIO", within_s=TRIAL_S):
            return None
    except FaultError as error:
        return str(error)
    finally:
        child.kill()
        child.wait()


def fail_one_flush(pid: int, *, nth: int = 1, within_s: int) -> int:
    """Have one flush of a running process end in EIO, and return how many failed.

    0 when the time was up or the process ended before it flushed; more than 1 when other threads
    flushed until strace had let go.

    Args:
        pid: A child of the caller's; its id is not reused before it is waited for.
        nth: Which of a thread's flushes by one system call, counted from 1 at the attachment.
    Raises:
        FaultError: The process cannot be attached to; nothing was done to it.
    """
    failed = 0
    with _attached(pid, f"error=EIO:when={nth}", within_s=within_s) as tracer:
        for line in tracer.stderr or ():
            if _INJECTED in line:
                failed += 1
                tracer.send_signal(signal.SIGINT)  # detach; more lines come until it has
    return failed


@contextmanager
def slow_flushes(pid: int, delay_ms: int, log: Path, *, within_s: int) -> Iterator[None]:
    """Have every flush of a running process begin *delay_ms* late while the block runs.

    Args:
        pid: A child of the caller's; its id is not reused before it is waited for.
        log: File for the output of strace; overwritten, and kept as evidence.
    Raises:
        FaultError: The process cannot be attached to; nothing was done to it.
    """
    effect = f"delay_enter={delay_ms * 1000}"
    with _attached(pid, effect, within_s=within_s, log=log) as tracer:
        yield
        tracer.send_signal(signal.SIGINT)


@contextmanager
def _attached(
    pid: int, effect: str, *, within_s: int, log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Yield a strace under its `timeout`; its lines are those of standard error."""
    names = ",".join(FLUSH_CALLS)
    command = ["timeout", "--signal=INT", f"--kill-after={DETACH_TIMEOUT_S}", str(within_s)]
    command += ["strace", "-f", "-p", str(pid), "-e", f"trace={names}"]
    command += ["-e", f"inject={names}:{effect}", *(["-o", str(log)] if log else [])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            first = process.stderr.readline()
            if "attached" not in first:
                raise FaultError(f"process {pid} cannot be attached to: {first.strip()}")
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=DETACH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # `timeout` leads a group of itself and strace; what a dead strace held, the kernel lets go.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
