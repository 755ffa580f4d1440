"""The sections of a page that have pictures: what is drawn, what to look for, what it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from markupsafe import Markup

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import History, Operation
from dledger.jepsen_like.report.pictures import Pictures
from dledger.jepsen_like.report.run_folder import Run
from dledger.jepsen_like.report.series import (
    F64,
    Availability,
    Columns,
    Fault,
    Latency,
    Leadership,
    Rates,
    Served,
    Span,
    down_of,
    lag_of,
    latency_of,
    nodes_of,
    percentile,
    rates_of,
)
from dledger.jepsen_like.report.witness_picture import (
    QueueOrder,
    draw_witnesses,
    mark_text,
    orders_of,
)
from dledger.jepsen_like.report.wording import kind_text, many

HEALED: Final = "healed"
"""Kind of the event after which nothing is broken any more."""


class PageFigure(NamedTuple):
    """One picture."""

    svg: Markup
    alt: str
    below: str = ""


class Part(NamedTuple):
    """A section with pictures."""

    id: str
    title: str
    caption: str
    figures: tuple[PageFigure, ...] = ()
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What several sections need; *witnesses* are the operations that violations name, by id."""

    columns: Columns
    span: Span
    faults: list[Fault]
    terms: list[Leadership]
    counts: dict[str, dict[str, int]]
    fault_counts: dict[str, int]
    availability: Availability
    witnesses: dict[int, Operation]


def parts_of(
    run: Run, facts: Facts, violations: Sequence[Violation], folder: Path
) -> tuple[Part, ...]:
    """Return the sections with pictures, from latency to faults."""
    nodes = nodes_of(facts.terms, run.samples)
    draw = Pictures(folder, facts.span, facts.faults, nodes, _healed_s(run.history, facts.span))
    lag = lag_of(run.samples, facts.span)
    has_operations = len(facts.columns) > 0
    per = "second" if facts.span.bucket_s == 1 else f"{facts.span.bucket_s} s"
    return (
        Part(
            "latency",
            "Latency",
            f"How long acknowledged operations took, by the {per} of their call: look for peaks "
            "that outlast the fault (coloured band) they began in.",
            _latency(draw, facts) if has_operations else (),
            "The history has no operations.",
        ),
        Part(
            "rate",
            "Rate",
            "Operations per second of their call, by how they ended: look for ok falling to zero, "
            "and for whether it comes back to where it was.",
            _rate(draw, facts) if has_operations else (),
            "The history has no operations.",
        ),
        Part(
            "leader",
            "Leaders and terms",
            "Which node led in which term: look for gaps, when none led, and for two bars above "
            "each other, an old leader that does not know yet. " + _terms_text(facts.terms),
            _figure(
                draw.leader(facts.terms, down_of(run.samples, facts.span)), leader_alt(facts.terms)
            )
            if nodes
            else (),
            "Neither changes of role nor samples were recorded.",
        ),
        Part(
            "lag",
            "Follower lag",
            f"Entries each follower was behind the leader, the worst of each {per}: look for lines "
            "that do not come down after the fault is over.",
            _figure(draw.lag(lag), lag_alt(lag)) if lag else (),
            "No samples of a leader and its followers were taken (samples.cbor).",
        ),
        Part(
            "availability",
            "Availability",
            "For each second, whether any send was acknowledged: look for red that lasts longer "
            "than an election takes. " + _availability_text(facts.availability),
            _figure(draw.availability(facts.availability), availability_alt(facts.availability))
            if has_operations
            else (),
            "The history has no operations.",
        ),
        _failover_part(draw, run.result.failover_ms),
        _order_part(draw, run, facts, violations),
        Part(
            "faults",
            "Faults",
            "What was done to the cluster and for how long: find the bar above or below the "
            "moment another picture made you curious about.",
            _figure(draw.timeline(), faults_alt(facts.faults)) if facts.faults else (),
            "The history has no faults.",
        ),
    )


def _figure(svg: str, alt: str, below: str = "") -> tuple[PageFigure, ...]:
    return (PageFigure(Markup(svg), alt, below),)  # drawn here; names in it are escaped


def _healed_s(history: History, span: Span) -> float | None:
    stamps = [event.at_ns for event in history.events if event.kind == HEALED]
    return span.at_s(stamps[-1]) if stamps else None


def _latency(draw: Pictures, facts: Facts) -> tuple[PageFigure, ...]:
    latency = latency_of(facts.columns, facts.span)
    return _figure(draw.latency(latency), latency_alt(latency))


