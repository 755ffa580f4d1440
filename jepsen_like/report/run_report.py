"""From a run folder to `report.html` and `pictures/*.png` in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from markupsafe import Markup

from jepsen_like.checkers.verdict import Verdict, Violation
from jepsen_like.history.operation import Operation
from jepsen_like.report.faults import Fault, faults_of, skipped_of
from jepsen_like.report.order import orders_of
from jepsen_like.report.page import Anomaly, OperationRow, Page, PageFigure, Part, render
from jepsen_like.report.pictures import Pictures
from jepsen_like.report.roles import Reign, down_of, lag_of, nodes_of, reigns_of
from jepsen_like.report.run_folder import Run, read_run
from jepsen_like.report.series import (
    Availability,
    Columns,
    Span,
    availability_of,
    columns_of,
    counts_of,
    latency_of,
    percentile,
    rates_of,
    span_of,
)
from jepsen_like.report.wording import (
    describe,
    duration_text,
    kind_text,
    verdict_sentence,
    when_text,
)

REPORT_FILE: Final = "report.html"
PICTURES_FOLDER: Final = "pictures"

ANOMALIES_MAX: Final = 100
"""Rows of the table; checkers name the first few of each kind, and one bug makes thousands."""

WITNESSES_MAX: Final = 8
"""Operations quoted per anomaly; a cycle through more helps nobody."""

_OUTCOMES: Final = ("ok", "info", "fail")


def report(run_folder: Path) -> Path:
    """Write `report.html` and `pictures/*.png` into *run_folder* and return the page's path.

    What is missing or damaged in the folder is said in the page. A page that was there stays
    until the new one is whole.

    Raises:
        OSError: The folder cannot be written to.
    """
    (run_folder / PICTURES_FOLDER).mkdir(exist_ok=True)
    html = render(page_of(read_run(run_folder), run_folder / PICTURES_FOLDER))
    part = run_folder / f"{REPORT_FILE}.part"
    part.write_text(html, encoding="utf-8")
    return part.replace(run_folder / REPORT_FILE)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What several sections need."""

    columns: Columns
    span: Span
    faults: list[Fault]
    reigns: list[Reign]
    counts: dict[str, dict[str, int]]
    fault_counts: dict[str, int]
    availability: Availability
    witnesses: dict[int, Operation]


