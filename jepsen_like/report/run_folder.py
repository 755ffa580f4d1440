"""A run folder as it is on the disk: `result.json`, history, samples, plan, logs.

Read leniently: a part that is missing or damaged, or a field of another shape, costs that part and
a sentence, never the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import cbor2
import msgspec

from dledger.jepsen_like.checkers.verdict import Validity, Verdict
from dledger.jepsen_like.history.operation import (
    NEVER,
    CorruptHistoryError,
    F,
    History,
    LatestRows,
    Operation,
    Outcome,
    Row,
    RunHeader,
    Sample,
    iter_rows,
    read_samples,
)

PLAN_FILE: Final = "plan.json"
RESULT_FILE: Final = "result.json"
NO_END: Final = "the run did not end: it has no result.json"


class Skipped(msgspec.Struct, frozen=True):
    """A fault of the plan that was not done, why not, and how often."""

    kind: str
    reason: str = ""
    count: int = 1


class Result(msgspec.Struct):
    """The outcome of a run.

    Attributes:
        reason: Why it is unknown, or anything else in one sentence.
        counts: Operations by name and outcome, as its runner counted them.
        skipped: What was not done, and why.
        failover_ms: From the loss of a leader until the group served again.
        lost: Acknowledged messages that are lost; None: not counted.
        duplicated: Messages stored or delivered twice; likewise.
        asked: What a person typed.
        begin: Date and time.
        end: Likewise.
    """

    verdict: Validity = "unknown"
    reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    counts: dict[str, dict[str, int]] = {}
    faults: dict[str, int] = {}
    skipped: tuple[Skipped, ...] = ()
    failover_ms: tuple[float, ...] = ()
    lost: int | None = None
    duplicated: int | None = None
    command: str = ""
    asked: str = ""
    versions: dict[str, str] = {}
    begin: str = ""
    end: str = ""


def read_result(folder: Path) -> dict[str, Any]:
    """Return `result.json` of a run as it was written; an empty map if the run did not end.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    path = folder / RESULT_FILE
    result: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    return result


def kept_verdicts(folder: Path, judged: Collection[str] = ()) -> list[Verdict]:
    """Return the verdicts of a run that its history does not hold, from `result.json`.

    Liveness is one, files that could not be read another. A run that did not end is *unknown*; a
    folder of tables without a plan is no run and has none.

    *judged*: checkers whose verdicts are not wanted: they have judged the history again.
    """
    if not (folder / PLAN_FILE).is_file():
        return []
    if not (folder / RESULT_FILE).is_file():
        return [Verdict("run", "unknown", reason=NO_END)]
    verdicts = msgspec.convert(read_result(folder).get("verdicts", []), type=list[Verdict])
    return [verdict for verdict in verdicts if verdict.checker not in judged]


def decode_result(raw: bytes) -> tuple[Result, list[str]]:
    """Return the result in *raw*, and a sentence for everything that could not be understood."""
    try:
        given = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as error:
        return Result(reason="result.json is damaged"), [f"result.json is damaged: {error}."]
    result, notes = Result(), list[str]()
    for part in msgspec.structs.fields(Result):
        if given.get(part.name) is None:
            continue
        try:
            value = msgspec.convert(given[part.name], type=part.type, strict=False)
        except msgspec.ValidationError as error:
            notes.append(f"result.json, {part.name}: {error}.")
        else:
            setattr(result, part.name, value)
    return result, notes


SAMPLES_FILE: Final = "samples.cbor"

LOG_LINES_MAX: Final = 200
"""Last lines of each node's log that the page shows."""

LOG_TAIL_BYTES: Final = 256 * 1024
"""Bytes of a log's end that are read to find them; logs of long runs have gigabytes."""

LOG_LINE_CHARS: Final = 400
"""A longer line is cut: one dumped body must not be the page."""

PLAN_CHARS_MAX: Final = 200_000
"""A longer plan is cut in the page; the file beside it has the rest."""

_ARRAY, _LAST, _BREAK = b"\x9f", "last row", b"\xff"


@dataclass(slots=True)
class Run:
    """Everything a report is made from.

    Attributes:
        name: Of the folder.
        history: All history files in one, in the order of calls.
        is_whole: No history file is torn or damaged.
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
    """Return the rows in *data* up to the first damage, and a sentence about that."""
    try:
        items = cbor2.loads(b"".join((_ARRAY, data, cbor2.dumps(_LAST), _BREAK)))
        if items[-1:] == [_LAST]:
            return msgspec.convert(items[:-1], type=list[Row]), ""
    except (cbor2.CBORDecodeError, msgspec.ValidationError, ValueError, TypeError, OverflowError):
        pass  # the walk below reports what is wrong, and where
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
    run.samples, why = read_samples(_read(folder / SAMPLES_FILE, run))
    if why:
        run.notes.append(f"samples.cbor is damaged after {len(run.samples):,} samples: {why}.")
    run.samples.sort(key=lambda sample: sample.at_ns)


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        text = file.read(LOG_TAIL_BYTES).decode(errors="replace")
    return [line[:LOG_LINE_CHARS] for line in deque(text.splitlines(), LOG_LINES_MAX)]
