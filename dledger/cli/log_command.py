"""``dledger log``: what stands in a data folder."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
from cyclopts import App

from dledger.cli.output import CliError, ExitCode, Output, print_json, print_table

app = App(name="log", help="Check the data folder of a stopped broker.", backend="trio")


@app.command
def verify(folder: Path, /, *, output: Output = "table") -> int:
    """Check CRCs, chain, positions, offsets and queue units of a stopped broker; exit 1 if bad.

    Nothing is changed, not even what the next start would repair.
    """
    from dledger.cli.log_verify import verify_store

    _refuse_running(folder)
    report = verify_store(folder)
    if output == "json":
        print_json({"good": report.good, **msgspec.to_builtins(report)})
    else:
        rows = [
            [name.replace("_", " "), value]
            for name, value in msgspec.to_builtins(report).items()
            if name not in ("problems", "notes")
        ]
        rows += [["problem", text] for text in report.problems]
        rows += [["note", text] for text in report.notes]
        rows.append(["verdict", "good" if report.good else "BAD"])
        print_table("", ["what", "value"], [[name, str(value)] for name, value in rows])
    return ExitCode.OK if report.good else ExitCode.FAILED


def _refuse_running(folder: Path) -> None:
    """Raise when a broker holds the folder: its log changes while it is read."""
    lock = folder / "lock"
    if not lock.exists():
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(
                f"{folder} is in use by a running broker", next_step="stop it first"
            ) from None
