"""``dledger log``: check and read the log of a stopped broker, and the history of its terms.

Nothing in the folder is changed. What reads it is loaded when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from dledger.cli.progress import progress
from dledger.output import ExitCode, Output, RowsOutput, Wide, note, print_json, print_table, show

app = App(name="log", help="Check and read the data folder of a stopped broker.", backend="trio")

Folder = Annotated[Path, Parameter(help="Data folder of the broker.")]

ENTRY_COLUMNS = ("index", "term", "time", "records", "holds")
WIDE_ENTRY_COLUMNS = (
    "index",
    "term",
    "time",
    "kind",
    "records",
    "bytes",
    "position",
    "chain",
    "topics",
)
TERM_COLUMNS = ("term", "began", "first_index", "records", "leader")
WIDE_TERM_COLUMNS = ("term", "began", "first_index", "entries", "records", "leader")


@app.command
def verify(folder: Folder, /, *, output: Output = "table") -> int:
    """Check everything in the data folder of a stopped broker; exit 1 if anything is wrong.

    Checksums, chain and positions of entries, every record, the units of queues, the entry index
    and the key index. Changes nothing, not even what the next start would repair.
    """
    from dledger.log_report import verify_store

    with progress(0, "pieces") as line:
        report = verify_store(folder.resolve(), line.to)
    is_good = not report.problem_count
    shown = msgspec.to_builtins(report)
    if output == "json":
        print_json({"good": is_good, **shown})
    else:
        texts = [("problem", shown.pop("problems")), ("note", shown.pop("notes"))]
        rows = [[name.replace("_", " "), str(value)] for name, value in shown.items()]
        rows += [[name, text] for name, every in texts for text in every]
        print_table("", ["what", "value"], [*rows, ["verdict", "good" if is_good else "BAD"]])
    return ExitCode.OK if is_good else ExitCode.FAILED


@app.command
def inspect(
    folder: Folder,
    /,
    *,
    from_: Annotated[int, Parameter(name="--from", help="Index of the first entry.")] = 0,
    count: Annotated[int, Parameter(help="Entries to show at most.")] = 20,
    topic: Annotated[str, Parameter(help="Only entries with messages of this topic.")] = "",
    wide: Wide = False,
    output: RowsOutput = "table",
) -> int:
    """List entries of a stopped broker's log: index, term, time, and the first message or kind.

    Every entry up to the last one shown is checked; damage ends the list with exit 1.
    """
    from dledger.log_report import LogDamageError, entries_of, entry_row, stopped_folder

    rows: list[dict[str, Any]] = []
    damage: LogDamageError | None = None
    with progress(0, "bytes") as line:
        try:
            for entry in entries_of(stopped_folder(folder), line.to):
                if entry.header.index < from_:
                    continue
                row = entry_row(entry)
                if topic and topic not in row["topics"]:
                    continue
                if len(rows) == count:
                    break
                rows.append(row)
        except LogDamageError as error:
            damage = error
    if output == "table" and not wide:
        rows = [{**row, "holds": row["first"] or row["kind"]} for row in rows]
    show(output, "", rows, WIDE_ENTRY_COLUMNS if wide else ENTRY_COLUMNS)
    if damage is not None:
        note(f"the log cannot be read further: {damage}")
        return ExitCode.FAILED
    return ExitCode.OK


def history(folder: Folder, /, *, wide: Wide = False, output: RowsOutput = "table") -> None:
    """List the terms of a stopped broker's log: when each leader began and what it stored.

    A leader begins its term with an entry of its own; an address is that of the first message.
    """
    from dledger.log_report import entries_of, stopped_folder, terms_of

    with progress(0, "bytes") as line:
        rows = terms_of(entries_of(stopped_folder(folder), line.to))
    show(output, "", rows, WIDE_TERM_COLUMNS if wide else TERM_COLUMNS)
