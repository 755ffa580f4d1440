"""The files and connections a running process may open: lowered, or used up, and put back.

A flood's connections are held by a process with descriptors and a loopback address of its own. It
ends with the pipe that its parent keeps open.

``python -m dledger.jepsen_like.chaos.limits HOST PORT NUMBER SOURCE``: the holder. It writes to
stdout, as JSON, how many it opened, and at the end how many of them were never closed on it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from dledger.jepsen_like.nemesis.ground import FaultError


def why_not() -> str | None:
    """Return why limits of a running process cannot be changed here; None when they can."""
    if not hasattr(resource, "prlimit"):
        return "limits of a running process can be changed on Linux only"
    return None


def limit_with_spare(in_use: Set[int], spare: int) -> int:
    """Return the limit under which exactly *spare* more descriptors can be opened."""
    limit = 0
    while spare > 0 or limit in in_use:
        spare -= limit not in in_use
        limit += 1
    return limit


def open_numbers(pid: int) -> frozenset[int]:
    """Return the numbers of a process's open descriptors.

    Raises FaultError: there is no such process, or it is not ours to look at.
    """
    try:
        return frozenset(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError as error:
        raise FaultError(f"descriptors of process {pid} cannot be seen: {error}") from error


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU time a process has used.

    Raises FaultError: there is no such process.
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
    """Let a process open *spare* more files and connections while the block runs; yield the limit.

    What it has open stays open. What it closes meanwhile it may open again. Blocks for
    microseconds.

    Args:
        pid: A process of the caller's that has not been waited for: its id is not reused then.
        is_there: Returns, at the end, whether that is still so.
    Raises:
        FaultError: The limit cannot be set; it is as it was.
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


CONNECTIONS_MAX: Final = 20_000
"""One address of loopback has ports for these and some more."""

OWN_FILES: Final = 64
"""Descriptors of a holder that are no connections."""

OPEN_WITHIN_S: Final = 30.0
"""Connections that could not be opened by then are left out; a full backlog holds them up."""

CONNECT_TIMEOUT_S: Final = 5.0
END_WITHIN_S: Final = 10.0
"""A holder that has not ended by then is killed."""


@dataclass(slots=True)
class Flood:
    """What became of a flood.

    Attributes:
        wanted: As many as one process may open.
        opened: As many as were accepted, by the kernel at least.
        kept: As many of these as the other side had not closed in the end; None: the holder ended
            before it counted them.
    """

    asked: int
    wanted: int = 0
    opened: int = 0
    kept: int | None = None

    def __str__(self) -> str:
        """Return it in one line, for the detail of an event."""
        fewer = "" if self.wanted == self.asked else f" instead of {self.asked}"
        closed = "their process ended"
        if self.kept is not None:
            closed = f"{self.opened - self.kept} closed by the broker"
        return f"{self.opened} of {self.wanted} connections{fewer}, {closed}"


def source_for(host: str) -> str:
    """Return the address a holder connects from; empty, any, where *host* is not on loopback."""
    return "127.7.0.1" if host.startswith("127.") else ""


@contextmanager
def idle_connections(host: str, port: int, number: int) -> Iterator[Flood]:
    """Hold up to *number* connections while the block runs; what became of them is known after it.

    Blocks for up to `OPEN_WITHIN_S` and some: use it from a worker thread.

    Raises FaultError: the holder cannot be started or does not answer; it has ended.
    """
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)  # a holder takes all it may have
    flood = Flood(number, max(0, min(number, CONNECTIONS_MAX, files_max - OWN_FILES)))
    holder = _start_holder(host, port, flood.wanted, source_for(host))
    try:
        flood.opened = _count(holder)
        yield flood
    finally:
        assert holder.stdin is not None
        with suppress(OSError):
            holder.stdin.close()
        with suppress(FaultError):
            flood.kept = _count(holder)
        _end(holder)


def _start_holder(host: str, port: int, number: int, source: str) -> subprocess.Popen[str]:
    module = "dledger.jepsen_like.chaos.limits"
    try:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, host, str(port), str(number), source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise FaultError(f"no process to hold connections: {error}") from error


def _count(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout is not None
    line = holder.stdout.readline()
    if not line:
        raise FaultError("a process that held connections ended too soon")
    return int(json.loads(line))


def _end(holder: subprocess.Popen[str]) -> None:
    try:
        holder.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()


# -- a holder -------------------------------------------------------------------------------------


def _open(host: str, port: int, number: int, source: str) -> list[socket.socket]:
    found: list[socket.socket] = []
    until_s = time.monotonic() + OPEN_WITHIN_S
    while len(found) < number and time.monotonic() < until_s:
        try:
            connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S, (source, 0))
        except OSError:
            continue  # bounded by the time above
        connection.setblocking(False)
        found.append(connection)
    return found


def kept_of(connections: Sequence[socket.socket]) -> int:
    """Return how many of these the other side has not closed."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    # Nothing is sent to a silent connection: what can be read is the end.
    return len(connections) - len(poll.poll(0))


def main(host: str, port: int, number: int, source: str) -> None:
    """Open, say how many, hold until stdin ends, say how many are left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = _open(host, port, number, source)
    print(json.dumps(len(connections)), flush=True)
    sys.stdin.read()
    print(json.dumps(kept_of(connections)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