def page_of(run: Run, pictures_folder: Path) -> Page:
    """Return the page of *run*; PNG files are written into *pictures_folder*."""
    history, result = run.history, run.result
    columns = columns_of(history.operations)
    span = span_of(columns, history.events, run.samples)
    faults = faults_of(history.events, span, result.faults)
    facts = _Facts(
        columns,
        span,
        faults,
        reigns_of(history.events, run.samples, span),
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
    return Page(
        name=run.name,
        headline=_headline(run, facts),
        verdict=sentence.split(":")[0],
        sentence=sentence,
        notes=tuple(run.notes + _disagreements(result.counts, facts.counts)),
        operations=_operations_table(facts.counts),
        facts=_key_facts(run, facts),
        checkers=tuple(_checker_row(verdict) for verdict in result.verdicts),
        pictures=_parts(run, facts, violations, pictures_folder),
        skipped=result.skipped or tuple(skipped_of(history.events)),
        anomalies=tuple(_anomaly(v, facts) for v in violations[:ANOMALIES_MAX]),
        anomalies_left=max(0, len(violations) - ANOMALIES_MAX),
        no_anomalies=_no_anomalies(result.verdicts),
        logs=tuple(run.logs.items()),
        plan=run.plan,
        command=result.command,
    )


def _witnesses(
    columns: Columns, operations: Sequence[Operation], verdicts: Sequence[Verdict]
) -> dict[int, Operation]:
    named = [at for verdict in verdicts for v in verdict.violations for at in v.operations]
    places: list[int] = np.flatnonzero(np.isin(columns.op_id, named)).tolist() if named else []
    return {operations[place].op_id: operations[place] for place in places}


def _headline(run: Run, facts: _Facts) -> tuple[str, ...]:
    stamps = [stamp for stamp in (run.result.begin, run.result.end) if stamp]
    return (*([" to ".join(stamps)] if stamps else []), duration_text(facts.span.duration_s))


def _disagreements(
    told: Mapping[str, Mapping[str, int]], counted: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Say where the run counted other than the history: rows are missing, or there are too many."""
    wrong = [
        f"{name} {outcome}: {told[name].get(outcome, 0):,} and {in_history:,}"
        for name in told
        for outcome in _OUTCOMES
        if told[name].get(outcome, 0) != (in_history := counted.get(name, {}).get(outcome, 0))
    ]
    if not wrong:
        return []
    return [f"result.json and the history differ in their counts ({'; '.join(wrong)})."]


def _operations_table(counts: Mapping[str, Mapping[str, int]]) -> tuple[OperationRow, ...]:
    rows = [OperationRow(name, *(by[o] for o in _OUTCOMES)) for name, by in counts.items()]
    total = OperationRow("all", *(sum(by[o] for by in counts.values()) for o in _OUTCOMES))
    return (*rows, total)


def _key_facts(run: Run, facts: _Facts) -> tuple[tuple[str, str], ...]:
    seconds = max(facts.span.duration_s, 1.0)
    share = facts.availability.share
    rows = [
        ("took", duration_text(facts.span.duration_s)),
        ("operations per second", f"{len(facts.columns) / seconds:,.1f}"),
    ]
    if share == share:  # not NaN: somebody sent
        rows.append(("seconds with a send acknowledged", f"{share:.1%}"))
    kinds = ", ".join(f"{kind_text(k)} {n}" for k, n in sorted(facts.fault_counts.items()))
    rows.append(("faults", kinds or "none"))
    rows += [(name, version) for name, version in sorted(_versions(run).items())]
    return tuple(rows)


def _versions(run: Run) -> dict[str, str]:
    return run.result.versions or run.history.header.versions


def _checker_row(verdict: Verdict) -> tuple[str, str, str]:
    looked = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in verdict.counts.items())
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return verdict.checker, f"{verdict.validity}{reason}", looked


def _no_anomalies(verdicts: Sequence[Verdict]) -> str:
    passed = sum(verdict.is_valid for verdict in verdicts)
    if not verdicts:
        return "No checker's verdict was kept, so nothing is proved."
    return f"None was found: {passed} of {len(verdicts)} checkers say valid."


def _anomaly(violation: Violation, facts: _Facts) -> Anomaly:
    begin_ns = facts.span.begin_ns
    quoted = [
        describe(facts.witnesses[op_id], begin_ns)
        if op_id in facts.witnesses
        else f"operation {op_id}: not in the history"
        for op_id in violation.operations[:WITNESSES_MAX]
    ]
    return Anomaly(
        violation.name,
        violation.checker,
        violation.subject,
        violation.detail,
        when_text(violation, begin_ns),
        tuple(quoted),
    )


def _parts(
    run: Run, facts: _Facts, violations: Sequence[Violation], folder: Path
) -> tuple[Part, ...]:
    """Return the sections with pictures, from latency to faults."""
    nodes = nodes_of(facts.reigns, run.samples)
    draw = Pictures(folder, facts.span, facts.faults, nodes)
    lag = lag_of(run.samples, facts.span)
    has_operations = len(facts.columns) > 0
    per = "second" if facts.span.bucket_s == 1 else f"{facts.span.bucket_s} s"
    return (
        Part(
            "latency",
            "Latency",
            f"How long acknowledged operations took, by the {per} of their call: look for peaks "
            "that outlast the fault (coloured band) they began in.",
            _figures(draw.latency(latency_of(facts.columns, facts.span))) if has_operations else (),
            "The history has no operations.",
        ),
        Part(
            "rate",
            "Rate",
            "Operations per second of their call, by how they ended: look for ok falling to zero, "
            "and for whether it comes back to where it was.",
            _figures(draw.rate(rates_of(facts.columns, facts.span))) if has_operations else (),
            "The history has no operations.",
        ),
        Part(
            "leader",
            "Leaders and terms",
            "Which node led in which term: look for gaps, when nobody led, and for two bars above "
            "each other, an old leader that does not know yet. " + _reigns_text(facts.reigns),
            _figures(draw.leader(facts.reigns, down_of(run.samples, facts.span))) if nodes else (),
            "Neither changes of role nor samples were recorded.",
        ),
        Part(
            "lag",
            "Follower lag",
            f"Entries each follower was behind the leader, the worst of each {per}: look for lines "
            "that do not come down after the fault is over.",
            _figures(draw.lag(lag)) if lag else (),
            "No samples of a leader and its followers were taken (samples.cbor).",
        ),
        Part(
            "availability",
            "Availability",
            "For each second, whether any send was acknowledged: look for red that lasts longer "
            "than an election takes. " + _availability_text(facts.availability),
            _figures(draw.availability(facts.availability)) if has_operations else (),
            "The history has no operations.",
        ),
        _failover_part(draw, run.result.failover_ms),
        _order_part(draw, run, violations),
        Part(
            "faults",
            "Faults",
            "What was done to the cluster and for how long: find the bar above or below the "
            "moment another picture made you curious about.",
            _figures(draw.timeline()) if facts.faults else (),
            "The history has no faults.",
        ),
    )


def _figures(svg: str) -> tuple[PageFigure, ...]:
    return (PageFigure(Markup(svg)),)  # drawn here; names in it are escaped


def _reigns_text(reigns: Sequence[Reign]) -> str:
    if not reigns:
        return ""
    newest = max(reign.term for reign in reigns)
    return f"{len(reigns)} reigns" + (f", newest term {newest}." if newest >= 0 else ".")


def _availability_text(availability: Availability) -> str:
    asked = availability.served_s + availability.refused_s
    if not asked:
        return ""
    return f"{availability.served_s:,} of {asked:,} seconds ({availability.share:.1%})."


def _failover_part(draw: Pictures, failover_ms: Sequence[float]) -> Part:
    caption = "How long the group served nobody after its leader was lost"
    if failover_ms:
        p50, p99 = (percentile(failover_ms, per_cent) for per_cent in (50, 99))
        caption += f": {len(failover_ms)} fail-overs, p50 {p50:,.0f} ms, p99 {p99:,.0f} ms, "
        caption += f"max {max(failover_ms):,.0f} ms; look for bars far to the right of the others."
    else:
        caption += "."
    return Part(
        "failover",
        "Fail-over",
        caption,
        _figures(draw.failover(failover_ms)) if failover_ms else (),
        "No fail-over was measured.",
    )


def _order_part(draw: Pictures, run: Run, violations: Sequence[Violation]) -> Part:
    orders = orders_of(run.history.operations, violations)
    figures = tuple(
        PageFigure(
            Markup(draw.order(order, number)),
            f"{order.queue}: {order.violation.name}, {order.violation.detail}",
        )
        for number, order in enumerate(orders, start=1)
    )
    return Part(
        "order",
        "Order in the queue",
        "Sends and reads of one queue around the violation, from call to return: offsets must "
        "rise with time; look at the red ones, which cannot all be true.",
        figures,
        "No violation names operations of a queue.",
    )
