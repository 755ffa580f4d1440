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
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jepsen_like.report.canvas import (
    BAD,
    DOUBT,
    FAINT,
    GOOD,
    INK,
    NODE_COLOURS,
    WIDE,
    Canvas,
    Layout,
    canvas,
    draw_bands,
    look_of,
    save,
    time_axis,
)
from jepsen_like.report.faults import Fault, bands_of, kinds_of
from jepsen_like.report.order import Mark, QueueOrder, Says, ends_of
from jepsen_like.report.roles import Reign
from jepsen_like.report.series import (
    F64,
    NS,
    Availability,
    Latency,
    Rates,
    Served,
    Span,
    percentile,
)
from jepsen_like.report.wording import kind_lines

LANE_IN: Final = 0.3
"""Height of a node or a fault kind in the pictures that have one row for each."""

TERM_CHAR_IN: Final = 0.085
"""Width of a digit of a term number; a term that finds no room is left out."""

BAR_IN: Final = 0.03
"""Least width of a bar on a time axis: what was shorter would not be seen."""

MARK_IN: Final = 0.055
"""Least width of an operation in the order picture."""

TAG_IN: Final = 0.42
"""Height of the name of a witness with the line that leads to it: so much room is above and below
the highest and the lowest of them."""

HISTOGRAM_BINS_MAX: Final = 24

FINAL_READ_RATIO: Final = 2.0
"""A final read that is faster than the load by this is cut off in the picture of rates."""

WITNESS_NAMES: Final = "ABCDEFGH"
"""Witnesses that are named in the order picture; two prove most anomalies."""


