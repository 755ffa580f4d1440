"""What proves a violation of POP, or of exactly-once steps, as a person reads it.

Of POP: all rows of one message in one consumer group, and a picture of when it was out and to whom.
Of steps: the rows of two steps, and the outputs that both left for the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from dledger.jepsen_like.report.canvas import (
    BAD,
    DOUBT,
    GOOD,
    INK,
    canvas,
    draw_bands,
    save,
    time_axis,
)
from dledger.jepsen_like.report.series import NS
from dledger.spark_jobs.notebooks.pictures import Looked

MS_NS: Final = 1_000_000
OF_MESSAGE: Final = frozenset({F.RECEIVE, F.ACK, F.CHANGE_TIME})
AROUND_S: Final = 1.0
"""Time before and after a message that a picture shows."""


class Out(NamedTuple):
    """A time that a message was one receiver's.

    Attributes:
        process: Of the receiver.
        attempt: How often the message was handed out, this time included.
        begin_ns: Of the call, or the end of the attempt before it: a receive may wait.
        known_ns: Of the return: by then it was out.
        end_ns: The earliest time at which it may be handed out again; an acknowledgement ends it.
    """

    process: int
    attempt: int
    begin_ns: int
    known_ns: int
    end_ns: int


def _witnesses(run: Looked, violation: Violation) -> list[Operation]:
    named = {op.op_id: op for op in run.history.operations}
    return [named[op_id] for op_id in violation.operations if op_id in named]


def _of_message(run: Looked, violation: Violation) -> list[Operation]:
    """Return the rows of the message that the first witness names, in order of their calls."""
    first = _witnesses(run, violation)[0]
    place = (first.group, first.topic, first.queue, first.off)
    rows = [
        op
        for op in run.history.operations
        if op.f in OF_MESSAGE and (op.group, op.topic, op.queue, op.off) == place
    ]
    return sorted(rows, key=lambda op: op.call_ns)


def outs_of(run: Looked, violation: Violation) -> list[Out]:
    """Return when the message of a violation was out, in order of its attempts."""
    found: list[Out] = []
    for op in _of_message(run, violation):
        if op.outcome != Outcome.OK:
            continue
        if op.f == F.RECEIVE:
            # A receive that waited is given the message when the attempt before is over.
            waited_ns = found[-1].end_ns if found else 0
            begin_ns = max(op.call_ns, waited_ns if waited_ns < op.ret_ns else 0)
            end_ns = begin_ns + op.status * MS_NS
            found.append(Out(op.process, op.cnt, begin_ns, op.ret_ns, end_ns))
        elif found:
            end_ns = op.ret_ns if op.f == F.ACK else op.call_ns + op.status * MS_NS
            found[-1] = found[-1]._replace(end_ns=end_ns)
    return found


def message_rows(run: Looked, violation: Violation) -> list[dict[str, Any]]:
    """Return what receivers did with the message of a violation, a row for each operation."""
    return [
        {
            "operation": op.op_id,
            "receiver": op.process,
            "what": F(op.f).name.lower(),
            "ended": op.err or Outcome(op.outcome).name.lower(),
            "called at s": f"{run.span.at_s(op.call_ns):.3f}",
            "returned at s": f"{run.span.at_s(op.ret_ns):.3f}",
            "attempt": op.cnt if op.f == F.RECEIVE else "",
            "receipt": op.txn,
            "for s": "" if op.status == NOTHING else op.status / 1000,
        }
        for op in _of_message(run, violation)
    ]


def draw_message(run: Looked, violation: Violation) -> Path:
    """Draw when the message of a violation was out; red where it was handed out too early."""
    outs = outs_of(run, violation)
    bands = run.bands
    made = canvas(
        "message",
        [0.45 * len(outs) + 0.4],
        legend_rows=3 + len(bands),
        title=f"{violation.subject}, {violation.detail}: whose it was, by what receivers saw",
    )
    (axes,) = made.axes
    for lane, (first, second) in enumerate(pairwise(outs), 1):
        if second.known_ns < first.end_ns:
            early_s = (first.end_ns - second.begin_ns) / NS
            place = (run.span.at_s(second.begin_ns), early_s)
            axes.broken_barh([place], (lane - 0.3, 0.6), facecolor=BAD, alpha=0.5, lw=0)
    for lane, out in enumerate(outs):
        begin_s, end_s = run.span.at_s(out.begin_ns), run.span.at_s(out.end_ns)
        axes.broken_barh([(begin_s, end_s - begin_s)], (lane - 0.3, 0.6), facecolor=GOOD, lw=0)
    for op in _of_message(run, violation):
        if op.f == F.ACK:
            colour = INK if op.outcome == Outcome.OK else DOUBT
            lane = max(at for at, out in enumerate(outs) if out.begin_ns <= op.call_ns)
            axes.plot([run.span.at_s(op.call_ns)], [lane], "x", color=colour, ms=8, mew=2)
    texts = [f"attempt {out.attempt},\nreceiver {out.process}" for out in outs]
    axes.set_yticks(range(len(outs)), texts)
    axes.set_ylim(len(outs) - 0.4, -0.8)
    made.entries = [
        (Patch(color=GOOD), "out"),
        (Patch(color=BAD, alpha=0.5), "not yet to be out again"),
        (Line2D([], [], ls="", marker="x", color=INK, ms=7, mew=2), "acknowledged"),
    ]
    time_axis(made, run.span)
    first_s, last_s = run.span.at_s(outs[0].begin_ns), max(run.span.at_s(o.end_ns) for o in outs)
    axes.set_xlim(first_s - AROUND_S, last_s + AROUND_S)
    axes.xaxis.set_major_locator(MaxNLocator(10))
    axes.grid(axis="x")
    draw_bands(made, bands)
    save(made, run.pictures)
    return run.pictures / "message.png"


def step_rows(run: Looked, violation: Violation) -> list[dict[str, Any]]:
    """Return the two steps of a violation."""
    return [
        {
            "operation": op.op_id,
            "client": op.process,
            "what": F(op.f).name.lower(),
            "ended": Outcome(op.outcome).name.lower(),
            "called at s": f"{run.span.at_s(op.call_ns):.3f}",
            "returned at s": f"{run.span.at_s(op.ret_ns):.3f}",
            "queue": op.place,
            "began at": op.off,
            "led to": op.max_off,
        }
        for op in _witnesses(run, violation)
    ]


def output_rows(run: Looked, violation: Violation) -> list[dict[str, Any]]:
    """Return the outputs that are there for messages that both steps of a violation had."""
    steps = _witnesses(run, violation)
    common = range(max(op.min_off for op in steps), min(op.max_off for op in steps))
    return [
        {
            "message": f"{op.topic}/{op.queue} {op.off}",
            "of step": op.txn,
            "output": f"queue {op.cnt}, offset {op.max_off}",
        }
        for op in sorted(_outputs(run, steps), key=lambda op: (op.off, op.txn))
        if op.off in common
    ]


def _outputs(run: Looked, steps: list[Operation]) -> Iterator[Operation]:
    ids = {op.op_id for op in steps}
    place = (steps[0].group, steps[0].topic, steps[0].queue)
    for op in run.history.operations:
        is_of_queue = (op.group, op.topic, op.queue) == place
        if is_of_queue and op.f == F.STEP_FOUND and op.off != NOTHING and op.txn in ids:
            yield op
