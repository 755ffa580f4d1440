"""Settings of the unit tests, and options, which a path below this folder makes known."""

from __future__ import annotations

import pytest

from tests.harness.hypothesis_profile import use_shared_machine
from tests.harness.quick_flushes import quick_flushes
from tests.harness.virtual_time import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "quick_flushes"]

use_shared_machine()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what tests ask for with `pytestconfig`, with a default for runs without this file."""
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write down what the scenarios print now; review the difference",
    )
