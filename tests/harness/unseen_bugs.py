"""A pytest plug-in that asks the tests about every planted bug: which of them do they see?

``pytest -x -s -p tests.harness.unseen_bugs tests/unit`` asks about all, ``--bugs 46,54`` about
these. Without ``-s`` the children's reports would not come to their logs.

What a unit test sees says nothing about the simulator, so such a bug does not count as found by
it. Tests are collected once. A first child runs them all without a bug and notes which of them run
a line of the functions that bugs change; no other test can see the bug. Then each bug is planted
into a child, which runs those.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import pytest
from coverage import Coverage, CoverageData

from jepsen_like.mutants.apply import apply
from jepsen_like.mutants.registry import by_number, numbers
from jepsen_like.mutants.rewrite import function_of, locate

JOBS = 2
"""Children at the same time, one per core."""

SOURCES: Final = ("dledger", "commitlog", "client", "namesrv", "remoting")

GUARDS_OFF: Final = "dledger.group:Group.__init__"
"""Switched off guards are the default of its argument."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--bugs``."""
    parser.addoption("--bugs", default="", help="Opaque numbers, with commas; empty: all.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in a child for each bug; in the child, leave that to pytest."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    assert terminal is not None
    folder = Path(tempfile.mkdtemp(prefix="unseen-bugs-"))
    child = os.fork()
    if not child:
        _become(folder / "reach.log")
        session.config.pluginmanager.register(Reach(folder / "reach"))
        return None
    assert not os.waitpid(child, 0)[1], f"tests fail without a bug: {folder}/reach.log"
    reach = CoverageData(basename=str(folder / "reach"))
    reach.read()
    terminal.write_line(f"who runs what is noted: {folder}/reach.log")

    asked = [int(number) for number in session.config.getoption("--bugs").split(",") if number]
    waiting: Iterator[int] = iter(asked or numbers())
    children: dict[int, tuple[int, int]] = {}
    seen_bugs = 0
    while True:
        for number in islice(waiting, JOBS - len(children)):
            tests = _tests_that_run(number, reach)
            child = os.fork()
            if not child:
                _become(folder / f"{number}.log")
                apply(number)
                session.items[:] = [item for item in session.items if item.nodeid in tests]
                return None
            children[child] = number, len(tests)
        if not children:
            session.testsfailed = seen_bugs
            return True
        child, status = os.wait()
        number, tests_count = children.pop(child)
        log = folder / f"{number}.log"
        end = "".join(log.read_text().splitlines()[-1:])
        # Without a test to run pytest does not end with 0 either.
        seen = status != 0 and tests_count > 0
        seen_bugs += seen
        said = f"SEEN, {log}" if seen else "not seen"
        terminal.write_line(f"{number}: {said} by {tests_count} tests that get there: {end}")


class Reach:
    """Notes which test runs which line, in one file of coverage."""

    def __init__(self, path: Path) -> None:
        self._coverage = Coverage(
            data_file=str(path), config_file=False, source_pkgs=SOURCES, messages=False
        )
        # The tests are collected: what they run is imported.
        self._coverage.set_option("run:disable_warnings", ["module-not-measured"])
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """What runs from here on, fixtures too, is *nodeid*'s."""
        self._coverage.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        self._coverage.stop()
        self._coverage.save()


def _tests_that_run(number: int, reach: CoverageData) -> set[str]:
    """Return the tests that run a line of what the planted bug *number* changes."""
    mutant = by_number(number)
    targets = {edit.target for edit in mutant.edits} | (
        {GUARDS_OFF} if mutant.guards_off else set()
    )
    tests: set[str] = set()
    for target in targets:
        function = function_of(locate(target)[2])
        lines, first = inspect.getsourcelines(function)
        # The head of the function runs when its module is imported.
        body = range(function.__code__.co_firstlineno + 1, first + len(lines))
        by_line = reach.contexts_by_lineno(inspect.getfile(function))
        tests |= {test for line in body for test in by_line.get(line, ())}
    return tests


def _become(log: Path) -> None:
    """Write to *log* from here on."""
    sys.stdout.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
