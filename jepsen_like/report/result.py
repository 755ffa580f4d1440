"""`result.json`: what a run says of itself when it is over. Read leniently, written by others.

A field that is missing or of another shape costs that field and a sentence, never the page.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from jepsen_like.checkers.verdict import Validity, Verdict

PLAN_FILE: Final = "plan.json"
RESULT_FILE: Final = "result.json"
NO_END: Final = "the run did not end: it has no result.json"

_WALL_CLOCK_NS: Final = 10**15
"""Numbers above it are nanoseconds since 1970, below it seconds."""


class Skipped(msgspec.Struct, frozen=True):
    """A fault of the plan that was not done.

    Attributes:
        kind: What the plan asked for.
        reason: Why not.
        count: How often.
    """

    kind: str
    reason: str = ""
    count: int = 1


class Result(msgspec.Struct):
    """The outcome of a run.

    Attributes:
        verdict: Over everything.
        reason: Why it is unknown, or anything else in one sentence.
        verdicts: One per checker.
        counts: Operations by name and outcome, as whoever ran it counted them.
        faults: How often each kind was done.
        skipped: What was not done, and why.
        failover_ms: From the loss of a leader until the group served again.
        lost: Acknowledged messages that are gone; None: nobody counted.
        duplicated: Messages stored or delivered twice; likewise.
        command: Repeats the run.
        asked: What a person typed.
        versions: What ran.
        begin: Date and time, as text, or seconds or nanoseconds since 1970.
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

    Args:
        judged: Checkers whose verdicts are not wanted: they have judged the history again.
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
        told = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as error:
        return Result(reason="result.json is damaged"), [f"result.json is damaged: {error}."]
    told = {**told, "skipped": _skipped(told.get("skipped"))}
    if isinstance(told.get("command"), list):
        told["command"] = " ".join(map(str, told["command"]))
    for name in ("begin", "end"):
        told[name] = _stamp(told.get(name))
    result, notes = Result(), list[str]()
    for field in msgspec.structs.fields(Result):
        if told.get(field.name) is None:
            continue
        try:
            value = msgspec.convert(told[field.name], type=field.type, strict=False)
        except msgspec.ValidationError as error:
            notes.append(f"result.json, {field.name}: {error}.")
        else:
            setattr(result, field.name, value)
    return result, notes


def _skipped(told: Any) -> list[dict[str, Any]]:
    """Take a list of objects, of pairs or of words, or a mapping from kind to reason."""
    pairs = list(told.items()) if isinstance(told, dict) else told
    if not isinstance(pairs, list):
        return []
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        if isinstance(pair, dict) and "kind" in pair:
            rows.append({key: pair[key] for key in ("kind", "reason", "count") if key in pair})
        elif isinstance(pair, (list, tuple)) and len(pair) == 2:
            rows.append({"kind": str(pair[0]), "reason": str(pair[1])})
        else:
            rows.append({"kind": str(pair)})
    return rows


def _stamp(told: Any) -> str | None:
    if isinstance(told, bool) or not isinstance(told, (int, float)):
        return None if told is None else str(told)
    seconds = told / 1e9 if told > _WALL_CLOCK_NS else told
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return str(told)
