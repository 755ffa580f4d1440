"""Where the SDK's log lines go: to what the program has set up, never to its standard output.

A program that configured structlog, as our daemons and commands do, gets them there. Any other one
gets them from the standard library's `logging`, below the logger ``dledger``: one line of text,
tracebacks without local variables. With nothing set up that means warnings on standard error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

ROOT: Final = "dledger"
"""Name of the logger above all of ours."""


def get_logger(name: str) -> Any:
    """Return the logger of a module; where its lines go is decided line by line.

    Args:
        name: The module, ``__name__``; its logger is ``dledger.<name>``.
    """
    return _Logger(name)


@contextmanager
def brokers_log_here() -> Iterator[None]:
    """Send what daemons inside this process log to `logging`, while the block runs.

    A program that configured structlog keeps what it configured.
    """
    if structlog.is_configured():
        yield
        return
    factory = structlog.stdlib.LoggerFactory()
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _one_line],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        if structlog.get_config()["logger_factory"] is factory:
            structlog.reset_defaults()


class _Logger:
    __slots__ = ("_plain",)

    def __init__(self, name: str) -> None:
        self._plain = structlog.wrap_logger(
            logging.getLogger(f"{ROOT}.{name}"),
            processors=[structlog.stdlib.filter_by_level, _one_line],
            wrapper_class=structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def __getattr__(self, method: str) -> Any:
        chosen = structlog.get_logger() if structlog.is_configured() else self._plain
        return getattr(chosen, method)


def _one_line(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> tuple[tuple[str, str], dict[str, Any]]:
    """Return what `logging` takes: the event and its facts as one text, and the exception."""
    kept = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    words = [str(event.pop("event")), *(f"{key}={value!r}" for key, value in event.items())]
    return ("%s", " ".join(words)), kept
