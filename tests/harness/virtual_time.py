"""Virtual time for tests: `autojump_clock` counts wherever it is asked for.

pytest-trio takes a clock from a test's own arguments alone. Here one that a fixture needs, or
``pytestmark = pytest.mark.usefixtures("autojump_clock")`` of a module, is
the clock of the run as well.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import trio

CLOCK = "autojump_clock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each asynchronous test that needs the clock on it."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and CLOCK in item.fixturenames
            and inspect.iscoroutinefunction(item.obj)
        ):
            item.add_marker(pytest.mark.trio(run=partial(_run, item)), append=False)


def _run(item: Any, main: Any, *, clock: Any, instruments: Any) -> Any:
    return trio.run(main, clock=clock or item.funcargs[CLOCK], instruments=instruments)