@dataclass(slots=True)
class Pictures:
    """Draws into one folder, over one span, with the same faults behind everything.

    Attributes:
        folder: Where the PNG files go; it is there.
        span: The time axis.
        faults: What was done meanwhile.
        nodes: In the order of their colours.
        healed_s: When the last fault was over and the load was about to end; None: not known.
        layout: Wide or narrow.
    """

    folder: Path
    span: Span
    faults: Sequence[Fault]
    nodes: Sequence[str]
    healed_s: float | None = None
    layout: Layout = WIDE
    bands: dict[str, list[tuple[float, float]]] = field(init=False)

    def __post_init__(self) -> None:
        self.bands = bands_of(self.faults, self.span)

    def latency(self, latency: Latency) -> str:
        """Draw p50, p99 and maximum, on a logarithmic scale."""
        made = canvas("latency", self.layout, [2.7], legend_rows=4 + len(self.bands))
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
        return self._finish(made)

    def rate(self, rates: Rates) -> str:
        """Draw what was acknowledged above, and on a scale of its own what was not below."""
        made = canvas("rate", self.layout, [1.9, 0.95], legend_rows=4 + len(self.bands))
        above, below = made.axes
        above.fill_between(*self._edges(rates.at_s, rates.ok), step="post", color=GOOD, alpha=0.12)
        for axes, values, label, colour in (
            (above, rates.ok, "ok", GOOD),
            (below, rates.info, "info (nobody knows)", DOUBT),
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
        return self._finish(made)

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
        self, reigns: Sequence[Reign], down: Mapping[str, Sequence[tuple[float, float]]]
    ) -> str:
        """Draw a lane per node, with a bar and its term while it led."""
        made = canvas(
            "leader",
            self.layout,
            [LANE_IN * max(len(self.nodes), 2)],
            legend_rows=1 + len(self.nodes) + bool(down),
        )
        (axes,) = made.axes
        for lane, node in enumerate(self.nodes):
            spells = self._bars(down.get(node, ()))
            axes.broken_barh(spells, (lane - 0.36, 0.72), facecolor=FAINT, lw=0)
            own = [reign for reign in reigns if reign.node == node]
            bars = self._bars([(reign.begin_s, reign.end_s) for reign in own])
            axes.broken_barh(
                bars, (lane - 0.36, 0.72), facecolor=self._colour(node), edgecolor="white", lw=0.5
            )
            self._terms(axes, lane, own)
        _lanes(axes, self.nodes)
        made.entries = [(Patch(color=self._colour(node)), f"{node} leads") for node in self.nodes]
        if down:
            made.entries.append((Patch(color=FAINT), "did not answer"))
        return self._finish(made, has_bands=False)

    def _terms(self, axes: Axes, lane: int, reigns: Sequence[Reign]) -> None:
        """Write terms into their bars, or behind them where there is room."""
        in_per_s = self.layout.plot_in / self._end_s
        following = [*(reign.begin_s for reign in reigns), self._end_s][1:]
        for reign, next_s in zip(reigns, following, strict=True):
            if reign.term < 0:
                continue
            needs_in = len(str(reign.term)) * TERM_CHAR_IN + 0.06
            term = str(reign.term)
            if (reign.end_s - reign.begin_s) * in_per_s >= needs_in:
                at_s = (reign.begin_s + reign.end_s) / 2
                axes.text(at_s, lane, term, color="white", ha="center", va="center", fontsize=8)
            elif (next_s - reign.end_s) * in_per_s >= needs_in + 0.05:
                # On paper of its own: bars of silence and the end of all faults may be behind it.
                axes.text(
                    reign.end_s + 0.04 / in_per_s, lane, term, color=INK, va="center", fontsize=8,
                    bbox={"facecolor": "white", "alpha": 0.85, "pad": 0.8, "lw": 0}, zorder=4,
                )  # fmt: skip

    def lag(self, lag: Mapping[str, F64]) -> str:
        """Draw by how many entries each node was behind, on a logarithmic scale from 0."""
        made = canvas("lag", self.layout, [2.2], legend_rows=1 + len(lag) + len(self.bands))
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
        return self._finish(made)

    def availability(self, availability: Availability) -> str:
        """Draw one strip: served, not served, nobody asked."""
        made = canvas("availability", self.layout, [0.45], legend_rows=4)
        (axes,) = made.axes
        for served, label, colour in (
            (Served.YES, "acknowledged", GOOD),
            (Served.IDLE, "nobody sent", FAINT),
            (Served.NO, "none acknowledged", BAD),
        ):
            spells = [(begin, end) for kind, begin, end in availability.spells if kind == served]
            # Only what was bad is widened until it is seen: it is drawn last, over the rest.
            bars = self._bars(spells) if served is Served.NO else _widths(spells)
            axes.broken_barh(bars, (0, 1), facecolor=colour, lw=0)
            made.entries.append((Patch(color=colour), label))
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return self._finish(made, has_bands=False)

    def failover(self, failover_ms: Sequence[float]) -> str:
        """Draw how many fail-overs took how long, with p50 and p99 marked."""
        made = canvas("failover", self.layout, [2.2], legend_rows=2)
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
        made = canvas("faults", self.layout, [LANE_IN * max(len(kinds), 2)])
        (axes,) = made.axes
        for lane, kind in enumerate(kinds):
            spells = [(f.begin_s, f.end_s) for f in self.faults if f.kind == kind]
            axes.broken_barh(
                self._bars(spells),
                (lane - 0.34, 0.68),
                facecolor=look_of(kind).colour,  # the row says the rest
                edgecolor="white",
                lw=0.4,
            )
        _lanes(axes, [kind_lines(kind) for kind in kinds])
        counts = [sum(fault.kind == kind for fault in self.faults) for kind in kinds]
        for lane, count in enumerate(counts if self.layout.is_wide else ()):
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
        return self._finish(made, has_bands=False)

    def order(self, order: QueueOrder, number: int) -> str:
        """Draw sends and reads of one queue around the witnesses: time and offset."""
        named = min(len(WITNESS_NAMES), sum(mark.is_witness for mark in order.marks))
        made = canvas(f"order-{number}", self.layout, [3.8], legend_rows=4 + 2 * named)
        (axes,) = made.axes
        spells = [self._spell(mark) for mark in order.marks]
        low_s = min(begin for begin, _ in spells)
        high_s = max(low_s + 1e-6, *(end for _, end in spells))
        spoken = [m for m in order.marks if m.says is Says.SENT or m.is_witness]
        low, high = min(m.low for m in spoken) - 1.5, max(m.high for m in spoken) + 1.5
        least = ((high_s - low_s) * MARK_IN / self.layout.plot_in, max(0.5, (high - low) / 55))
        made.entries = [(Patch(color=colour), text) for text, colour in _SAYS_LEGEND]
        made.entries.append((Patch(color=BAD), "witness"))
        names = iter(WITNESS_NAMES)
        for mark, spell in zip(order.marks, spells, strict=True):
            middle = _draw_mark(axes, mark, spell, least)
            name = next(names, "") if mark.is_witness else ""
            if name:
                _tag(axes, name, middle, is_above=len(made.entries) % 2 == 0)
                offsets = str(mark.low) + (f" to {mark.high}" if mark.high > mark.low else "")
                handle = Line2D([], [], ls="", marker=f"${name}$", color=BAD, markersize=7)
                made.entries.append((handle, f"{mark.says}\n{offsets} (op {mark.op.op_id})"))
        room = (high - low) * TAG_IN / axes.get_window_extent().height * made.figure.dpi
        axes.set_ylim(low - room, high + room)
        axes.set_xlim(low_s - 3 * least[0], high_s + 3 * least[0])
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}"))
        axes.xaxis.set_major_locator(MaxNLocator(8))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.9g}"))
        axes.grid(axis="both")
        axes.set_ylabel("queue offset")
        axes.set_xlabel("time since the run began (s)", labelpad=3)
        return save(made, self.folder)

    def _spell(self, mark: Mark) -> tuple[float, float]:
        begin_ns, end_ns = ends_of(mark.op)
        return (begin_ns - self.span.begin_ns) / NS, (end_ns - self.span.begin_ns) / NS

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
        least_s = BAR_IN / self.layout.plot_in * self._end_s
        return [(begin, max(end - begin, least_s)) for begin, end in spells]

    def _finish(self, made: Canvas, *, has_bands: bool = True) -> str:
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


