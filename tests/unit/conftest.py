"""Settings of the unit tests."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.harness.hypothesis_profile import use_shared_machine
from tests.harness.quick_flushes import quick_flushes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run asynchronous tests on virtual time, but those that are marked ``real_time``."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and inspect.iscoroutinefunction(item.obj)
            and item.path.is_relative_to(HERE)
            and item.get_closest_marker("real_time") is None
        ):
            item.add_marker(pytest.mark.trio(run=_run), append=False)


def _run(main: Any, *, clock: Any, instruments: Any) -> Any:
    clock = clock or MockClock(autojump_threshold=0)
    return trio.run(main, clock=clock, instruments=instruments)


__all__ = ["pytest_collection_modifyitems", "quick_flushes"]

use_shared_machine()
