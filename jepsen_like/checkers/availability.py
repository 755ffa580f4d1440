"""Clients are answered while nothing is wrong: an outcome that is unknown hides what was lost.

Looked at are operations that were called while the record of faults has none at work or recovered
from, and so long before the next that their time was over. Of these 99 % are decided, ok or fail;
none got an answer that was damaged; and sends that follow each other are not all without an
acknowledgement for long. With the bound after each kind of fault that is the longest time without
acknowledgements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger.jepsen_like.checkers.fault_record import FaultRecord, Span
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.columns import has_word
from dledger.jepsen_like.history.operation import NEVER, F, Outcome

NAME: Final = "availability"

UNDECIDED: Final = "too few operations decided"
DAMAGED: Final = "damaged answer"
SILENT: Final = "no acknowledgement for too long"

DAMAGED_ERROR = "DamagedAnswerError"
"""What an operation ends with whose answer has bytes that were not stored."""
REFUSED_ERRORS = frozenset(
    {
        "BrokerRefusedError",
        "ClientClosedError",
        "LocalProtocolError",
        "MessageIllegalError",
        "TransactionDecidedError",
    }
)
"""What a send ends with that is refused for what it is: no silence."""

DECIDED_PER_CENT: Final = 99
UNDECIDED_LEAST = 2
"""A single one, as a program may be stopped for a moment, proves nothing."""
DEADLINE_NS: Final = 20_000_000_000
"""The time of every operation is over then; a fault that comes earlier may have ended it."""
SILENT_MAX_NS: Final = 15_000_000_000
"""Between sends without an acknowledgement, above the bound after a fault."""
SENDS_LEAST = 3
"""Fewer sends are no silence."""
SENDS: Final = (int(F.SEND), int(F.HALF))

_I64 = npt.NDArray[np.int64]


def check_table(rows: Any, record: FaultRecord) -> Verdict | None:
    """Return the verdict over all operations; None: none was called in a quiet time."""
    if not rows.num_rows:
        return None
    call = rows.column("call_ns").to_numpy()
    ret = rows.column("ret_ns").to_numpy()
    last_ns = int(max(call.max(), ret[ret != NEVER].max(initial=0)))
    spans = windows(record.quiet(int(call.min()), last_ns + DEADLINE_NS + 1))
    judged = _within(call, spans)
    outcome = rows.column("outcome").to_numpy()
    err = rows.column("err")
    is_damaged = has_word(err, (DAMAGED_ERROR,))
    damaged = np.flatnonzero(is_damaged & judged)
    undecided = np.flatnonzero((outcome == Outcome.INFO) & judged)
    op_id = rows.column("op_id").to_numpy()
    found = _too_few(int(judged.sum()), call[undecided], op_id[undecided])
    for at in damaged[np.lexsort((op_id[damaged], call[damaged]))]:
        text = "an answer has bytes that were not stored, although nothing was wrong"
        witness = (int(op_id[at]),)
        found.append(Violation(DAMAGED, "cluster", text, witness, at_ns=int(call[at])))
    refused = has_word(err, REFUSED_ERRORS)
    sends = judged & np.isin(rows.column("f").to_numpy(), SENDS) & ~refused
    found += _silent(spans, call[sends], op_id[sends], outcome[sends] == Outcome.OK)
    counts = {
        "operations": int(judged.sum()),
        "undecided": len(undecided),
        "damaged": int(is_damaged.sum()),
        "quiet_s": sum(end - begin for begin, end in spans) // 1_000_000_000,
    }
    return judge(NAME, found, counts, looked_at=int(judged.sum())) if judged.any() else None


def windows(quiet: Iterable[Span]) -> list[Span]:
    """Return when operations are called that end before the next trouble."""
    ends = [(begin, end - DEADLINE_NS) for begin, end in quiet]
    return [(begin, end) for begin, end in ends if begin < end]


def _within(stamps: _I64, spans: list[Span]) -> npt.NDArray[np.bool_]:
    edges = np.array([edge for span in spans for edge in span], dtype=np.int64)
    inside: npt.NDArray[np.bool_] = np.searchsorted(edges, stamps, side="right") % 2 == 1
    return inside


def _too_few(judged: int, calls: _I64, op_ids: _I64) -> list[Violation]:
    count = len(calls)
    if count < UNDECIDED_LEAST or 100 * (judged - count) >= DECIDED_PER_CENT * judged:
        return []
    first = np.lexsort((op_ids, calls))[:UNDECIDED_LEAST]
    witnesses = tuple(int(op_ids[at]) for at in first)
    text = f"{count} of {judged} operations have an unknown outcome although nothing was wrong"
    return [Violation(UNDECIDED, "cluster", text, witnesses, at_ns=int(calls[first[0]]))]


def _silent(
    spans: list[Span], call: _I64, op_id: _I64, acked: npt.NDArray[np.bool_]
) -> list[Violation]:
    order = np.lexsort((op_id, call))
    call, op_id, acked = call[order], op_id[order], acked[order]
    span = np.searchsorted(np.array([begin for begin, _ in spans], dtype=np.int64), call, "right")
    # Sends belong together that have as many acknowledged ones before them, in one span.
    runs = np.stack((span, np.cumsum(acked)))[:, ~acked]
    call, op_id = call[~acked], op_id[~acked]
    if not len(call):
        return []
    edges = np.flatnonzero((np.diff(runs, axis=1) != 0).any(axis=0)) + 1
    begins, ends = np.append(0, edges), np.append(edges, len(call)) - 1
    counts = ends - begins + 1
    bad = (call[ends] - call[begins] > SILENT_MAX_NS) & (counts >= SENDS_LEAST)
    found: list[Violation] = []
    for at in np.flatnonzero(bad):
        first, last = begins[at], ends[at]
        silent_s = int(call[last] - call[first]) / 1e9
        text = f"{counts[at]} sends in {silent_s:.1f} s were not acknowledged, although nothing was"
        pair = (int(op_id[first]), int(op_id[last]))
        found.append(Violation(SILENT, "cluster", f"{text} wrong", pair, at_ns=int(call[last])))
    return found
