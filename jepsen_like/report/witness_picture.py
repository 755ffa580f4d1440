"""The picture that explains a violation of a queue: servers, clients and offsets on one time axis.

From top to bottom: a lane per server with its terms as leader and the faults that hit it, a lane
per client with its operations on the queue, and the offsets they name. The operations that prove
the violation are red and have letters, in the lane of their client and at their offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from dledger.jepsen_like.report.canvas import (
    BAD,
    FAINT,
    GOOD,
    INK,
    LEGEND_ROW_IN,
    NODE_COLOURS,
    PLOT_IN,
    canvas,
    draw_bands,
    look_of,
    save,
)
from dledger.jepsen_like.report.pictures import TERM_CHAR_IN, Pictures
from dledger.jepsen_like.report.series import NS, Fault, Leadership, bands_of

# ---------------------------------------------------------------------------- the part of a history


ORDER_OPERATIONS_MAX: Final = 160
"""Operations drawn around the witnesses; with more of them the two that matter are hard to find."""

ORDER_QUEUES_MAX: Final = 4
"""Queues that get a picture of their own; one bug shows in many, and is the same in each."""


class Statement(StrEnum):
    """What an operation states of its offsets."""

    SENT = "send acknowledged at"
    FOUND = "read found"
    END = "read saw the end at"


@dataclass(frozen=True, slots=True)
class Mark:
    """One operation in the picture.

    Attributes:
        low: First offset it speaks of.
        is_witness: It is one of those that prove the violation.
    """

    op: Operation
    statement: Statement
    low: int
    high: int
    is_witness: bool


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """What to draw of one queue.

    Attributes:
        marks: The nearest operations to its witnesses, in order of their calls.
        unanswered: Sends to it whose outcome is unknown, in order of their calls.
    """

    queue: str
    violation: Violation
    marks: tuple[Mark, ...]
    unanswered: tuple[Operation, ...] = ()


def orders_of(operations: Sequence[Operation], violations: Iterable[Violation]) -> list[QueueOrder]:
    """Return the queues to draw: those that violations name and that have a history."""
    first: dict[str, Violation] = {}
    for violation in violations:
        if violation.operations:
            first.setdefault(violation.subject, violation)
    of_queue: dict[str, list[Operation]] = {subject: [] for subject in first}
    chosen = {tuple(subject.rsplit("/", 1)): subject for subject in first if "/" in subject}
    for op in operations:
        subject = chosen.get((op.topic, str(op.queue)))
        if subject is not None and op.f in (F.SEND, F.PULL, F.MAX_OFFSET):
            of_queue[subject].append(op)
    found = [
        QueueOrder(
            subject,
            violation,
            _nearest(of_queue[subject], violation),
            tuple(op for op in of_queue[subject] if _is_unanswered(op)),
        )
        for subject, violation in first.items()
    ]
    return [order for order in found if any(mark.is_witness for mark in order.marks)][
        :ORDER_QUEUES_MAX
    ]


def _is_unanswered(op: Operation) -> bool:
    return op.f == F.SEND and op.outcome == Outcome.INFO


def _nearest(operations: Sequence[Operation], violation: Violation) -> tuple[Mark, ...]:
    witnesses = set(violation.operations)
    marks = [
        Mark(op, *statement, op.op_id in witnesses)
        for op in operations
        if (statement := _statement(op)) is not None
    ]
    times = [stamp for mark in marks if mark.is_witness for stamp in ends_of(mark.op)]

    def distance(mark: Mark) -> tuple[bool, int]:
        begin, end = ends_of(mark.op)
        near = min((max(begin - at, at - end, 0) for at in times), default=0)
        return (not mark.is_witness, near)

    kept = sorted(marks, key=distance)[:ORDER_OPERATIONS_MAX]
    return tuple(sorted(kept, key=lambda mark: mark.op.call_ns))


def ends_of(op: Operation) -> tuple[int, int]:
    """Return call and return; the call twice when it never returned."""
    return op.call_ns, op.call_ns if op.ret_ns == NEVER else op.ret_ns


def _statement(op: Operation) -> tuple[Statement, int, int] | None:
    """Return what *op* states and of which offsets; None: nothing that can be drawn."""
    if op.outcome != Outcome.OK:
        return None
    if op.f == F.SEND:
        return None if op.off == NOTHING else (Statement.SENT, op.off, op.off)
    if op.f == F.PULL and op.values:
        return (Statement.FOUND, op.off, op.off + len(op.values) - 1)
    return None if op.max_off == NOTHING else (Statement.END, op.max_off, op.max_off)


# ---------------------------------------------------------------------------------- its picture


WITNESS_NAMES: Final = "ABCDEFGH"
"""Witnesses that get a letter; two prove most anomalies."""

NODE_IN: Final = 0.3
CLIENT_IN: Final = 0.15
OFFSETS_IN: Final = 2.3
GAP_IN: Final = 0.12

CLIENTS_MAX: Final = 12
"""Lanes of clients: those of the witnesses and the ones that called nearest to them."""

MARK_IN: Final = 0.045
"""Least width of an operation: what was shorter would not be seen."""

AROUND: Final = 0.18
"""Time before and after the witnesses, as a part of the time between them."""
AROUND_LEAST_S: Final = 0.15
OFFSETS_BELOW, OFFSETS_ABOVE = 8.0, 18.0
"""Offsets shown below the lowest witness and above the highest, at least."""

COLOURS: Final = {Statement.SENT: GOOD, Statement.FOUND: "#7d8fa3", Statement.END: "#aa4499"}
UNANSWERED: Final = "#b8a25a"
_TEXTS: Final = {
    Statement.SENT: "send",
    Statement.FOUND: "read found",
    Statement.END: "read saw the end",
}

Spell = tuple[float, float]


@dataclass(slots=True)
class _Drawing:
    """What the panels share."""

    draw: Pictures
    order: QueueOrder
    begin_s: float
    end_s: float
    letters: dict[int, str]

    @property
    def least_s(self) -> float:
        return (self.end_s - self.begin_s) * MARK_IN / PLOT_IN

    def spell(self, op: Operation) -> Spell:
        begin_ns, end_ns = ends_of(op)
        begin_s = (begin_ns - self.draw.span.begin_ns) / NS
        end_s = (end_ns - self.draw.span.begin_ns) / NS
        return begin_s, max(end_s, begin_s + self.least_s)

    def is_there(self, spell: Spell) -> bool:
        return spell[1] > self.begin_s and spell[0] < self.end_s


def draw_witnesses(
    draw: Pictures, order: QueueOrder, number: int, terms: Sequence[Leadership] = ()
) -> str:
    """Draw what led to a violation of a queue, as picture *number*, and return the SVG."""
    drawing = _window(draw, order)
    clients = _clients(drawing)
    bands = _bands(drawing)
    has_unanswered = any(drawing.is_there(drawing.spell(op)) for op in order.unanswered)
    rows = len(_TEXTS) + 1 + has_unanswered + 2 * len(drawing.letters) + len(bands) + bool(terms)
    lanes_in = (NODE_IN * len(draw.nodes), CLIENT_IN * max(len(clients), 3))
    offsets_in = max(OFFSETS_IN, rows * LEGEND_ROW_IN + 0.15 - sum(lanes_in) - 2 * GAP_IN)
    heights_in = [height for height in (*lanes_in, offsets_in) if height]
    made = canvas(
        f"order-{number}", heights_in, legend_rows=rows, gap_in=GAP_IN,
        title=f"{order.queue}: {order.violation.name}",
    )  # fmt: skip
    *upper, lane_axes, offset_axes = made.axes
    if upper:
        _draw_nodes(upper[0], drawing, terms)
    _draw_clients(lane_axes, drawing, clients)
    _draw_offsets(offset_axes, drawing)
    for axes in made.axes:
        axes.set_xlim(drawing.begin_s, drawing.end_s)
        axes.xaxis.set_major_locator(MaxNLocator(8))
        axes.tick_params(axis="x", labelbottom=axes is offset_axes)
        axes.grid(axis="x")
    offset_axes.grid(axis="y")
    offset_axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.9g}"))
    offset_axes.set_xlabel("time since the run began (s)", labelpad=3)
    for mark in order.marks:
        if mark.op.op_id in drawing.letters:
            letter = drawing.letters[mark.op.op_id]
            offsets = str(mark.low) + (f" to {mark.high}" if mark.high > mark.low else "")
            handle = Line2D([], [], ls="", marker=f"${letter}$", color=BAD, markersize=7)
            text = f"{mark.statement}\n{offsets} by p{mark.op.process} (op {mark.op.op_id})"
            made.entries.append((handle, text))
    made.entries += [(Patch(color=COLOURS[statement]), text) for statement, text in _TEXTS.items()]
    made.entries.append((Patch(color=BAD), "witness"))
    if has_unanswered:
        made.entries.append((Patch(color=UNANSWERED, alpha=0.5), "send without answer"))
    if terms:
        made.entries.append((Patch(color=INK), "leads, with its term"))
    draw_bands(made, bands)
    return save(made, draw.folder)


def _window(draw: Pictures, order: QueueOrder) -> _Drawing:
    witnesses = [mark for mark in order.marks if mark.is_witness]
    names = zip(sorted(witnesses, key=lambda mark: mark.op.call_ns), WITNESS_NAMES, strict=False)
    letters = {mark.op.op_id: name for mark, name in names}
    stamps = [(ns - draw.span.begin_ns) / NS for mark in witnesses for ns in ends_of(mark.op)]
    around_s = max((max(stamps) - min(stamps)) * AROUND, AROUND_LEAST_S)
    return _Drawing(draw, order, min(stamps) - around_s, max(stamps) + around_s, letters)


def _bands(drawing: _Drawing) -> dict[str, list[Spell]]:
    """Return when each kind of fault was at work in the window."""
    span = drawing.draw.span
    bands = bands_of(drawing.draw.faults, span, least_s=drawing.least_s)
    there = {kind: [s for s in spells if drawing.is_there(s)] for kind, spells in bands.items()}
    return {kind: spells for kind, spells in there.items() if spells}


def _clients(drawing: _Drawing) -> list[int]:
    """Return the clients that get a lane, in the order of their first call in the window."""
    order = drawing.order
    middle_s = (drawing.begin_s + drawing.end_s) / 2
    near: dict[int, float] = {}
    first: dict[int, int] = {}
    for op in (*(mark.op for mark in order.marks), *order.unanswered):
        spell = drawing.spell(op)
        if drawing.is_there(spell):
            is_witness = op.op_id in drawing.letters
            distance = -1.0 if is_witness else abs(spell[0] - middle_s)
            near[op.process] = min(near.get(op.process, distance), distance)
            first[op.process] = min(first.get(op.process, op.call_ns), op.call_ns)
    kept = sorted(near, key=lambda process: near[process])[:CLIENTS_MAX]
    return sorted(kept, key=lambda process: first[process])


def _draw_nodes(axes: Axes, drawing: _Drawing, terms: Sequence[Leadership]) -> None:
    draw = drawing.draw
    in_per_s = PLOT_IN / (drawing.end_s - drawing.begin_s)
    for lane, node in enumerate(draw.nodes):
        axes.axhspan(lane - 0.4, lane + 0.06, color=FAINT, alpha=0.45, lw=0, zorder=1)
        for term in terms:
            if term.node != node or not drawing.is_there((term.begin_s, term.end_s)):
                continue
            begin_s = max(term.begin_s, drawing.begin_s)
            end_s = min(max(term.end_s, begin_s + drawing.least_s), drawing.end_s)
            colour = NODE_COLOURS[lane % len(NODE_COLOURS)]
            bar = Rectangle(
                (begin_s, lane - 0.4), end_s - begin_s, 0.46, facecolor=colour, zorder=3
            )
            axes.add_patch(bar)
            space_in = (end_s - begin_s) * in_per_s
            texts = (f"term {term.term}", str(term.term)) if term.term >= 0 else ()
            text = next((t for t in texts if len(t) * TERM_CHAR_IN <= space_in), "")
            if text:
                axes.text(
                    (begin_s + end_s) / 2, lane - 0.17, text, color="white", ha="center",
                    va="center", fontsize=7.5, zorder=4,
                )  # fmt: skip
        for fault in draw.faults:
            if node in _nodes_of(fault):
                width = max(fault.end_s - fault.begin_s, drawing.least_s)
                colour, hatch = look_of(fault.kind)
                axes.broken_barh(
                    [(fault.begin_s, width)], (lane + 0.12, 0.3), facecolor=colour, hatch=hatch,
                    edgecolor="white", lw=0.3, zorder=3,
                )  # fmt: skip
    axes.set_ylim(len(draw.nodes) - 0.5, -0.5)
    axes.set_yticks(range(len(draw.nodes)), draw.nodes, parse_math=False)
    axes.tick_params(axis="y", length=0)


def _nodes_of(fault: Fault) -> set[str]:
    return {name.strip() for name in fault.node.split(",")}


def _draw_clients(axes: Axes, drawing: _Drawing, clients: Sequence[int]) -> None:
    lanes = {process: lane for lane, process in enumerate(clients)}
    for op in drawing.order.unanswered:
        if op.process in lanes:
            _bar(axes, lanes[op.process], drawing.spell(op), UNANSWERED, 0.5)
    for mark in drawing.order.marks:
        if mark.op.process not in lanes:
            continue
        lane, spell = lanes[mark.op.process], drawing.spell(mark.op)
        _bar(axes, lane, spell, BAD if mark.is_witness else COLOURS[mark.statement], 0.9)
        if mark.op.op_id in drawing.letters:
            _letter(axes, drawing.letters[mark.op.op_id], ((spell[0] + spell[1]) / 2, lane), 0)
    axes.set_ylim(max(len(clients), 3) - 0.5, -0.5)
    step = 1 if len(clients) <= 6 else 2
    axes.set_yticks(range(0, len(clients), step), [f"p{process}" for process in clients[::step]])
    axes.tick_params(axis="y", length=0, labelsize=7.5)


def _bar(axes: Axes, lane: int, spell: Spell, colour: str, alpha: float) -> None:
    begin_s, end_s = spell
    zorder = 4 if colour == BAD else 2
    bar = Rectangle(
        (begin_s, lane - 0.38), end_s - begin_s, 0.76, facecolor=colour, alpha=alpha, lw=0,
        zorder=zorder,
    )  # fmt: skip
    axes.add_patch(bar)


def _draw_offsets(axes: Axes, drawing: _Drawing) -> None:
    witnesses = [mark for mark in drawing.order.marks if mark.is_witness]
    spoken = [m for m in witnesses if m.statement is Statement.SENT] or witnesses
    low = min(mark.low for mark in spoken) - OFFSETS_BELOW
    high = max(mark.high for mark in spoken) + OFFSETS_ABOVE
    tall = (high - low) / 50
    for mark in drawing.order.marks:
        begin_s, end_s = drawing.spell(mark.op)
        height = tall / 2 if mark.statement is Statement.END else mark.high - mark.low + tall
        middle = (mark.low + mark.high) / 2
        axes.add_patch(
            Rectangle(
                (begin_s, middle - height / 2), end_s - begin_s, height,
                facecolor=BAD if mark.is_witness else COLOURS[mark.statement],
                alpha=0.3 if mark.statement is Statement.FOUND and not mark.is_witness else 0.9,
                lw=0, zorder=4 if mark.is_witness else 2,
            )
        )  # fmt: skip
        letter = drawing.letters.get(mark.op.op_id)
        if letter:
            at = ((begin_s + end_s) / 2, min(max(middle, low), high))
            _letter(axes, letter, at, 20 if letter in "ACEG" else -20)
    axes.set_ylim(max(low, -1.0), high)
    axes.yaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axes.set_ylabel("queue offset")


def _letter(axes: Axes, letter: str, at: tuple[float, float], above_points: float) -> None:
    """Write a letter on a witness, or beside it with a line that leads to it."""
    axes.annotate(
        letter, at, xytext=(0.6 * above_points, above_points), textcoords="offset points",
        ha="center", va="center", color="white", fontsize=8, fontweight="bold", zorder=6,
        bbox={"boxstyle": "circle,pad=0.2", "facecolor": BAD, "edgecolor": "white"},
        arrowprops={"arrowstyle": "-", "color": BAD, "lw": 0.9, "shrinkA": 0, "shrinkB": 1},
    )  # fmt: skip


def mark_text(mark: Mark) -> str:
    """Return what an operation states, for a reader without the picture."""
    until = f" to {mark.high}" if mark.high > mark.low else ""
    return f"operation {mark.op.op_id}: {mark.statement} {mark.low}{until}"
