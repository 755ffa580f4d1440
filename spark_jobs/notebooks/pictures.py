"""What the notebook shows of a checked run: rows, pictures, the surroundings of a violation.

The last functions draw pictures that a report does not have: every operation by itself, and bounds
of offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.dataset as ds
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from dledger.jepsen_like.checkers.kernel.facts import NOT_YET, OPS_COLUMNS
from dledger.jepsen_like.checkers.kernel.tables import gather, table_to_numpy
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.columns import NODES, OBS, OPS, NodeKind, history_of
from dledger.jepsen_like.history.operation import NEVER, F, Operation, Outcome, Sample
from dledger.jepsen_like.history.parquet import FOLDER, SUMMARY
from dledger.jepsen_like.report.canvas import (
    BAD,
    DOUBT,
    EDGE_STRIPE,
    FAINT,
    GOOD,
    canvas,
    save,
)
from dledger.jepsen_like.report.pictures import Pictures
from dledger.jepsen_like.report.series import (
    NS,
    Columns,
    Fault,
    Leadership,
    Span,
    availability_of,
    columns_of,
    down_of,
    faults_of,
    lag_of,
    latency_of,
    leaderships_of,
    nodes_of,
    rates_of,
    span_of,
)
from dledger.jepsen_like.report.witness_picture import draw_witnesses, orders_of

SHIPPED: Final = Path(__file__).parent / "data"
"""A good run and a broken one of real brokers; one of POP and one of steps, simulated."""
PICTURE: Final = ("latency-raw", "latency", "rate", "leader", "lag", "availability", "faults")
"""Pictures of a whole run, in the order in which they are read."""
MORE: Final = ("unseen", "timeline")


@dataclass
class Looked:
    """One run to look at."""

    folder: Path
    pictures: Path

    def __post_init__(self) -> None:
        self.pictures.mkdir(parents=True, exist_ok=True)

    def table(self, name: str) -> Any:
        """Return a table: ops, obs, events or nodes."""
        whole = (self.folder / SUMMARY).is_file()
        parquet = self.folder if whole else self.folder / FOLDER
        schema = {"ops": OPS, "obs": OBS, "nodes": NODES}.get(name)
        return ds.dataset(parquet / f"{name}.parquet", schema=schema).to_table()

    @cached_property
    def history(self) -> Any:
        """The rows of the tables."""
        return history_of(*(self.table(name) for name in ("ops", "obs", "events", "nodes")))

    @cached_property
    def samples(self) -> list[Sample]:
        """What brokers reported of themselves, in order of time."""
        nodes = self.table("nodes")
        rows = nodes.filter(pc.equal(nodes.column("kind"), int(NodeKind.SAMPLE))).to_pylist()
        names = ("at_ns", "node", "role", "term", "commit_index", "last_index")
        return sorted(
            (Sample(*(row[name] for name in names)) for row in rows),
            key=lambda sample: sample.at_ns,
        )

    @cached_property
    def columns(self) -> Columns:
        """All operations."""
        return columns_of(self.history.operations)

    @cached_property
    def span(self) -> Span:
        """The time it took."""
        return span_of(self.columns, self.history.events, self.samples)

    @cached_property
    def faults(self) -> list[Fault]:
        """What was done to the cluster."""
        return faults_of(self.history.events, self.span)

    @cached_property
    def terms(self) -> list[Leadership]:
        """Leaders over time."""
        return leaderships_of(self.history.events, self.samples, self.span)

    @cached_property
    def _draw(self) -> Pictures:
        nodes = nodes_of(self.terms, self.samples)
        return Pictures(self.pictures, self.span, self.faults, nodes)

    @property
    def bands(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Its faults by kind, each from when to when, in seconds."""
        return self._draw.bands

    # -- pictures --------------------------------------------------------------------------

    def draw(self, name: str) -> Path:
        """Draw one of `PICTURE` or `MORE` and return its file.

        Raises KeyError: there is no picture of this name.
        """
        columns, span, draw = self.columns, self.span, self._draw
        {
            "latency-raw": lambda: latency_raw(draw, columns),
            "latency": lambda: draw.latency(latency_of(columns, span)),
            "rate": lambda: draw.rate(rates_of(columns, span)),
            "leader": lambda: draw.leader(self.terms, down_of(self.samples, span)),
            "lag": lambda: draw.lag(lag_of(self.samples, span)),
            "availability": lambda: draw.availability(availability_of(columns, span)),
            "faults": draw.timeline,
            "unseen": lambda: unseen(draw, self.history.operations),
            "timeline": lambda: timeline(draw, self.history.operations),
        }[name]()
        return self.pictures / f"{name}.png"

    def draw_order(self, violation: Violation) -> Path:
        """Draw sends and reads around the witnesses of a violation of a queue.

        Raises ValueError: it names no operation of a queue.
        """
        (order, *_) = orders_of(self.history.operations, [violation])
        draw_witnesses(self._draw, order, 1, self.terms)
        return self.pictures / "order-1.png"

    def draw_bounds(self, topic: str, queue: int) -> Path:
        """Draw until when each offset was missing, and from when on it was there."""
        bounds(self._draw, self.bounds(topic, queue))
        return self.pictures / "bounds.png"

    # -- a violation -----------------------------------------------------------------------

    def bounds(self, topic: str, queue: int) -> Bounds:
        """Return the bounds of each offset of a queue, as the kernel has them."""
        ops = self.table("ops")
        its = pc.and_(pc.equal(ops.column("topic"), topic), pc.equal(ops.column("queue"), queue))
        facts = gather([table_to_numpy(ops.filter(its), OPS_COLUMNS)], [])
        facts.open(None)
        lo, hi = facts.lo[: facts.end], facts.hi[: facts.end]
        earliest = np.maximum.accumulate(lo)
        latest = np.minimum.accumulate(hi[::-1])[::-1]
        return Bounds(f"{topic}/{queue}", earliest, latest)

    def witnesses(self, violation: Violation) -> list[dict[str, Any]]:
        """Return the operations that prove a violation, as a person reads them."""
        named = {op.op_id: op for op in self.history.operations}
        return [self._row(named[op_id]) for op_id in violation.operations if op_id in named]

    def _row(self, op: Any) -> dict[str, Any]:
        return {
            "operation": op.op_id,
            "process": op.process,
            "what": F(op.f).name.lower(),
            "ended": Outcome(op.outcome).name.lower(),
            "called at s": round(self.span.at_s(op.call_ns), 3),
            "returned at s": None if op.ret_ns == NEVER else round(self.span.at_s(op.ret_ns), 3),
            "queue": op.place,
            "offset": op.off,
            "value": op.value,
        }

    def first_rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first operations, with the names of kinds and outcomes."""
        return [self._row(op) for op in self.history.operations[:count]]

    def held_at(self, topic: str, queue: int, off: int) -> dict[str, int]:
        """Return what each replica held at an offset when the run was over."""
        return {
            read.node: read.values[off - read.min_off]
            for read in self.history.replica_reads
            if (read.topic, read.queue) == (topic, queue)
            and 0 <= off - read.min_off < len(read.values)
        }

    def happened_between(self, begin_s: float, end_s: float) -> list[dict[str, Any]]:
        """Return faults and changes of role in a part of the run."""
        rows: list[dict[str, Any]] = []
        for event in sorted(self.history.events, key=lambda event: event.at_ns):
            at_s, until_s = self.span.at_s(event.at_ns), self.span.at_s(event.end_ns)
            if begin_s <= at_s <= end_s:
                rows.append(
                    {
                        "at s": f"{at_s:.3f}",
                        "until s": f"{until_s:.3f}" if event.end_ns > event.at_ns else "",
                        "what": event.kind,
                        "node": event.node or event.target,
                        "detail": event.detail[:60],
                    }
                )
        return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table of text."""
    if not rows:
        return "nothing"
    columns = [[name, *(str(row[name]) for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


I64 = npt.NDArray[np.int64]

POINTS_MAX: Final = 10_000
"""Points drawn; of more operations every n-th, and the picture states it."""
LANES_MAX: Final = 40
"""Processes in the timeline; a person cannot tell more of them apart."""
OUTCOMES: Final = {Outcome.OK: GOOD, Outcome.INFO: DOUBT, Outcome.FAIL: BAD}
_LINES: Final = {Outcome.OK: "", Outcome.INFO: " (until the end)", Outcome.FAIL: ""}
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
    made = canvas("latency-raw", [3.2], legend_rows=4 + len(kinds) + len(draw.bands))
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
    return draw.finish(made)


def unseen(draw: Pictures, operations: Sequence[Operation]) -> str:
    """Draw how many acknowledged messages no pull had found yet."""
    made = canvas("unseen", [2.2], legend_rows=2 + len(draw.bands))
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
    return draw.finish(made)


def timeline(draw: Pictures, operations: Sequence[Operation]) -> str:
    """Draw a lane per client: sends in its upper half, reads in its lower; no answer: a line."""
    every = sorted({op.process for op in operations})
    processes = every[:: -(-len(every) // LANES_MAX)]
    heights_in = [0.13 * max(len(processes), 12)]
    made = canvas("timeline", heights_in, legend_rows=3 + len(draw.bands))
    (axes,) = made.axes
    lane = {process: at for at, process in enumerate(processes)}
    least_s = draw.span.duration_s / 1_000
    for outcome, colour in OUTCOMES.items():
        for process, at in lane.items():
            for is_send in (True, False):
                bars = [
                    (draw.span.at_s(op.call_ns), draw.span.at_s(op.ret_ns))
                    for op in operations
                    if (op.process, op.outcome, op.f == F.SEND) == (process, outcome, is_send)
                ]
                widths = [(begin, max(end - begin, least_s)) for begin, end in bars]
                place = (at - (0.4 if is_send else 0.0), 0.4)
                if outcome is Outcome.INFO:
                    place = (place[0] + 0.14, 0.12)
                axes.broken_barh(widths, place, facecolor=colour, lw=0)
        made.entries.append((Patch(color=colour), f"{outcome.name.lower()}{_LINES[outcome]}"))
    # The stripe of the bands is above the first lane.
    axes.set_ylim(len(processes) - 0.5, -0.5 - 1.2 * EDGE_STRIPE * len(processes))
    step = max(len(processes) // 10, 1)
    axes.set_yticks(range(0, len(processes), step), [f"p{p}" for p in processes[::step]])
    axes.set_ylabel("client" if len(every) == len(processes) else f"{len(processes)} clients")
    return draw.finish(made)


def bounds(draw: Pictures, found: Bounds) -> str:
    """Draw for each offset when its append may have happened; red where it cannot have."""
    made = canvas(
        "bounds",
        [3.4],
        legend_rows=4,
        title=f"{found.queue}: when each offset was appended, by what clients saw",
    )
    (axes,) = made.axes
    offs = np.arange(len(found.earliest))
    begin, end = draw.span.begin_ns, draw.span.end_ns
    low = np.where(found.earliest == NOT_YET, begin, found.earliest)
    high = np.where(found.latest == NEVER, end, found.latest)
    low_s, high_s = (low - begin) / NS, (high - begin) / NS
    wrong = low > high
    for which, colour in ((~wrong, FAINT), (wrong, BAD)):
        heights = (high_s - low_s)[which]
        axes.bar(offs[which], heights, width=1.0, bottom=low_s[which], color=colour, lw=0)
    axes.use_sticky_edges = False
    axes.step(offs, low_s, where="mid", color=GOOD, lw=1.1)
    axes.step(offs, high_s, where="mid", color=DOUBT, lw=1.1)
    made.entries = [
        (Line2D([], [], color=DOUBT, lw=2), "there by then"),
        (Patch(color=FAINT), "appended meanwhile"),
        (Line2D([], [], color=GOOD, lw=2), "missing until then"),
        (Patch(color=BAD), "there, and missing later"),
    ]
    axes.set_ylabel("time (s)")
    axes.set_xlabel(f"offset in {found.queue}", labelpad=3)
    axes.grid(axis="both")
    return save(made, draw.folder)
