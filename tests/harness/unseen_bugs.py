"""A pytest plug-in that asks the tests about every planted bug: which of them do they see?

``pytest -x -s -p tests.harness.unseen_bugs tests/unit`` asks about all, ``--bugs 46,54`` about
these. Without ``-s`` the children's reports would not come to their logs.

What a unit test sees says nothing about the simulator, so such a bug does not count as found by
it. Tests are collected once; each bug is planted into a child of that process, which runs them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from jepsen_like.mutants.apply import apply
from jepsen_like.mutants.registry import numbers

JOBS = 2
"""Children at the same time, one per core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--bugs``."""
    parser.addoption("--bugs", default="", help="Opaque numbers, with commas; empty: all.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in a child for each bug; in the child, leave that to pytest."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    assert terminal is not None
    asked = [int(number) for number in session.config.getoption("--bugs").split(",") if number]
    folder = Path(tempfile.mkdtemp(prefix="unseen-bugs-"))
    waiting: Iterator[int] = iter(asked or numbers())
    children: dict[int, int] = {}
    seen_bugs = 0
    while True:
        for number in islice(waiting, JOBS - len(children)):
            log = folder / f"{number}.log"
            child = os.fork()
            if not child:
                _become(number, log)
                return None
            children[child] = number
        if not children:
            session.testsfailed = seen_bugs
            return True
        child, status = os.wait()
        number, seen = children.pop(child), status != 0
        seen_bugs += seen
        log = folder / f"{number}.log"
        end = log.read_text().splitlines()[-1:]
        terminal.write_line(f"{number}: {f'SEEN, {log}' if seen else 'not seen'}: {''.join(end)}")


def _become(number: int, log: Path) -> None:
    """Be the process that runs the tests with one bug, and writes to *log*."""
    sys.stdout.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    apply(number)
