"""Runs of fault injection in a folder: their verdicts, and the report of each.

The files were written by another program, perhaps elsewhere. They are read leniently, and a report
is shown in a sandbox: nothing in it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dledger.console.console import Console, RefusedError
from dledger.console.guard import REPORT_POLICY
from dledger.console.paging import matching, paged

RESULT_FILE: Final = "result.json"
REPORT_FILE: Final = "report.html"
RESULT_BYTES_MAX: Final = 8 << 20
"""A larger result is not read: one with a thousand anomalies has a few hundred kilobytes."""
REPORT_BYTES_MAX: Final = 64 << 20
RUNS_MAX: Final = 5_000
"""Folders that are listed, the newest names first."""
ANOMALIES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run.

    Attributes:
        verdict: ``valid``, ``invalid`` or ``unknown``.
        anomalies: What checkers found, a sentence each.
        operations: How many clients did.
        has_report: There is a report to open.
    """

    name: str
    verdict: str
    reason: str = ""
    begin: str = ""
    operations: int | None = None
    faults: str = ""
    failover_ms: float | None = None
    lost: int | None = None
    duplicated: int | None = None
    anomalies: tuple[str, ...] = ()
    command: str = ""
    has_report: bool = False


def run_row(name: str, result: Mapping[str, Any], has_report: bool) -> RunRow:
    """Return what the list shows of a run. Pure."""
    counts = result.get("counts")
    faults = result.get("faults")
    anomalies = [
        f"{violation.get('name', '')}: {violation.get('subject', '')}"
        for checker in _list(result.get("verdicts"))
        for violation in _list(checker.get("violations"))
    ]
    if len(anomalies) > ANOMALIES_SHOWN:
        anomalies[ANOMALIES_SHOWN:] = [f"and {len(anomalies) - ANOMALIES_SHOWN} more"]
    verdict = str(result.get("verdict", "unknown"))
    return RunRow(
        name,
        verdict if verdict in ("valid", "invalid") else "unknown",
        str(result.get("reason") or ""),
        str(result.get("begin") or ""),
        _sum(counts),
        ", ".join(f"{kind} {count}" for kind, count in faults.items())
        if isinstance(faults, dict)
        else "",
        _figure(result.get("failover_ms")),
        _whole(result.get("lost")),
        _whole(result.get("duplicated")),
        tuple(anomalies),
        str(result.get("command") or ""),
        has_report,
    )


def _list(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _figure(value: Any) -> float | None:
    if isinstance(value, list):
        value = max((each for each in value if isinstance(each, int | float)), default=None)
    return float(value) if isinstance(value, int | float) else None


def _sum(counts: Any) -> int | None:
    if not isinstance(counts, dict):
        return None
    return sum(
        count
        for outcomes in counts.values()
        if isinstance(outcomes, dict)
        for count in outcomes.values()
        if isinstance(count, int)
    )


def run_names(folder: Path) -> list[str]:
    """Return the names of the folders with a run, the newest name first; reads the disk."""
    try:
        found = [each.name for each in folder.iterdir() if each.is_dir()]
    except OSError:
        return []
    return sorted(found, reverse=True)[:RUNS_MAX]


def read_run(folder: Path, name: str) -> RunRow:
    """Return one run; a damaged one has an unknown verdict and the reason. Reads the disk."""
    path = folder / name / RESULT_FILE
    has_report = (folder / name / REPORT_FILE).is_file()
    try:
        if path.stat().st_size > RESULT_BYTES_MAX:
            return RunRow(name, "unknown", "its result is too large", has_report=has_report)
        result = json.loads(path.read_bytes())
    except FileNotFoundError:
        reason = "the run did not end: it has no result"
        return RunRow(name, "unknown", reason, has_report=has_report)
    except (OSError, ValueError, RecursionError) as error:
        return RunRow(name, "unknown", f"its result cannot be read: {error}", has_report=has_report)
    if not isinstance(result, dict):
        return RunRow(name, "unknown", "its result is none", has_report=has_report)
    return run_row(name, result, has_report)


def read_report(folder: Path, name: str) -> bytes:
    """Return the report of a run; reads the disk.

    Raises:
        RefusedError: There is no such run, or it has no report that can be shown.
    """
    if name not in run_names(folder):
        raise RefusedError("there is no such run", 404)
    path = folder / name / REPORT_FILE
    try:
        if path.stat().st_size > REPORT_BYTES_MAX:
            raise RefusedError("the report is too large to be shown here")
        return path.read_bytes()
    except OSError as error:
        raise RefusedError("the run has no report: dledger chaos report makes it", 404) from error


async def runs(request: Request) -> Response:
    """Show the runs, page by page."""
    console: Console = request.app.state.console
    folder = console.settings.runs
    query = request.query_params.get("q", "")
    names = [] if folder is None else run_names(folder)
    page = paged(matching(names, query), request.query_params.get("page"), {"q": query})
    rows = [] if folder is None else [read_run(folder, name) for name in page.rows]
    return console.page(
        request,
        "runs.html.j2",
        "Runs of fault injection",
        rows=rows,
        listing=page,
        query=query,
        has_folder=folder is not None,
    )


async def report(request: Request) -> Response:
    """Show the report of one run, in a sandbox."""
    console: Console = request.app.state.console
    if console.settings.runs is None:
        raise RefusedError("no folder of runs was given", 404)
    body = read_report(console.settings.runs, request.query_params.get("name", ""))
    return Response(
        body,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": REPORT_POLICY},
    )
