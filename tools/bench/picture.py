"""The table as a picture: one panel for each load, one bar for each contender."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dledger.jepsen_like.report.canvas import BLUE, GOOD, GREY, INK, ORANGE, SAND, VERMILLION
from tools.bench.figures import Row
from tools.bench.loads import CASES
from tools.bench.plan import CONTENDERS, FLUSH
from tools.bench.table import Report

COLOURS: Final = {
    "nats": SAND,
    "nats-synced": ORANGE,
    "rocketmq": GREY,
    "rocketmq-batch-push": VERMILLION,
    "ours-java": GOOD,
    "ours": BLUE,
}
PAGE_CACHE_HATCH: Final = "////"


def draw(report: Report, path: Path) -> None:
    """Write the picture of a report as PNG."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    for panel, case in zip(panels, CASES, strict=True):
        rows = {row.contender: row for row in report.rows if row.case == case.name and row.rounds}
        shown = [contender for contender in CONTENDERS if contender.key in rows]
        values = [_value(rows[contender.key]) for contender in shown]
        for place, (contender, value) in enumerate(zip(shown, values, strict=True)):
            hatch = "" if contender.waits_for == FLUSH else PAGE_CACHE_HATCH
            bar = panel.barh(
                place, value, color=COLOURS[contender.key], hatch=hatch, edgecolor="white"
            )
            panel.bar_label(bar, [_label(value)], padding=3, color=INK, fontsize=8)
        panel.set_yticks(range(len(shown)), [contender.key for contender in shown], fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.25 * max(values, default=1.0))
        panel.tick_params(axis="x", labelsize=8)
        panel.locator_params(axis="x", nbins=4)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{case.about}\n{_unit(case.name)}", fontsize=9, color=INK)
    figure.suptitle(
        "256-byte bodies, three replicas on loopback; hatched: an acknowledgement waits for the"
        " page cache only",
        fontsize=9,
        color=INK,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _value(row: Row) -> float:
    return row.p50_ms if row.case in ("1", "kill") else row.rate


def _unit(case: str) -> str:
    return "p50 ms, less is better" if case in ("1", "kill") else "messages/s, more is better"


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
