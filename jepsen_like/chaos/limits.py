"""The number of files and connections a running process may open, lowered and put back."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from jepsen_like.nemesis.ground import FaultError


def why_not() -> str | None:
    """Return why limits of a running process cannot be changed here; None when they can."""
    if not hasattr(resource, "prlimit"):
        return "limits of a running process can be changed on Linux only"
    return None


def limit_with_spare(in_use: Set[int], spare: int) -> int:
    """Return the limit under which exactly *spare* more descriptors can be opened.

    Descriptors get the lowest free number, and the limit is one past the highest number.
    """
    limit = 0
    while spare > 0 or limit in in_use:
        spare -= limit not in in_use
        limit += 1
    return limit


def open_numbers(pid: int) -> frozenset[int]:
    """Return the numbers of a process's open descriptors.

    Raises:
        FaultError: There is no such process, or it is not ours to look at.
    """
    try:
        return frozenset(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError as error:
        raise FaultError(f"descriptors of process {pid} cannot be seen: {error}") from error


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU time a process has used.

    Raises:
        FaultError: There is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError as error:
        raise FaultError(f"the times of process {pid} cannot be seen: {error}") from error
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def few_open_files(
    pid: int, spare: int, is_there: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """Let a process open *spare* more files and connections, not more, while the block runs.

    What it has open stays open. What it closes meanwhile it may open again.

    Args:
        pid: A process of the caller's that has not been waited for: its id is not reused then.
        is_there: Returns, at the end, whether that is still so.
    Yields:
        The limit, as `RLIMIT_NOFILE` has it.
    Raises:
        FaultError: The limit cannot be set; it is as it was. Blocks for microseconds only.
    """
    limit = limit_with_spare(open_numbers(pid), spare)
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(limit, soft), hard))
    except OSError as error:
        raise FaultError(f"the limit of process {pid} cannot be set: {error}") from error
    try:
        yield min(limit, soft)
    finally:
        try:
            if is_there():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        except ProcessLookupError:
            pass  # It has ended, and its limit with it.
