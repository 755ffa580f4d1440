"""Options of the unit tests; known when a path below this folder is named on the command line."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what tests ask for with `pytestconfig`, with a default for runs without this file."""
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write down what the scenarios print now; review the difference",
    )
