"""Pictures that a report does not have: every operation by itself, and bounds of offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from jepsen_like.checkers.kernel.facts import NOT_YET
from jepsen_like.history.operation import NEVER, F, Operation, Outcome
from jepsen_like.report.canvas import Canvas, canvas, draw_bands, save, time_axis
from jepsen_like.report.colours import BAD, DOUBT, FAINT, GOOD
from jepsen_like.report.pictures import Pictures
from jepsen_like.report.series import NS, Columns

I64 = npt.NDArray[np.int64]

POINTS_MAX: Final = 10_000
"""Points drawn; of more operations every n-th, and the picture says so."""
LANES_MAX: Final = 40
"""Processes in the timeline; a person cannot tell more of them apart."""
OUTCOMES: Final = {Outcome.OK: GOOD, Outcome.INFO: DOUBT, Outcome.FAIL: BAD}
MARKERS: Final = {
    F.SEND: "o", F.PULL: "v", F.MAX_OFFSET: "s", F.MIN_OFFSET: "D", F.COMMIT: "x",
    F.FETCH_COMMIT: "+",
}  # fmt: skip


class Bounds(NamedTuple):
    """By offset: the earliest and the latest time of its append that clients' answers allow."""

    queue: str
    earliest: I64
    latest: I64


def latency_raw(draw: Pictures, columns: Columns) -> str:
    """Draw every operation at its call: how long it took, its kind, how it ended."""
    kinds = [f for f in F if (columns.f == f).any()]
    made = canvas("latency-raw", draw.layout, [3.2], legend_rows=4 + len(kinds) + len(draw.bands))
    (axes,) = made.axes
    step = -(-len(columns) // POINTS_MAX)
    shown = np.arange(len(columns)) % step == 0
    at_s = (columns.call_ns - draw.span.begin_ns) / NS
    end_ns = np.where(columns.ret_ns == NEVER, draw.span.end_ns, columns.ret_ns)
    took_ms = np.maximum(end_ns - columns.call_ns, 1) / 1e6
    for outcome, colour in OUTCOMES.items():
        for f in kinds:
            rows = shown & (columns.outcome == outcome) & (columns.f == f)
            axes.plot(
                at_s[rows], took_ms[rows], ls="", marker=MARKERS.get(f, "*"), ms=2.6,
                color=colour, alpha=0.6, mew=0.5,
            )  # fmt: skip
        name = outcome.name.lower() + (" (until the end)" if outcome is Outcome.INFO else "")
        made.entries.append((Patch(color=colour), name))
    for f in kinds:
        marker = Line2D([], [], ls="", marker=MARKERS.get(f, "*"), color="#555555", ms=5)
        made.entries.append((marker, f.name.lower()))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
    axes.set_ylabel("latency (ms)" if step == 1 else f"latency (ms), 1 in {step}")
    return _finish(draw, made)


def unseen(draw: Pictures, operations: Sequence[Operation]) -> str:
    """Draw how many acknowledged messages no pull had found yet."""
    made = canvas("unseen", draw.layout, [2.2], legend_rows=2 + len(draw.bands))
    (axes,) = made.axes
    acked = {
        (op.topic, op.queue, op.off): op.ret_ns
        for op in operations
        if op.f == F.SEND and op.outcome == Outcome.OK
    }
    found: dict[tuple[str, int, int], int] = {}
    for op in operations:
        if op.f == F.PULL and op.outcome == Outcome.OK:
            for off in range(op.off, op.off + op.cnt):
                place = (op.topic, op.queue, off)
                found[place] = min(found.get(place, NEVER), op.ret_ns)
    ups = np.array(sorted(acked.values()), dtype=np.int64)
    downs = [max(at, acked[place]) for place, at in found.items() if place in acked]
    downs_ns = np.array(sorted(downs), dtype=np.int64)
    times = np.unique(np.concatenate(([draw.span.begin_ns], ups, downs_ns, [draw.span.end_ns])))
    count = np.searchsorted(ups, times, "right") - np.searchsorted(downs_ns, times, "right")
    axes.step((times - draw.span.begin_ns) / NS, count, where="post", color=DOUBT, lw=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("acknowledged messages")
    made.entries.append((Line2D([], [], color=DOUBT, lw=2), "not read yet"))
    return _finish(draw, made)


def timeline(draw: Pictures, operations: Sequence[Operation]) -> str:
    """Draw a lane per process with a bar per operation; no answer: pale until the end."""
    every = sorted({op.process for op in operations})
    processes = every[:: -(-len(every) // LANES_MAX)]
    made = canvas("timeline", draw.layout, [0.14 * max(len(processes), 12)], legend_rows=3)
    (axes,) = made.axes
    lane = {process: at for at, process in enumerate(processes)}
    least_s = draw.span.duration_s / 2_000
    for outcome, colour in OUTCOMES.items():
        for process, at in lane.items():
            rows = [op for op in operations if op.process == process and op.outcome == outcome]
            spells = [(draw.span.at_s(op.call_ns), draw.span.at_s(op.ret_ns)) for op in rows]
            bars = [(begin, max(end - begin, least_s)) for begin, end in spells]
            alpha = 0.25 if outcome is Outcome.INFO else 0.9
            axes.broken_barh(bars, (at - 0.4, 0.8), facecolor=colour, lw=0, alpha=alpha)
        made.entries.append((Patch(color=colour), outcome.name.lower()))
    axes.set_ylim(len(processes) - 0.5, -0.5)
    step = max(len(processes) // 10, 1)
    axes.set_yticks(range(0, len(processes), step), [str(p) for p in processes[::step]])
    axes.set_ylabel("process" if len(every) == len(processes) else f"{len(processes)} processes")
    time_axis(made, draw.span)
    axes.grid(axis="x")
    return save(made, draw.folder)


def bounds(draw: Pictures, told: Bounds) -> str:
    """Draw for each offset when its append may have happened; red where it cannot have."""
    made = canvas("bounds", draw.layout, [3.4], legend_rows=4)
    (axes,) = made.axes
    offs = np.arange(len(told.earliest))
    begin, end = draw.span.begin_ns, draw.span.end_ns
    low = np.where(told.earliest == NOT_YET, begin, told.earliest)
    high = np.where(told.latest == NEVER, end, told.latest)
    low_s, high_s = (low - begin) / NS, (high - begin) / NS
    wrong = low > high
    axes.vlines(offs[~wrong], low_s[~wrong], high_s[~wrong], color=FAINT, lw=1.5)
    axes.vlines(offs[wrong], high_s[wrong], low_s[wrong], color=BAD, lw=1.5)
    axes.step(offs, low_s, where="mid", color=GOOD, lw=1.1)
    axes.step(offs, high_s, where="mid", color=DOUBT, lw=1.1)
    made.entries = [
        (Line2D([], [], color=DOUBT, lw=2), "there by then"),
        (Patch(color=FAINT), "appended meanwhile"),
        (Line2D([], [], color=GOOD, lw=2), "missing until then"),
        (Patch(color=BAD), "there, and missing later"),
    ]
    axes.set_ylabel("time (s)")
    axes.set_xlabel(f"offset in {told.queue}", labelpad=3)
    axes.grid(axis="both")
    return save(made, draw.folder)


def _finish(draw: Pictures, made: Canvas) -> str:
    time_axis(made, draw.span)
    for axes in made.axes:
        axes.grid(axis="both")
    draw_bands(made, draw.bands)
    return save(made, draw.folder)
