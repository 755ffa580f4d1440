"""A bound on the processor time of each fast test: what takes longer is marked slow.

Time of the processor, not of the clock: on a busy machine a test waits, but computes as much as
elsewhere. Programs that it has started and waited for count as well; what fixtures of a module or a
session make does not.
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
"""A test fails at this multiple of its budget: processors differ, and the first test that imports a
library pays for it."""


def spent_s() -> float:
    """Return seconds of processor time of this process and of those that it has waited for."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime


def is_bounded(item: pytest.Item) -> bool:
    """Return whether a test is a fast one, and runs as fast as it can."""
    return item.get_closest_marker("slow") is None and "coverage" not in sys.modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a fast test that took far more than its budget."""
    began_s = spent_s()
    yield
    took_s = spent_s() - began_s
    if is_bounded(item) and took_s > FACTOR * BUDGET_S:
        pytest.fail(
            f"took {took_s:.1f} s of processor time, the budget of a fast test is {BUDGET_S:g} s: "
            "do less, or mark it slow",
            pytrace=False,
        )
