"""What every run of tests does with the processor: no time for what shows nothing.

The interpreter's collections of garbage go through all objects, thousands of tests among them: none
runs while tests are collected, and no later one goes through what was there by then.
"""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def no_log_settings_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command that runs in the test's process set up no logs: loggers keep that for good."""
    monkeypatch.setattr("dledger.remoting.log.configure_logs", lambda **_: None)