def _rate(draw: Pictures, facts: Facts) -> tuple[PageFigure, ...]:
    rates = rates_of(facts.columns, facts.span)
    return _figure(draw.rate(rates), rate_alt(rates))


def _terms_text(terms: Sequence[Leadership]) -> str:
    if not terms:
        return ""
    newest = max(term.term for term in terms)
    return many(len(terms), "term") + (f", newest term {newest}." if newest >= 0 else ".")


def _availability_text(availability: Availability) -> str:
    asked = availability.served_s + availability.refused_s
    if not asked:
        return ""
    return f"{availability.served_s:,} of {asked:,} seconds ({availability.share:.1%})."


def _failover_part(draw: Pictures, failover_ms: Sequence[float]) -> Part:
    caption = "How long the group served no client after its leader was lost"
    if failover_ms:
        p50, p99 = (percentile(failover_ms, per_cent) for per_cent in (50, 99))
        caption += f": {many(len(failover_ms), 'fail-over')}, p50 {p50:,.0f} ms, "
        caption += f"p99 {p99:,.0f} ms, "
        caption += f"max {max(failover_ms):,.0f} ms; look for bars far to the right of the others."
    else:
        caption += "."
    return Part(
        "failover",
        "Fail-over",
        caption,
        _figure(draw.failover(failover_ms), caption) if failover_ms else (),
        "No fail-over was measured.",
    )


def _order_part(draw: Pictures, run: Run, facts: Facts, violations: Sequence[Violation]) -> Part:
    orders = orders_of(run.history.operations, violations)
    terms = facts.terms
    figures = tuple(
        figure
        for number, order in enumerate(orders, start=1)
        for figure in _figure(
            draw_witnesses(draw, order=order, number=number, terms=terms),
            order_alt(order),
            f"{order.queue}: {order.violation.name}, {order.violation.detail}",
        )
    )
    return Part(
        "order",
        "Order in the queue",
        "Sends and reads of one queue around the violation, from call to return: offsets must "
        "rise with time; look at the red ones, which cannot all be true.",
        figures,
        "No violation names operations of a queue.",
    )


def latency_alt(latency: Latency) -> str:
    """Say the usual latency, and when the slowest operation was called."""
    if np.isnan(latency.max_ms).all():
        return "Latency over time: nothing was acknowledged."
    worst = int(np.nanargmax(latency.max_ms))
    return (
        f"Latency over time: usual median {np.nanmedian(latency.p50_ms):,.1f} ms, "
        f"slowest {latency.max_ms[worst]:,.0f} ms at {latency.at_s[worst]:,.0f} s."
    )


def rate_alt(rates: Rates) -> str:
    """Say how much was acknowledged, and how much was not."""
    return (
        f"Operations per second over time: at most {rates.ok.max():,.0f} ok, "
        f"{rates.info.max():,.0f} info and {rates.fail.max():,.0f} fail."
    )


def leader_alt(terms: Sequence[Leadership]) -> str:
    """State which node led when."""
    shown = "; ".join(
        f"{term.node} term {term.term} from {term.begin_s:,.0f} to {term.end_s:,.0f} s"
        for term in terms[:20]
    )
    more = f"; and {len(terms) - 20} more" if len(terms) > 20 else ""
    return f"Leaders: {shown or 'none'}{more}."


def lag_alt(lag: Mapping[str, F64]) -> str:
    """Say how far each follower was behind at its worst."""
    worst = ", ".join(f"{node} {np.nanmax(behind):,.0f}" for node, behind in lag.items())
    return f"Entries behind the leader over time, at worst: {worst}."


def availability_alt(availability: Availability) -> str:
    """Say when no send was acknowledged."""
    gaps = [(begin, end) for kind, begin, end in availability.spells if kind is Served.NO]
    if not gaps:
        return "Every second with sends had an acknowledgement."
    shown = ", ".join(f"{begin:,.0f} to {end:,.0f} s" for begin, end in gaps[:20])
    return f"No send was acknowledged in {many(len(gaps), 'spell')}: {shown}."


def order_alt(order: QueueOrder) -> str:
    """Say what the witnesses say."""
    said = "; ".join(mark_text(mark) for mark in order.marks if mark.is_witness)
    return f"Offsets over time in {order.queue}. Witnesses: {said}."


def faults_alt(faults: Sequence[Fault]) -> str:
    """State how often each fault was done; the table below the picture shows when."""
    counted = Counter(kind_text(fault.kind) for fault in faults)
    return "Faults over time: " + ", ".join(f"{kind} {n}" for kind, n in counted.items()) + "."
