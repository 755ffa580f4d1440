"""Settings of the unit tests."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import trio

from tests.harness.hypothesis_profile import use_shared_machine
from tests.harness.quick_flushes import quick_flushes

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


__all__ = ["pytest_collection_modifyitems", "quick_flushes"]

use_shared_machine()
