"""Structured logs: one line per event, a constant phrase and facts as keys."""

from __future__ import annotations

import sys
from typing import Literal, TextIO

import structlog

from remoting.text_logs import escape_values, text_renderer

LogForm = Literal["json", "text"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logs(
    *, form: LogForm = "json", level: str = "info", stream: TextIO | None = None, **facts: object
) -> None:
    """Send logs of the whole process to *stream* (standard error).

    Args:
        form: ``json`` for daemons, ``text`` for people, coloured on a terminal.
        level: Nothing below it is formatted.
        facts: Keys that every line carries, such as ``node_id`` and ``group``.
    """
    out = stream if stream is not None else sys.stderr
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**facts)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        else text_renderer(colors=out.isatty())
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        processors.append(structlog.processors.format_exc_info)
    else:
        processors.append(escape_values)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
