"""What a person looks at in a checked run: rows, pictures, the surroundings of a violation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from jepsen_like.checkers.kernel.facts import OPS_COLUMNS
from jepsen_like.checkers.kernel.tables import gather, table_to_numpy
from jepsen_like.checkers.verdict import Violation
from jepsen_like.history.columns import NODES, OBS, OPS, NodeKind, history_of
from jepsen_like.history.operation import NEVER, F, Outcome
from jepsen_like.history.parquet import FOLDER, SUMMARY
from jepsen_like.report.faults import Fault, faults_of
from jepsen_like.report.order import orders_of
from jepsen_like.report.pictures import Pictures
from jepsen_like.report.roles import Reign, down_of, lag_of, nodes_of, reigns_of
from jepsen_like.report.run_folder import Sample
from jepsen_like.report.series import (
    Columns,
    Span,
    availability_of,
    columns_of,
    latency_of,
    rates_of,
    span_of,
)
from spark_jobs.notebooks import more_pictures
from spark_jobs.notebooks.more_pictures import Bounds

SHIPPED: Final = Path(__file__).parent / "data"
"""A good run and a broken one."""
PICTURE: Final = ("latency-raw", "latency", "rate", "leader", "lag", "availability", "faults")
"""Pictures of a whole run, in the order in which one looks at them."""
MORE: Final = ("unseen", "timeline")


@dataclass
class Looked:
    """One run to look at.

    Attributes:
        folder: The run, or its tables.
        pictures: Where pictures are written; made if it is not there.
    """

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
        """What brokers said of themselves, in order of time."""
        nodes = self.table("nodes")
        rows = nodes.filter(pc.equal(nodes.column("kind"), int(NodeKind.SAMPLE))).to_pylist()
        names = ("at_ns", "node", "role", "term", "commit_index", "last_index")
        return sorted(
            (Sample(*(row[name] for name in names)) for row in rows), key=lambda told: told.at_ns
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
    def reigns(self) -> list[Reign]:
        """Who led when."""
        return reigns_of(self.history.events, self.samples, self.span)

    @cached_property
    def _draw(self) -> Pictures:
        nodes = nodes_of(self.reigns, self.samples)
        return Pictures(self.pictures, self.span, self.faults, nodes)

    # -- pictures --------------------------------------------------------------------------

    def draw(self, name: str) -> Path:
        """Draw one of `PICTURE` or `MORE` and return its file.

        Raises:
            KeyError: There is no picture of this name.
        """
        columns, span, draw = self.columns, self.span, self._draw
        {
            "latency-raw": lambda: more_pictures.latency_raw(draw, columns),
            "latency": lambda: draw.latency(latency_of(columns, span)),
            "rate": lambda: draw.rate(rates_of(columns, span)),
            "leader": lambda: draw.leader(self.reigns, down_of(self.samples, span)),
            "lag": lambda: draw.lag(lag_of(self.samples, span)),
            "availability": lambda: draw.availability(availability_of(columns, span)),
            "faults": draw.timeline,
            "unseen": lambda: more_pictures.unseen(draw, self.history.operations),
            "timeline": lambda: more_pictures.timeline(draw, self.history.operations),
        }[name]()
        return self.pictures / f"{name}.png"

    def draw_order(self, violation: Violation) -> Path:
        """Draw sends and reads around the witnesses of a violation of a queue.

        Raises:
            ValueError: It names no operation of a queue.
        """
        (order, *_) = orders_of(self.history.operations, [violation])
        self._draw.order(order, 1)
        return self.pictures / "order-1.png"

    def draw_bounds(self, topic: str, queue: int) -> Path:
        """Draw until when each offset was missing, and from when on it was there."""
        more_pictures.bounds(self._draw, self.bounds(topic, queue))
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
            "queue": f"{op.topic}/{op.queue}",
            "offset": op.off,
            "value": op.value,
        }

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
        told = [
            {
                "at s": round(self.span.at_s(event.at_ns), 3),
                "what": event.kind,
                "node": event.node or event.target,
                "detail": event.detail[:60],
            }
            for event in sorted(self.history.events, key=lambda event: event.at_ns)
        ]
        return [row for row in told if begin_s <= row["at s"] <= end_s]


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


def head(table: pa.Table, count: int, *names: str) -> str:
    """Return the first rows of a table as text."""
    rows: list[dict[str, Any]] = table.slice(0, count).select(list(names)).to_pylist()
    return as_text(rows)
