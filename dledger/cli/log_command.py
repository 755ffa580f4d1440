"""``dledger log``: check and read the log of a stopped broker, and the history of its terms.

Nothing in the folder is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dledger.output import (
    CliError,
    ExitCode,
    Output,
    RowsOutput,
    Wide,
    note,
    print_json,
    print_table,
    show,
)
from dledger.remoting.addresses import join_address

if TYPE_CHECKING:
    from dledger.cli.log_verify import LogEntry, Segment

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

KINDS = {0: "no-op", 1: "records", 2: "config"}


@app.command
def verify(folder: Folder, /, *, output: Output = "table") -> int:
    """Check CRCs, chain, positions, offsets and queue units of a stopped broker; exit 1 if bad.

    Changes nothing, not even what the next start would repair.
    """
    import msgspec

    from dledger.cli.log_verify import refuse_running, verify_store
    from dledger.cli.progress import progress

    refuse_running(folder)
    with progress(0, "bytes") as line:
        report = verify_store(folder, line.to)
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
    from dledger.cli.log_verify import LogDamageError, walk
    from dledger.cli.progress import progress

    rows: list[dict[str, Any]] = []
    damage: LogDamageError | None = None
    with progress(0, "bytes") as line:
        try:
            for entry in walk(_segments(folder)):
                line.to(entry.header.end_position)
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
    from dledger.cli.log_verify import walk
    from dledger.cli.progress import progress

    with progress(0, "bytes") as line:
        rows = terms_of(_seen(walk(_segments(folder)), line.to))
    show(output, "", rows, WIDE_TERM_COLUMNS if wide else TERM_COLUMNS)


def _seen(entries: Iterable[LogEntry], to: Any) -> Iterable[LogEntry]:
    for entry in entries:
        to(entry.header.end_position)
        yield entry


def _segments(folder: Path) -> list[Segment]:
    from dledger.cli.log_verify import open_segments, refuse_running
    from dledger.commitlog.store_paths import StorePaths

    refuse_running(folder)
    commitlog = Path(StorePaths(str(folder)).commitlog)
    if not commitlog.is_dir():
        raise CliError(
            f"{folder} is not a data folder: there is no commitlog in it",
            next_step="give the folder that store.path_root_dir names",
            exit_code=ExitCode.USAGE,
        )
    return open_segments(commitlog)


def entry_row(entry: LogEntry) -> dict[str, Any]:
    """Return what is shown of an entry. Pure."""
    from dledger.commitlog.entry import record_sizes
    from dledger.commitlog.record import decode_record

    header = entry.header
    topics: dict[str, int] = {}
    first = ""
    start = header.body_start
    for size in record_sizes(entry.frame, header).tolist():
        record = decode_record(entry.frame, start)
        if not first:
            first = f"{record.topic} queue {record.queue_id} offset {record.queue_offset}"
        topics[record.topic] = topics.get(record.topic, 0) + 1
        start += size
    return {
        "index": header.index,
        "term": header.term,
        "time": _time(header.store_time_ms),
        "kind": KINDS.get(header.kind, str(header.kind)),
        "records": header.record_count,
        "bytes": header.size,
        "first": first,
        "position": header.position,
        "chain": f"{header.chain:016x}",
        "topics": topics,
    }


def terms_of(entries: Iterable[LogEntry]) -> list[dict[str, Any]]:
    """Return one row for each term, in order. Pure."""
    from dledger.commitlog.record import decode_record

    rows: list[dict[str, Any]] = []
    for entry in entries:
        header = entry.header
        if not rows or rows[-1]["term"] != header.term:
            rows.append(
                {
                    "term": header.term,
                    "began": _time(header.store_time_ms),
                    "first_index": header.index,
                    "entries": 0,
                    "records": 0,
                    "leader": None,
                }
            )
        row = rows[-1]
        row["entries"] += 1
        row["records"] += header.record_count
        if row["leader"] is None and header.record_count:
            row["leader"] = join_address(*decode_record(entry.frame, header.body_start).store_host)
    return rows


def _time(at_ms: int) -> str | None:
    """Return a store time as text; None: entries before the first message have none."""
    if not at_ms:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")[:23]
