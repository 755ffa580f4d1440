"""A pytest plug-in that records which test runs which line of the product."""

from __future__ import annotations

from typing import Final

import pytest
from coverage import Coverage

SOURCES: Final = ("dledger", "commitlog", "client", "namesrv", "remoting")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--reach``."""
    parser.addoption("--reach", default="", help="File to write; empty: nothing is recorded.")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record from here on: what the tests run is imported."""
    path = session.config.getoption("--reach")
    if path:
        session.config.pluginmanager.register(_Reach(path))


class _Reach:
    def __init__(self, path: str) -> None:
        self._coverage = Coverage(
            data_file=path, config_file=False, source_pkgs=SOURCES, messages=False
        )
        self._coverage.set_option(
            "run:disable_warnings", ["module-not-measured", "module-not-imported"]
        )
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """What runs from here on, fixtures too, is of the test *nodeid*."""
        self._coverage.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._coverage.stop()
        self._coverage.save()