_SAYS_COLOURS: Final = {Says.SENT: GOOD, Says.FOUND: "#44aa99", Says.END: "#aa4499"}
_SAYS_LEGEND: Final = (
    ("send", _SAYS_COLOURS[Says.SENT]),
    ("read found", _SAYS_COLOURS[Says.FOUND]),
    ("read saw the end", _SAYS_COLOURS[Says.END]),
)


def _widths(spells: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(begin, end - begin) for begin, end in spells]


def _draw_mark(
    axes: Axes, mark: Mark, spell: tuple[float, float], least: tuple[float, float]
) -> tuple[float, float]:
    """Draw from call to return at the offsets it speaks of; return the middle."""
    begin, width = spell[0], max(spell[1] - spell[0], least[0])
    tall = least[1] / 2 if mark.says is Says.END else mark.high - mark.low + least[1]
    middle = begin + width / 2, (mark.low + mark.high) / 2
    axes.add_patch(
        Rectangle(
            (begin, middle[1] - tall / 2),
            width,
            tall,
            facecolor=BAD if mark.is_witness else _SAYS_COLOURS[mark.says],
            alpha=0.35 if mark.says is Says.FOUND and not mark.is_witness else 0.9,
            lw=0,
            zorder=4 if mark.is_witness else 2,
        )
    )
    return middle


def _tag(axes: Axes, name: str, at: tuple[float, float], *, is_above: bool) -> None:
    """Write *name* beside a witness; two that are close stand on opposite sides."""
    axes.annotate(
        name,
        at,
        xytext=(-12, 20) if is_above else (12, -20),
        textcoords="offset points",
        ha="center",
        va="center",
        color="white",
        fontsize=8.5,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.25", "facecolor": BAD, "edgecolor": "white"},
        arrowprops={"arrowstyle": "-", "color": BAD, "lw": 0.9, "shrinkA": 0, "shrinkB": 2},
        zorder=5,
    )


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
