"""Log lines for people: names that others gave are written escaped."""

from __future__ import annotations

import io
from typing import Any, Final

import structlog

from remoting.escaped_text import escaped

_LINE_ENDS: Final = "\n\t"


def escape_values(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape the values and names of a log line; a step of structlog's."""
    return {escaped(name): _escaped_value(value) for name, value in event.items()}


def _escaped_value(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) else value


def text_renderer(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    """Return what writes a line for people, with an error's traceback below it, escaped.

    Without local variables, which hold messages and secrets.
    """
    return structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_traceback)


def _traceback(out: io.TextIOBase | Any, error: Any) -> None:
    written = io.StringIO()
    structlog.dev.plain_traceback(written, error)
    out.write(escaped(written.getvalue(), keep=_LINE_ENDS))
