"""Retention: what may be removed is a model, from the settings of a plan and not from the product.

A move of the floor is *entitled* where it takes whole segments, and either all messages in them are
older than messages are kept (age, request), or what is left is no less than the bytes that are kept
(size). Both are measured on the log: the store times of the newest message removed and of the entry
that moves the floor, and where that entry stands. The leader decided before it wrote the entry, at
an earlier date and end of the log, so the entry can only prove more than the leader measured.

A queue of a replica may begin later only where a floor lets it: the first offset of the queue that
stands behind the floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import FloorMove, ReplicaRead

NAME: Final = "retention"

REMOVED: Final = "message removed without retention"
NOT_ENTITLED: Final = "retention without entitlement"
REPORTED_MAX: Final = 8

_BY_AGE: Final = frozenset({"age", "request"})
_BY_SIZE: Final = frozenset({"size"})


class Keeps(msgspec.Struct, frozen=True):
    """What brokers keep, by the settings of a plan.

    Attributes:
        keep_bytes: A log longer than this gives up its oldest segments; 0: none goes for its size.
        keep_ms: Older messages may go.
        segment_bytes: Size of a segment; less is not removed.
        date_error_ns: How far brokers' dates may be wrong; None: years.
    """

    keep_bytes: int = 0
    keep_ms: int = 72 * 3_600_000
    segment_bytes: int = 1 << 30
    date_error_ns: int | None = 0

    def is_old_enough(self, at_ns: int) -> bool:
        """Whether a message of a run, which began at 0, may be too old to be kept at *at_ns*."""
        return self.date_error_ns is None or at_ns + self.date_error_ns >= self.keep_ms * 1_000_000


def mistake_in(move: FloorMove, keeps: Keeps) -> str:
    """Return why a move of the floor is not entitled; empty: it is."""
    if move.cause in _BY_AGE:
        if not keeps.is_old_enough(move.at_ns):
            return f"for its {move.cause}; nothing is older than {move.at_ns / 1e9:.0f} s"
        age_ms = move.stored_ms - move.newest_ms
        if age_ms < keeps.keep_ms:
            return f"for its {move.cause}: {age_ms} ms; kept are {keeps.keep_ms} ms"
        return ""
    if move.cause not in _BY_SIZE:
        return f"for a cause that no setting has: {move.cause!r}"
    if keeps.keep_bytes <= 0:
        return "for its size, which has no limit"
    left = move.end_position - move.position
    end = move.end_position - keeps.keep_bytes
    if move.position > end - end % keeps.segment_bytes:
        return f"for its size: {left} bytes are left; kept are {keeps.keep_bytes} in whole segments"
    return ""


def check_floors(moves: Iterable[FloorMove], heads: Sequence[ReplicaRead], keeps: Keeps) -> Verdict:
    """Return the verdict over what was removed.

    A history without a row of floors, as earlier versions wrote it, is unknown where something was
    removed that may have been removed by right.

    Args:
        heads: Where each queue of each replica began when the run was over.
    """
    rows = sorted(moves, key=lambda move: (move.index, move.topic, move.queue, move.node))
    may_begin: dict[tuple[str, int], int] = {}
    found: list[Violation] = []
    for move in rows:
        queue = (move.topic, move.queue)
        may_begin[queue] = max(may_begin.get(queue, 0), move.min_off)
        if move.index and not move.topic and (mistake := mistake_in(move, keeps)):
            text = f"{move.node}: entry {move.index} removes all before byte {move.position} "
            subject = f"entry {move.index}"
            found.append(Violation(NOT_ENTITLED, subject, text + mistake, at_ns=move.at_ns))
    late = [head for head in heads if head.min_off > may_begin.get((head.topic, head.queue), 0)]
    is_unknown = not rows and any(
        keeps.keep_bytes or keeps.is_old_enough(head.at_ns) for head in late
    )
    counts = {
        "floors": sum(not move.topic and move.index > 0 for move in rows),
        "unexplained": len(late),
    }
    if is_unknown:
        reason = "queues begin later, and the history has no row that names the cause"
        return Verdict(NAME, "unknown", (), counts, reason)
    late.sort(key=lambda head: (head.topic, head.queue, head.node, head.min_off))
    lost = [
        Violation(
            REMOVED,
            f"{head.topic}/{head.queue}",
            f"{head.node} has it from offset {head.min_off} on; retention let it begin at "
            f"{may_begin.get((head.topic, head.queue), 0)}",
            at_ns=head.at_ns,
        )
        for head in late
    ]
    violations = [*found[:REPORTED_MAX], *lost[:REPORTED_MAX]]
    return judge(NAME, violations, counts, looked_at=len(heads) + len(rows))
