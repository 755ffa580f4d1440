"""What happened around a violation, as a message-sequence diagram: text, and SVG to keep.

One lifeline for the clients and one for every node. Operations are spans on the clients' line,
faults, roles and log lines stand on their node's; what proves the violation is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import NEVER, NOTHING, F, Operation, Outcome
from dledger.jepsen_like.simulation.play import Played

WINDOW_S: Final = 10.0
"""This much before the first and after the last witness is shown."""

ROWS_MAX: Final = 120
"""A diagram longer than this helps no reader; the rows nearest to the violation are kept."""

LANE_CHARS: Final = 34
CLIENTS: Final = "clients"

CHAR_PX: Final = 8
ROW_PX: Final = 18


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the diagram; *is_witness*: it proves the violation."""

    at_s: float
    lane: str
    text: str
    is_witness: bool = False


def rows_around(played: Played, violation: Violation) -> list[Row]:
    """Return what happened around *violation*, in the order of time."""
    witnesses = set(violation.operations)
    operations = played.history.operations
    times = [violation.at_ns / 1e9] if violation.at_ns else []
    for op in operations:
        if op.op_id in witnesses:
            times.append(op.call_ns / 1e9)
            if op.ret_ns != NEVER:
                times.append(op.ret_ns / 1e9)
    if not times:
        times = [played.simulated_s]
    begin_s, end_s = min(times) - WINDOW_S, max(times) + WINDOW_S
    rows: list[Row] = []
    for op in operations:
        rows += _operation_rows(op, op.op_id in witnesses)
    for event in played.history.events:
        where = event.node.split(",")[0] or CLIENTS
        what = f"# {event.kind} {event.target} {event.detail}".rstrip()
        rows.append(Row(event.at_ns / 1e9, where, what))
        if event.end_ns > event.at_ns:
            rows.append(Row(event.end_ns / 1e9, where, f"# end of {event.kind}"))
    if played.world is not None:
        for at_s, node, name, facts in played.world.logs:
            shown = " ".join(f"{key}={value}" for key, value in facts.items())
            rows.append(Row(at_s, node, f"{name} {shown}"))
    inside = sorted(
        (row for row in rows if row.is_witness or begin_s <= row.at_s <= end_s),
        key=lambda row: row.at_s,
    )
    if len(inside) > ROWS_MAX:
        middle = max(times)
        nearest = sorted(inside, key=lambda row: (not row.is_witness, abs(row.at_s - middle)))
        inside = sorted(nearest[:ROWS_MAX], key=lambda row: row.at_s)
    return inside


def _operation_rows(op: Operation, is_witness: bool) -> Iterable[Row]:
    name = F(op.f).name.lower()
    asked = f"{name} {op.topic}/{op.queue}"
    if op.f == F.SEND:
        asked += f" value {op.value}"
    elif op.f in (F.PULL, F.COMMIT):
        asked += f" at {op.off}"
    yield Row(op.call_ns / 1e9, CLIENTS, f"{op.op_id}> p{op.process} {asked}", is_witness)
    if op.ret_ns == NEVER:
        return
    answer = Outcome(op.outcome).name.lower()
    if op.outcome != Outcome.OK:
        answer += f" {op.err}"
    elif op.f == F.PULL:
        answer += f" {op.cnt} found"
        answer += "" if op.max_off == NOTHING else f", end {op.max_off}"
    elif op.f == F.MAX_OFFSET:
        answer += f" end {op.max_off}"
    elif op.off != NOTHING:
        answer += f" offset {op.off}"
    yield Row(op.ret_ns / 1e9, CLIENTS, f"<{op.op_id} {answer}", is_witness)


def lanes_of(played: Played, rows: Sequence[Row]) -> list[str]:
    """Return the lifelines: clients, brokers, and all others with events."""
    names = [CLIENTS]
    if played.world is not None:
        names += list(played.world.brokers)
    names += sorted({row.lane for row in rows} - set(names))
    return [name for name in names if name == CLIENTS or any(row.lane == name for row in rows)]


def as_text(played: Played, violation: Violation) -> str:
    """Return the diagram for a terminal."""
    rows = rows_around(played, violation)
    lanes = lanes_of(played, rows)
    lines = [f"{violation.name} ({violation.checker}) {violation.subject}: {violation.detail}"]
    lines.append(" " * 13 + "".join(name.ljust(LANE_CHARS) for name in lanes).rstrip())
    for row in rows:
        cells = ["|".ljust(LANE_CHARS) for _ in lanes]
        at = lanes.index(row.lane)
        cells[at] = row.text[: LANE_CHARS * (len(lanes) - at) - 1].ljust(LANE_CHARS)
        if len(row.text) >= LANE_CHARS:
            cells = [*cells[:at], cells[at]]
        mark = "*" if row.is_witness else " "
        lines.append(f"{row.at_s:11.6f}{mark} " + "".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def as_svg(text: str) -> str:
    """Return a diagram of `as_text` as an SVG document, with its witnesses in red."""
    lines = text.splitlines()
    width = 20 + CHAR_PX * max(map(len, lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{ROW_PX * len(lines)}" '
        'font-family="monospace" font-size="12" xml:space="preserve">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, line in enumerate(lines, 1):
        colour = "#b00" if line[11:12] == "*" else "#222"
        parts.append(f'<text x="8" y="{ROW_PX * number - 5}" fill="{colour}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])
