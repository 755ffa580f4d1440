"""A pytest plug-in that plants one bug into the product before any test is read.

``pytest -p tests.harness.planted_bug --planted 46 tests/unit``

A planted bug counts for the simulator only while the unit tests do not see it:
`tests/harness/unseen_bugs.py` asks them about every one.
"""

from __future__ import annotations

import pytest

from jepsen_like.mutants.apply import apply


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--planted``."""
    parser.addoption("--planted", type=int, required=True, help="Opaque number of the bug.")


def pytest_configure(config: pytest.Config) -> None:
    """Plant it."""
    apply(config.getoption("--planted"))
