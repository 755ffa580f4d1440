"""What every run of tests does with the processor: no time for what shows nothing.

The interpreter's collections of garbage go through all objects, thousands of tests among them: none
runs while tests are collected, and no later one goes through what was there by then.
"""

import gc
from collections.abc import Iterator

import pytest
import structlog


def pytest_configure() -> None:
    """Let lines that a test logs with an error have a plain traceback: drawn ones cost 0.1 s."""
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collections of garbage, and freeze what is there afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run when groups of xdist have no effect: each process would start each cluster."""
    if getattr(config.option, "loadgroup", False):
        grouped = [item.nodeid for item in items if item.get_closest_marker("xdist_group")]
        assert all("@" in nodeid for nodeid in grouped), "this xdist groups nothing in this pytest"


@pytest.fixture(autouse=True)
def no_log_settings_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command that runs in the test's process set up no logs: loggers keep that for good."""
    monkeypatch.setattr("dledger.remoting.log.configure_logs", lambda **_: None)
