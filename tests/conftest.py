"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what tests ask for with `pytestconfig`."""
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write down what the scenarios print now; review the difference",
    )
