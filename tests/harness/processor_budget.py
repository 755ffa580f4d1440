"""A budget of processor time for each fast test: a run names those that take far more.

It fails none: how fast a processor is belongs in no verdict. Time of the processor, not of the
clock: on a busy machine a test waits, but computes as much as elsewhere. Programs that it has
started and waited for count as well; what fixtures of a module or a session make does not.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Generator
from typing import Final

import pytest

BUDGET_S: Final = 1.0
"""What a fast test may take."""

FACTOR: Final = 5
"""A test is named at this multiple of its budget: processors differ, and the first test that
imports a library pays for it."""

NAMED_MAX: Final = 20
"""Tests that a run names: the longest."""

NOTED: Final = "processor_s"
"""Among the properties of a report."""


def spent_s() -> float:
    """Return seconds of processor time of this process and of those that it has waited for."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime


def is_bounded(item: pytest.Item) -> bool:
    """Return whether a test is a fast one, and runs as fast as it can."""
    return item.get_closest_marker("slow") is None and "coverage" not in sys.modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note what a fast test took that is far above its budget."""
    began_s = spent_s()
    yield
    took_s = spent_s() - began_s
    if is_bounded(item) and took_s > FACTOR * BUDGET_S:
        item.user_properties.append((NOTED, took_s))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that took far more than their budget, the longest first."""
    noted = sorted(
        ((took_s, report.nodeid) for report in _passed(terminalreporter) for took_s in _of(report)),
        reverse=True,
    )
    if not noted:
        return
    terminalreporter.section(f"fast tests above {FACTOR * BUDGET_S:g} s of processor time")
    for took_s, name in noted[:NAMED_MAX]:
        terminalreporter.line(f"{took_s:.1f} s  {name}: do less, or mark it slow")


def _passed(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    found: list[pytest.TestReport] = reporter.getreports("passed")
    return [report for report in found if report.when == "call"]


def _of(report: pytest.TestReport) -> list[float]:
    return [float(str(value)) for name, value in report.user_properties if name == NOTED]
