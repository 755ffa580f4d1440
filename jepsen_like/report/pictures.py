"""The pictures of a report, each from numbers that are ready. One mark per bucket, not per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dledger.jepsen_like.report.canvas import (
    BAD,
    DOUBT,
    FAINT,
    GOOD,
    INK,
    NODE_COLOURS,
    PLOT_IN,
    Canvas,
    canvas,
    draw_bands,
    look_of,
    save,
    time_axis,
)
from dledger.jepsen_like.report.series import (
    F64,
    Availability,
    Fault,
    Latency,
    Leadership,
    Rates,
    Served,
    Span,
    bands_of,
    kinds_of,
    percentile,
)
from dledger.jepsen_like.report.wording import kind_lines

LANE_IN: Final = 0.3
"""Height of a node or a fault kind in the pictures that have one row for each."""

TERM_CHAR_IN: Final = 0.085
"""Width of a digit of a term number; a term without enough space is left out."""

BAR_IN: Final = 0.03
"""Least width of a bar on a time axis: what was shorter would not be seen."""

HISTOGRAM_BINS_MAX: Final = 24

FINAL_READ_RATIO: Final = 2.0
"""A final read that is faster than the load by this is cut off in the picture of rates."""


@dataclass(slots=True)
class Pictures:
    """Draws into one folder, over one span, with the same faults behind everything.

    *healed_s*: when the last fault was over and the load was about to end; None: not known.
    """

    folder: Path
    span: Span
    faults: Sequence[Fault]
    nodes: Sequence[str]
    healed_s: float | None = None
    bands: dict[str, list[tuple[float, float]]] = field(init=False)

    def __post_init__(self) -> None:
        self.bands = bands_of(self.faults, self.span)

    def latency(self, latency: Latency) -> str:
        """Draw p50, p99 and maximum, on a logarithmic scale."""
        made = canvas("latency", [2.7], legend_rows=4 + len(self.bands))
        (axes,) = made.axes
        for values, label, colour, width in (
            (latency.max_ms, "slowest", "#9aa0a6", 0.9),
            (latency.p99_ms, "p99", DOUBT, 1.1),
            (latency.p50_ms, "p50 (median)", GOOD, 1.4),
        ):
            self._steps(axes, latency.at_s, values, colour, width)
            made.entries.append((Line2D([], [], color=colour, lw=2), label))
        _log_axis(axes, np.concatenate((latency.p50_ms, latency.max_ms)))
        axes.set_ylabel("latency (ms)")
        return self.finish(made)

    def rate(self, rates: Rates) -> str:
        """Draw what was acknowledged above, and on a scale of its own what was not below."""
        made = canvas("rate", [1.9, 0.95], legend_rows=4 + len(self.bands))
        above, below = made.axes
        above.fill_between(*self._edges(rates.at_s, rates.ok), step="post", color=GOOD, alpha=0.12)
        for axes, values, label, colour in (
            (above, rates.ok, "ok", GOOD),
            (below, rates.info, "info (not known)", DOUBT),
            (below, rates.fail, "fail (not done)", BAD),
        ):
            self._steps(axes, rates.at_s, values, colour, 1.0)
            made.entries.append((Line2D([], [], color=colour, lw=2), label))
        for axes, text in ((above, "ok per s"), (below, "other per s")):
            axes.set_ylim(bottom=0)
            if axes.get_ylim()[1] < 1:
                axes.set_ylim(0, 1)
            axes.yaxis.set_major_locator(MaxNLocator(4 if axes is above else 2))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
            axes.set_ylabel(text)
        self._cut_final_read(above, rates)
        made.figure.align_ylabels(made.axes)
        return self.finish(made)

    def _cut_final_read(self, axes: Axes, rates: Rates) -> None:
        """Keep what is read in one go at the end from flattening the load before it."""
        if self.healed_s is None:
            return
        load = rates.ok[rates.at_s < self.healed_s]
        most, whole = float(load.max(initial=0)), float(rates.ok.max(initial=0))
        if 0 < FINAL_READ_RATIO * most < whole:
            axes.set_ylim(0, most * 1.15)
            axes.text(
                *(1.0, 0.94), f"final read: up to {whole:,.0f} ",
                transform=axes.transAxes, ha="right", va="top", fontsize="small", color=INK,
            )  # fmt: skip

    def leader(
        self, terms: Sequence[Leadership], down: Mapping[str, Sequence[tuple[float, float]]]
    ) -> str:
        """Draw a lane per node, with a bar and its term while it led."""
        made = canvas(
            "leader",
            [LANE_IN * max(len(self.nodes), 2)],
            legend_rows=1 + len(self.nodes) + bool(down),
        )
        (axes,) = made.axes
        for lane, node in enumerate(self.nodes):
            spells = self._bars(down.get(node, ()))
            axes.broken_barh(spells, (lane - 0.36, 0.72), facecolor=FAINT, lw=0)
            own = [term for term in terms if term.node == node]
            bars = self._bars([(term.begin_s, term.end_s) for term in own])
            axes.broken_barh(
                bars, (lane - 0.36, 0.72), facecolor=self._colour(node), edgecolor="white", lw=0.5
            )
            self._terms(axes, lane, own)
        _lanes(axes, self.nodes)
        made.entries = [(Patch(color=self._colour(node)), f"{node} leads") for node in self.nodes]
        if down:
            made.entries.append((Patch(color=FAINT), "did not answer"))
        return self.finish(made, has_bands=False)

    def _terms(self, axes: Axes, lane: int, terms: Sequence[Leadership]) -> None:
        """Write terms into their bars, or behind them where there is space."""
        in_per_s = PLOT_IN / self._end_s
        following = [*(term.begin_s for term in terms), self._end_s][1:]
        for term, next_s in zip(terms, following, strict=True):
            if term.term < 0:
                continue
            needs_in = len(str(term.term)) * TERM_CHAR_IN + 0.06
            number = str(term.term)
            if (term.end_s - term.begin_s) * in_per_s >= needs_in:
                at_s = (term.begin_s + term.end_s) / 2
                axes.text(at_s, lane, number, color="white", ha="center", va="center", fontsize=8)
            elif (next_s - term.end_s) * in_per_s >= needs_in + 0.05:
                # On paper of its own: bars of silence and the end of all faults may be behind it.
                axes.text(
                    term.end_s + 0.04 / in_per_s, lane, number, color=INK, va="center", fontsize=8,
                    bbox={"facecolor": "white", "alpha": 0.85, "pad": 0.8, "lw": 0}, zorder=4,
                )  # fmt: skip

    def lag(self, lag: Mapping[str, F64]) -> str:
        """Draw by how many entries each node was behind, on a logarithmic scale from 0."""
        made = canvas("lag", [2.2], legend_rows=1 + len(lag) + len(self.bands))
        (axes,) = made.axes
        for node, behind in lag.items():
            colour = self._colour(node)
            self._steps(axes, self.span.starts_s, behind, colour, 1.2)
            made.entries.append((Line2D([], [], color=colour, lw=2), node))
        axes.set_yscale("symlog", linthresh=1, linscale=0.6)
        worst = max((float(np.nanmax(behind)) for behind in lag.values()), default=0.0)
        top = max(1, math.ceil(math.log10(max(worst, 1.0) * 1.2)))
        axes.set_ylim(-0.15, 10.0**top)
        axes.yaxis.set_major_locator(FixedLocator([0, *(10.0**at for at in range(top + 1))]))
        axes.yaxis.set_minor_locator(FixedLocator([]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
        axes.set_ylabel("entries behind")
        return self.finish(made)

    def availability(self, availability: Availability) -> str:
        """Draw one strip: served, not served, not asked."""
        made = canvas("availability", [0.45], legend_rows=4)
        (axes,) = made.axes
        for served, label, colour in (
            (Served.YES, "acknowledged", GOOD),
            (Served.IDLE, "no sends", FAINT),
            (Served.NO, "none acknowledged", BAD),
        ):
            spells = [(begin, end) for kind, begin, end in availability.spells if kind == served]
            # Only what was bad is widened until it is seen: it is drawn last, over the rest.
            bars = self._bars(spells) if served is Served.NO else _widths(spells)
            axes.broken_barh(bars, (0, 1), facecolor=colour, lw=0)
            made.entries.append((Patch(color=colour), label))
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return self.finish(made, has_bands=False)

    def failover(self, failover_ms: Sequence[float]) -> str:
        """Draw how many fail-overs took how long, with p50 and p99 marked."""
        made = canvas("failover", [2.2], legend_rows=2)
        (axes,) = made.axes
        bins = min(HISTOGRAM_BINS_MAX, max(4, math.isqrt(len(failover_ms)) * 2))
        top_ms = max(*failover_ms, 1.0)
        axes.hist(failover_ms, bins=bins, range=(0, top_ms), color="#6fa9be", edgecolor="white")
        for per_cent, colour in ((50, INK), (99, BAD)):
            at_ms = percentile(failover_ms, per_cent)
            line = axes.axvline(at_ms, color=colour, lw=1.2, ls="--")
            made.entries.append((line, f"p{per_cent}: {at_ms:,.0f} ms"))
        axes.set_xlim(0, top_ms * 1.02)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
        axes.grid(axis="y")
        axes.set_ylabel("fail-overs")
        axes.set_xlabel("without a serving leader (ms)", labelpad=3)
        return save(made, self.folder)

    def timeline(self) -> str:
        """Draw a row per fault kind, with a bar per fault."""
        kinds = kinds_of(self.faults)
        made = canvas("faults", [LANE_IN * max(len(kinds), 2)])
        (axes,) = made.axes
        for lane, kind in enumerate(kinds):
            spells = [(f.begin_s, f.end_s) for f in self.faults if f.kind == kind]
            axes.broken_barh(
                self._bars(spells),
                (lane - 0.34, 0.68),
                facecolor=look_of(kind).colour,  # the row shows the rest
                edgecolor="white",
                lw=0.4,
            )
        _lanes(axes, [kind_lines(kind) for kind in kinds])
        counts = [sum(fault.kind == kind for fault in self.faults) for kind in kinds]
        for lane, count in enumerate(counts):
            axes.annotate(
                f"{count} times" if count > 1 else "once",
                (1, lane),
                xycoords=axes.get_yaxis_transform(),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=INK,
            )
        return self.finish(made, has_bands=False)

    # -- shared ------------------------------------------------------------------------------

    @property
    def _end_s(self) -> float:
        return max(self.span.duration_s, float(self.span.bucket_s))

    def _colour(self, node: str) -> str:
        place = list(self.nodes).index(node) if node in self.nodes else 0
        return NODE_COLOURS[place % len(NODE_COLOURS)]

    def _edges(self, at_s: F64, values: F64) -> tuple[F64, F64]:
        """Return *values* with the end of the last bucket, so that it is seen too."""
        return np.append(at_s, at_s[-1] + self.span.bucket_s), np.append(values, values[-1])

    def _steps(self, axes: Axes, at_s: F64, values: F64, colour: str, width: float) -> None:
        axes.step(*self._edges(at_s, values), where="post", color=colour, lw=width)

    def _bars(self, spells: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        least_s = BAR_IN / PLOT_IN * self._end_s
        return [(begin, max(end - begin, least_s)) for begin, end in spells]

    def finish(self, made: Canvas, *, has_bands: bool = True) -> str:
        """Give a picture its time axis, faults and legend; return the SVG."""
        time_axis(made, self.span)
        for axes in made.axes:
            axes.grid(axis="both" if has_bands else "x")
        if has_bands:
            draw_bands(made, self.bands)
        if self.healed_s is not None:
            for axes in made.axes:
                axes.axvline(self.healed_s, color=INK, lw=1.0, ls=":", zorder=1.5)
            if made.entries:  # the timeline has its counts where others have a legend
                made.entries.append((Line2D([], [], color=INK, lw=1.0, ls=":"), "all healed"))
        return save(made, self.folder)


def _widths(spells: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(begin, end - begin) for begin, end in spells]


def _lanes(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(max(len(names), 2) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.tick_params(axis="y", length=0)


def _log_axis(axes: Axes, values: F64) -> None:
    there = values[np.isfinite(values) & (values > 0)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (1.0, 10.0)
    axes.set_yscale("log")
    bottom, top = low / 1.4, high * 1.5
    if math.floor(math.log10(top)) - math.ceil(math.log10(bottom)) < 1:  # fewer than two ticks
        bottom, top = 10.0 ** math.floor(math.log10(bottom)), 10.0 ** math.ceil(math.log10(top))
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
