"""Where log lines go: those of a daemon or a command, and those of the SDK in a program.

A daemon writes one line per event, a constant phrase and facts as keys, to standard error. The
SDK's lines go where a program's structlog sends them, or else to the standard library's `logging`,
below the logger ``dledger``: one line of text, tracebacks without local variables.

Names of topics, groups and clients come from any client that connects. What a terminal would obey
in them is written as an escape.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

if TYPE_CHECKING:
    import structlog

# structlog takes a fifth of the time in which a command starts, and few commands log anything: it
# is loaded by what writes a line.

LogForm = Literal["json", "text"]

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_LINE_ENDS: Final = "\n\t"
_before_first_line: Final[list[Callable[[], None]]] = []


def configure_logs(
    *, form: LogForm = "json", level: str = "info", stream: TextIO | None = None, **facts: object
) -> None:
    """Send logs of the whole process to *stream* (standard error).

    Args:
        form: ``json`` for daemons, ``text`` for people, coloured on a terminal.
        level: Nothing below it is formatted.
        facts: Keys that every line carries, such as ``node_id`` and ``group``.
    """
    import structlog

    out = stream if stream is not None else sys.stderr
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**facts)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        # An error's traceback without local variables, which hold messages and secrets.
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=_traceback)
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        processors.append(structlog.processors.format_exc_info)
    else:
        processors.append(_escape_values)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )


def log_warnings_as_text() -> None:
    """Send warnings of this process to standard error, unless it configures its logs itself."""
    if "structlog" in sys.modules:
        import structlog

        if not structlog.is_configured():
            configure_logs(form="text", level="warning")
    elif not _before_first_line:
        _before_first_line.append(partial(configure_logs, form="text", level="warning"))


def get_logger(name: str) -> Any:
    """Return the logger of a module; where its lines go is decided line by line."""
    return _Logger(name)


@contextmanager
def brokers_log_here() -> Iterator[None]:
    """Send what daemons inside this process log to `logging`, while the block runs.

    A program that configured structlog keeps what it configured.
    """
    import structlog

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
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        if _before_first_line and not structlog.is_configured():
            _before_first_line[0]()
        chosen = structlog.get_logger() if structlog.is_configured() else _plain(self._name)
        return getattr(chosen, method)


@cache
def _plain(name: str) -> Any:
    import structlog

    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _one_line],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _one_line(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> tuple[tuple[str, str], dict[str, Any]]:
    """Return what `logging` takes: the event and its facts as one text, and the exception."""
    kept = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    words = [str(event.pop("event")), *(f"{key}={value!r}" for key, value in event.items())]
    return ("%s", " ".join(words)), kept


def _escape_values(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape the values and names of a log line; a step of structlog's."""
    return {
        escaped(name): escaped(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _traceback(out: io.TextIOBase | Any, error: Any) -> None:
    import structlog

    written = io.StringIO()
    structlog.dev.plain_traceback(written, error)
    out.write(escaped(written.getvalue(), keep=_LINE_ENDS))


def escaped(text: str, keep: str = "") -> str:
    """Return *text* with every character that is not printable written as ``\\x1b`` or the like."""
    if text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() or one in keep
        else one.encode("unicode_escape", "surrogatepass").decode("ascii")
        for one in text
    )
