"""What tests of broken disks share: which mechanisms are there, programs, and their tracers."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger.jepsen_like.chaos import loop_disk, strace_inject

DISK_BYTES = 64 << 20


def needs(why_not: Callable[[], str | None]) -> pytest.MarkDecorator:
    why = why_not()
    return pytest.mark.skipif(why is not None, reason=str(why))


needs_loop = needs(loop_disk.why_not)


needs_strace = needs(strace_inject.why_not)


@contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run *text* in a Python of its own until it has printed "ready"; kill it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def tracers(pid: int) -> set[int]:
    """Return the process that traces the threads of a process; 0: none."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended
        found.add(int(status.partition("TracerPid:")[2].split()[0]))
    return found


def is_traced(pid: int) -> bool:
    """Tell whether every thread of a process is traced: they are attached to one by one."""
    return 0 not in tracers(pid)
