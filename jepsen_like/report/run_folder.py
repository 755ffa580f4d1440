"""A run folder as it lies on the disk: whatever of it is there, and what is wrong with the rest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import cbor2
import msgspec

from jepsen_like.history.operation import NEVER, F, History, Operation, Outcome, Row, RunHeader
from jepsen_like.history.sequence import CorruptHistoryError, LatestRows, iter_rows
from jepsen_like.report.result import PLAN_FILE, RESULT_FILE, Result, decode_result

SAMPLES_FILE: Final = "samples.cbor"

LOG_LINES_MAX: Final = 200
"""Last lines of each node's log that the page shows."""

LOG_TAIL_BYTES: Final = 256 * 1024
"""So much of a log's end is read to find them; logs of long runs have gigabytes."""

LOG_LINE_CHARS: Final = 400
"""A longer line is cut: one dumped body must not be the page."""

PLAN_CHARS_MAX: Final = 200_000
"""A longer plan is cut in the page; the file beside it has the rest."""

_ARRAY, _LAST, _BREAK = b"\x9f", "last row", b"\xff"


class Sample(msgspec.Struct, gc=False):
    """What one node said of itself at one moment.

    Attributes:
        at_ns: On the history's clock.
        node: Who.
        role: ``leader``, ``follower``, ``candidate``.
        term: Its term.
        commit_index: Newest entry it knows to be committed.
        last_index: Newest entry it has.
        is_up: It answered.
    """

    at_ns: int
    node: str
    role: str = ""
    term: int = 0
    commit_index: int = 0
    last_index: int = 0
    is_up: bool = True


@dataclass(slots=True)
class Run:
    """Everything a report is made from.

    Attributes:
        name: Of the folder.
        folder: As it was given.
        plan: As text, indented when it is JSON.
        result: What the run says of itself; unknown when it says nothing.
        history: All history files in one, in the order of calls.
        samples: In order of time.
        is_whole: No history file is torn or damaged.
        logs: Last lines of each node's log, by name.
        notes: One sentence for each thing that is missing or damaged.
    """

    name: str
    folder: Path = Path()
    plan: str = ""
    result: Result = field(default_factory=Result)
    history: History = field(default_factory=lambda: History(RunHeader(run_id="")))
    samples: list[Sample] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True


def read_run(folder: Path) -> Run:
    """Return what *folder* holds. What is missing or damaged is a note, never an error."""
    run = Run(folder.resolve().name, folder)
    _read_result(folder, run)
    _read_history(folder, run)
    _read_plan(folder, run)
    _read_samples(folder, run)
    for path in sorted((folder / "nodes").glob("*.log")):
        try:
            run.logs[path.stem] = _tail(path)
        except OSError as error:
            run.notes.append(f"nodes/{path.name} cannot be read: {error.strerror}.")
    return run


def _read(path: Path, run: Run) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        run.notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return b""


def _read_result(folder: Path, run: Run) -> None:
    raw = _read(folder / RESULT_FILE, run)
    if not raw:
        run.result.reason = "there is no result.json: the run did not come to its end"
        run.notes.append("There is no result.json: the run did not come to its end.")
        return
    run.result, notes = decode_result(raw)
    run.notes += notes


def _read_plan(folder: Path, run: Run) -> None:
    raw = _read(folder / PLAN_FILE, run) or run.history.header.plan.encode()
    if not raw:
        run.notes.append("There is no plan.json.")
        return
    try:
        text = msgspec.json.format(raw, indent=2).decode()
    except msgspec.DecodeError as error:
        run.notes.append(f"plan.json is no JSON: {error}.")
        text = raw.decode(errors="replace")
    run.plan = text[:PLAN_CHARS_MAX] + ("\n…" if len(text) > PLAN_CHARS_MAX else "")


def _read_history(folder: Path, run: Run) -> None:
    paths = sorted((folder / "history").glob("*.cbor"))
    latest = LatestRows()
    for path in paths:
        rows, note = rows_of(_read(path, run))
        latest.add(rows)
        if note:
            run.is_whole = False
            run.notes.append(f"history/{path.name}: {note}")
    run.history = latest.history()
    known = [op for op in run.history.operations if _is_known(op)]
    if left := len(run.history.operations) - len(known):
        run.notes.append(f"{left:,} operations are of a kind that is not known here; left out.")
    run.history.operations = known
    run.history.operations.sort(key=lambda op: (op.call_ns, op.op_id))
    run.history.events.sort(key=lambda event: event.at_ns)
    if not paths:
        run.notes.append("There is no history: no file history/*.cbor.")
    elif not run.history.operations:
        run.notes.append("The history is empty: it has no operation.")


def _is_known(op: Operation) -> bool:
    return (
        0 <= op.f < len(F)
        and 0 <= op.outcome < len(Outcome)
        and min(op.call_ns, op.ret_ns, op.op_id) >= -NEVER
        and max(op.call_ns, op.ret_ns, op.op_id) <= NEVER
    )


def rows_of(data: bytes) -> tuple[list[Row], str]:
    """Return the rows in *data* up to the first damage, and a sentence about that.

    A whole sequence is decoded at once, which is five times as fast; only one that is not whole
    is walked row by row to find out where it ends.
    """
    try:
        items = cbor2.loads(b"".join((_ARRAY, data, cbor2.dumps(_LAST), _BREAK)))
        if items[-1:] == [_LAST]:
            return msgspec.convert(items[:-1], type=list[Row]), ""
    except (cbor2.CBORDecodeError, msgspec.ValidationError, ValueError, TypeError, OverflowError):
        pass  # the walk below says what is wrong, and where
    rows: list[Row] = []
    end = 0
    try:
        for row, end in iter_rows(data):  # noqa: B007  # the last end is wanted
            rows.append(row)
    except CorruptHistoryError as error:
        return rows, f"damaged after {len(rows):,} rows: {error}. What follows is not in this page."
    left = len(data) - end
    return rows, f"torn: {left:,} bytes at its end are no whole row." if left else ""


def _read_samples(folder: Path, run: Run) -> None:
    raw = _read(folder / SAMPLES_FILE, run)
    decoder = cbor2.CBORDecoder(BytesIO(raw))
    try:
        while True:
            item: Any = decoder.decode()
            run.samples.append(msgspec.convert(item, type=Sample, strict=False))
    except cbor2.CBORDecodeEOF:
        pass  # its end, or a torn last one: a sample more or less shows nothing
    except (cbor2.CBORDecodeError, msgspec.ValidationError, ValueError, TypeError) as error:
        run.notes.append(f"samples.cbor is damaged after {len(run.samples):,} samples: {error}.")
    run.samples.sort(key=lambda sample: sample.at_ns)


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        text = file.read(LOG_TAIL_BYTES).decode(errors="replace")
    return [line[:LOG_LINE_CHARS] for line in deque(text.splitlines(), LOG_LINES_MAX)]
