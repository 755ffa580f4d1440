"""From a run folder to `report.html` and `pictures/*.png` in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.history.operation import Operation
from dledger.jepsen_like.report.picture_parts import Facts, parts_of
from dledger.jepsen_like.report.run_folder import Run, read_run
from dledger.jepsen_like.report.series import (
    Columns,
    Fault,
    availability_of,
    columns_of,
    counts_of,
    faults_of,
    leaderships_of,
    skipped_of,
    span_of,
)
from dledger.jepsen_like.report.wording import (
    describe,
    duration_text,
    kind_text,
    verdict_sentence,
    when_text,
)

REPORT_FILE: Final = "report.html"
PICTURES_FOLDER: Final = "pictures"
PAGE_TEMPLATE: Final = "page.html.j2"

ANOMALIES_OPEN: Final = 10
"""Rows that are open; one bug makes hundreds that say the same."""

ANOMALIES_MAX: Final = 100
"""Rows of the table; checkers name the first few of each kind, and one bug makes thousands."""

FAULT_ROWS_MAX: Final = 300
"""Rows of the table of faults; the plan and the history have all."""

WITNESSES_MAX: Final = 8
"""Operations quoted per anomaly; a cycle through more helps no reader."""

_OUTCOMES: Final = ("ok", "info", "fail")


def report(run_folder: Path) -> Path:
    """Write `report.html` and `pictures/*.png` into *run_folder* and return the page's path.

    What is missing or damaged in the folder is shown in the page. A page that was there stays
    until the new one is whole.

    Raises OSError: the folder cannot be written to.
    """
    (run_folder / PICTURES_FOLDER).mkdir(exist_ok=True)
    page = _page_of(read_run(run_folder), run_folder / PICTURES_FOLDER)
    html = environment().get_template(PAGE_TEMPLATE).render(page=page)
    part = run_folder / f"{REPORT_FILE}.part"
    part.write_text(html, encoding="utf-8")
    return part.replace(run_folder / REPORT_FILE)


def environment() -> Environment:
    """Return what renders this package's templates; everything that is not markup is escaped."""
    return Environment(
        loader=PackageLoader("dledger.jepsen_like.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def _page_of(run: Run, pictures_folder: Path) -> dict[str, object]:
    """Return all that the page of *run* states, for its template; write PNG files beside it."""
    history, result = run.history, run.result
    columns = columns_of(history.operations)
    span = span_of(columns, history.events, run.samples)
    faults = faults_of(history.events, span, result.faults)
    facts = Facts(
        columns,
        span,
        faults,
        leaderships_of(history.events, run.samples, span),
        counts_of(columns),
        # The run's own count stands where the history has lost its events.
        dict(Counter(fault.kind for fault in faults)) or dict(result.faults),
        availability_of(columns, span),
        _witnesses(columns, history.operations, result.verdicts),
    )
    sentence = verdict_sentence(
        result,
        facts.counts,
        facts.fault_counts,
        facts.witnesses,
        span.begin_ns,
        is_whole=run.is_whole,
    )
    violations = [violation for verdict in result.verdicts for violation in verdict.violations]
    return {
        "name": run.name,
        "headline": _headline(run, facts),
        "verdict": sentence.split(":")[0],
        "sentence": sentence,
        "notes": run.notes + _disagreements(result.counts, facts.counts),
        "operations": _operations_table(facts.counts),
        "facts": _key_facts(run, facts),
        "checkers": [_checker_row(verdict) for verdict in result.verdicts],
        "pictures": parts_of(run, facts, violations, pictures_folder),
        "skipped": result.skipped or skipped_of(history.events),
        "faults": [_fault_row(fault) for fault in faults[:FAULT_ROWS_MAX]],
        "faults_left": max(0, len(faults) - FAULT_ROWS_MAX),
        "anomaly_counts": Counter((v.name, v.checker) for v in violations),
        "anomalies": [_anomaly(v, facts) for v in violations[:ANOMALIES_OPEN]],
        "more_anomalies": [_anomaly(v, facts) for v in violations[ANOMALIES_OPEN:ANOMALIES_MAX]],
        "anomalies_left": max(0, len(violations) - ANOMALIES_MAX),
        "no_anomalies": _no_anomalies(result.verdicts),
        "logs": run.logs,
        "plan": run.plan,
        "command": result.command,
        "asked": result.asked,
        "minimize": f"dledger-chaos minimize {run.folder}"
        if sentence.startswith("invalid")
        else "",
    }


def _witnesses(
    columns: Columns, operations: Sequence[Operation], verdicts: Sequence[Verdict]
) -> dict[int, Operation]:
    named = [at for verdict in verdicts for v in verdict.violations for at in v.operations]
    places: list[int] = np.flatnonzero(np.isin(columns.op_id, named)).tolist() if named else []
    return {operations[place].op_id: operations[place] for place in places}


def _headline(run: Run, facts: Facts) -> tuple[str, ...]:
    stamps = [stamp for stamp in (run.result.begin, run.result.end) if stamp]
    return (*([" to ".join(stamps)] if stamps else []), duration_text(facts.span.duration_s))


def _disagreements(
    given: Mapping[str, Mapping[str, int]], counted: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Say where the run counted other than the history: rows are missing, or there are too many."""
    wrong = [
        f"{name} {outcome}: {given[name].get(outcome, 0):,} and {in_history:,}"
        for name in given
        for outcome in _OUTCOMES
        if given[name].get(outcome, 0) != (in_history := counted.get(name, {}).get(outcome, 0))
    ]
    if not wrong:
        return []
    return [f"result.json and the history differ in their counts ({'; '.join(wrong)})."]


def _operations_table(counts: Mapping[str, Mapping[str, int]]) -> list[tuple[str, list[int]]]:
    """Return the counts of each operation, their sum behind them; the last row is of all."""
    rows = [(name, [by[o] for o in _OUTCOMES]) for name, by in counts.items()]
    rows.append(("all", [sum(by[o] for by in counts.values()) for o in _OUTCOMES]))
    return [(name, [*row, sum(row)]) for name, row in rows]


def _key_facts(run: Run, facts: Facts) -> tuple[tuple[str, str], ...]:
    seconds = max(facts.span.duration_s, 1.0)
    share = facts.availability.share
    rows = [
        ("took", duration_text(facts.span.duration_s)),
        ("operations per second", f"{len(facts.columns) / seconds:,.1f}"),
    ]
    if share == share:  # not NaN: there were sends
        rows.append(("seconds with a send acknowledged", f"{share:.1%}"))
    kinds = ", ".join(f"{kind_text(k)} {n}" for k, n in sorted(facts.fault_counts.items()))
    for name, count in (("lost", run.result.lost), ("duplicated", run.result.duplicated)):
        if count is not None:
            rows.append((name, f"{count:,}"))
    rows.append(("faults", kinds or "none"))
    rows += [(name, version) for name, version in sorted(_versions(run).items())]
    return tuple(rows)


def _versions(run: Run) -> dict[str, str]:
    return run.result.versions or run.history.header.versions


def _checker_row(verdict: Verdict) -> tuple[str, str, str]:
    looked = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in verdict.counts.items())
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return verdict.checker, f"{verdict.validity}{reason}", looked


def _fault_row(fault: Fault) -> tuple[str, str, str, str]:
    lasted = fault.end_s - fault.begin_s
    text = f"{lasted:,.1f} s" if lasted > 0 else ""
    return f"{fault.begin_s:,.1f} s", kind_text(fault.kind), fault.node, text


def _no_anomalies(verdicts: Sequence[Verdict]) -> str:
    passed = sum(verdict.is_valid for verdict in verdicts)
    if not verdicts:
        return "No checker's verdict was kept, so nothing is proved."
    return f"None was found: {passed} of {len(verdicts)} checkers say valid."


def _anomaly(violation: Violation, facts: Facts) -> tuple[Violation, str, list[str]]:
    """Return it, when it showed, and its witnesses as text."""
    begin_ns = facts.span.begin_ns
    quoted = [
        describe(facts.witnesses[op_id], begin_ns)
        if op_id in facts.witnesses
        else f"operation {op_id}: not in the history"
        for op_id in violation.operations[:WITNESSES_MAX]
    ]
    return violation, when_text(violation, begin_ns), quoted
