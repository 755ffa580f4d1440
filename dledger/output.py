"""What commands print: a table for people, JSON for programs, one line for an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from cyclopts import Parameter, convert

from dledger.commitlog.errors import MQError
from dledger.remoting.log import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dledger.settings.schema import Config


class ExitCode(IntEnum):
    """What a command's exit status means."""

    OK = 0
    FAILED = 1
    """A check failed, the cluster is not healthy, or what was asked for was refused."""
    USAGE = 2
    """Bad command line or configuration; nothing was started."""
    UNREACHABLE = 3
    """No NameServer or broker could be reached."""


class CliError(MQError):
    """Ends a command: one line for the person, and an exit status."""

    def __init__(
        self, message: str, *, next_step: str = "", exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(f"{message}; {next_step}" if next_step else message)
        self.exit_code = exit_code


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, whatever its depth; of another error itself. Pure."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves_of(inner)]


def utc(at_ms: int, *, to: str = "milliseconds") -> str:
    """Return a time, in milliseconds since the epoch, as text. Pure."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=to)


Output = Annotated[
    Literal["table", "json"],
    Parameter(name=["--output", "-o"], help="table for people, json for programs."),
]

RowsOutput = Annotated[
    Literal["table", "json", "csv"],
    Parameter(
        name=["--output", "-o"],
        help="table for people, json for programs, csv for sheets.",
    ),
]

PrintSettings = Annotated[
    bool,
    Parameter(
        name=["--print-settings", "-p"],
        negative="",
        help="Print every setting with its source and exit.",
    ),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], Parameter(help="Least level that is logged.")
]
LogFormOption = Annotated[
    Literal["json", "text"] | None, Parameter(help="json, or text for people; text on a terminal.")
]

TopicName = Annotated[str, Parameter(help="Name of the topic.")]
GroupName = Annotated[str, Parameter(help="Name of the consumer group.")]

Namesrv = Annotated[
    str,
    Parameter(
        name=["--namesrv", "-n"],
        env_var="NAMESRV_ADDR",
        help="NameServers, host:port;host:port.",
    ),
]
Wide = Annotated[bool, Parameter(name=["--wide", "-w"], help="Show all columns.")]
Yes = Annotated[
    bool,
    Parameter(name="--yes", negative="", help="Do it; without it only print what would change."),
]

SHOWN_CHARS: Final = 32
"""Of a value that is refused."""

DEFAULT_NAMESRV = "127.0.0.1:9876"


def addresses(namesrv: str) -> list[str]:
    """Return the addresses in ``host:port;host:port``.

    Raises CliError: one of them is not an address; a usage error.
    """
    from dledger.settings.schema import parse_addresses

    try:
        found = list(parse_addresses(namesrv))
    except ValueError as error:
        raise CliError(f"--namesrv: {error}", exit_code=ExitCode.USAGE) from None
    if not found:
        raise CliError(
            "--namesrv names no NameServer",
            next_step="give --namesrv host:port",
            exit_code=ExitCode.USAGE,
        )
    return found


def no_less_than_0(_kind: object, value: float | None) -> None:
    """Refuse an option's number that is below 0, or none.

    Raises ValueError: it is; a usage error.
    """
    if value is not None and not value >= 0:
        raise ValueError("must be 0 or more")


_WHOLE_NUMBER: Final = re.compile("[+-]?[0-9]{1,19}")


def read_option(hint: Any, tokens: Any) -> Any:
    """Return the value of an option; the library rounds 1.5, and reads 1_0 and other scripts.

    Raises ValueError: it cannot be read; a usage error.
    """
    if hint is int or int in get_args(hint):
        for token in tokens:
            if _WHOLE_NUMBER.fullmatch(token.value) is None:
                raise ValueError(f"{token.value[:SHOWN_CHARS]!r} is no whole number")
    return convert(hint, tokens)


def print_json(value: object) -> None:
    """Print one JSON document."""
    import msgspec

    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


PIPE_CHARS = 200
"""A pipe has no width: what reads it wants the cells whole."""

LAST_COLUMN_MIN_CHARS = 16
"""The last column is wrapped down to this width; then rows are printed as records."""


def make_console() -> Console:
    """Return a console for standard output; it raises BrokenPipeError where `print` does."""
    from rich.console import Console

    class ReadByOthers(Console):
        def on_broken_pipe(self) -> None:
            # The library would end the process with status 1.
            raise BrokenPipeError

    return ReadByOthers()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers are aligned to the right.

    Where it is wider than the terminal, its last column is wrapped; where that is not enough, each
    row is a record: a line for each column.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for place, name in enumerate(columns):
        numeric = _is_numeric([row[place] for row in rows])
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    cells = [[cell_text(value) for value in row] for row in rows]
    for row in cells:
        table.add_row(*map(Text, row))
    console = make_console()
    if not console.is_terminal:
        console.width = max(console.width, PIPE_CHARS)
    if title:
        console.print(Text(title, style="bold"))
    if len(columns) > RECORD_COLUMNS:
        for column in table.columns[:-1]:
            column.no_wrap = True
        if _least_chars(columns, cells) > console.width:
            table = _as_records(columns, cells)
    console.print(table)


def _is_numeric(values: Sequence[object]) -> bool:
    """Return whether a column has numbers, and at most gaps beside them. Pure."""
    known = [value for value in values if value is not None]
    return bool(known) and all(type(value) in (int, float) for value in known)


RECORD_COLUMNS = 2
"""Columns of a table of records: a name and its value."""


def _least_chars(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table in which only the last column is wrapped. Pure."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(line) for cell in column for line in (cell.splitlines() or [""]))
        for column in zip(columns, *rows, strict=True)
    ]
    widths[-1] = min(widths[-1], LAST_COLUMN_MIN_CHARS)
    return sum(widths) + 3 * len(widths) + 1


def _as_records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with a section for each row, and a line of it for each column."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        for name, cell in zip(columns, row, strict=True):
            table.add_row(name, Text(cell))
        table.add_section()
    return table


def cell_text(value: object) -> str:
    """Return what a table shows of a value: escaped, so that no name moves the cursor."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return escaped(str(value), keep="\n")


def print_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with a head line; what is no text or number stands there as JSON."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csvcell_text(row.get(name)) for name in columns])
    sys.stdout.flush()


def _csvcell_text(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    import msgspec

    return msgspec.json.encode(value, enc_hook=str).decode()


def show(
    output: Literal["table", "json", "csv"],
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
) -> None:
    """Print *rows* as a table of *columns*, or whole: as a JSON array or as CSV."""
    if output == "json":
        print_json(list(rows))
        return
    if output == "csv":
        print_csv(list(rows[0]) if rows else list(columns), rows)
        return
    if not rows:
        note(f"{title}: none" if title else "there is nothing to show")
        return
    print_table(
        title,
        [name.replace("_", " ") for name in columns],
        [[row.get(name) for name in columns] for row in rows],
    )


def show_facts(
    output: str, title: str, facts: Mapping[str, Any], names: Iterable[str] | None = None
) -> None:
    """Print what came of a command: all as JSON, or a table of those *names* that have a value.

    *names*: None: all.
    """
    if output == "json":
        print_json(facts)
        return
    shown = {name: facts[name] for name in (facts if names is None else names)}
    rows = [[name.replace("_", " "), value] for name, value in shown.items() if value != ""]
    print_table(title, ["what", "value"], rows)


def answer(output: str, value: object, *sentences: str) -> None:
    """Print what came of a command: one JSON document, or sentences for people."""
    if output == "json":
        print_json(value)
        return
    for sentence in sentences:
        note(sentence)


def note(text: str) -> None:
    """Tell the person something; standard output stays for results."""
    sys.stderr.write(escaped(text, keep="\n") + "\n")
    sys.stderr.flush()


REFRESHES_PER_S: Final = 4


@contextmanager
def live_text(*, is_shown: bool) -> Iterator[Callable[[str], object]]:
    """Yield what replaces the lines that a person watches on standard error; nothing is written
    where that is no terminal.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    with Live(console=console, refresh_per_second=REFRESHES_PER_S) as live:
        yield live.update


# ---------------------------------------------------------------------------------- daemons


def begin_log(
    config: Config, level: str, form: Literal["json", "text"] | None, **facts: str
) -> None:
    """Send logs to standard error, the warnings of *config* first; *facts*: of every line."""
    import structlog

    from dledger.remoting.log import configure_logs

    form = form or ("text" if sys.stderr.isatty() else "json")
    configure_logs(form=form, level=level, stream=None, **facts)
    log = structlog.get_logger()
    for warning in config.warnings:
        log.warning("config_warning", text=warning)


def log_settings(config: Config) -> None:
    """Log what is not a default."""
    import structlog

    structlog.get_logger().info(
        "settings",
        **{path: f"{value} ({source})" for path, value, source in config.changed_settings()},
    )
