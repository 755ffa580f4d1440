"""What commands print: a table for people, JSON for programs, one line for an error."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from commitlog.errors import MQError
from remoting.escaped_text import escaped


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
    """Ends a command: one line for the person, and an exit status.

    Args:
        message: What happened.
        next_step: What the person can do now.
    """

    def __init__(
        self, message: str, *, next_step: str = "", exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(f"{message}; {next_step}" if next_step else message)
        self.exit_code = exit_code


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

Namesrv = Annotated[
    str,
    Parameter(
        name=["--namesrv", "-n"],
        env_var="NAMESRV_ADDR",
        help="NameServers, host:port;host:port.",
    ),
]
DEFAULT_NAMESRV = "127.0.0.1:9876"


def addresses(namesrv: str) -> list[str]:
    """Return the addresses in ``host:port;host:port``.

    Raises:
        CliError: One of them is not an address; a usage error.
    """
    from remoting.settings.schema import parse_addresses

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


def print_json(value: object) -> None:
    """Print one JSON document."""
    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for place, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[place], (int, float)) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console()
    if not console.is_terminal:
        # A pipe has no width: what reads it wants the cells whole.
        console.width = max(console.width, 200)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return escaped(str(value), keep="\n")


def print_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with a head line; what is no text or number stands there as JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row.get(name)) for name in columns])
    sys.stdout.flush()


def _csv_cell(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
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


def note(text: str) -> None:
    """Tell the person something; standard output stays for results."""
    sys.stderr.write(escaped(text, keep="\n") + "\n")
    sys.stderr.flush()
