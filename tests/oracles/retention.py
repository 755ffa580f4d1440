"""What may be removed, offset by offset: each needs a floor of its own that covers it."""

from __future__ import annotations

from fractions import Fraction

from dledger.jepsen_like.checkers.retention import NAME, NOT_ENTITLED, REMOVED, REPORTED_MAX, Keeps
from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.history.operation import F, FloorMove, History, Outcome

__all__ = ["check_history"]


def check_history(history: History, keeps: Keeps) -> Verdict:
    """Return the verdict over what was removed, by one rule per offset and per segment."""
    floors = [move for move in history.floors if move.topic == "" and move.index != 0]
    floors.sort(key=lambda move: (move.index, move.node))
    refused = [(move, _refused(move, keeps)) for move in floors]
    found = [
        Violation(
            NOT_ENTITLED,
            f"entry {move.index}",
            f"{move.node}: entry {move.index} removes all before byte {move.position} {why}",
            at_ns=move.at_ns,
        )
        for move, why in refused
        if why
    ][:REPORTED_MAX]
    indexes = {move.index for move in floors}
    entitled = [move for move in history.floors if move.index in indexes]
    lost: list[tuple[tuple[str, int, str, int], Violation]] = []
    for read in history.replica_reads:
        covering = [
            move.min_off
            for move in entitled
            if (move.topic, move.queue) == (read.topic, read.queue)
        ]
        gone = [off for off in range(read.min_off) if not any(off < least for least in covering)]
        if gone:
            text = f"{read.node} has it from offset {read.min_off} on; retention let it begin at "
            subject = f"{read.topic}/{read.queue}"
            violation = Violation(REMOVED, subject, text + str(gone[0]), at_ns=read.at_ns)
            lost.append(((read.topic, read.queue, read.node, read.min_off), violation))
    lost.sort(key=lambda one: one[0])
    if history.replica_reads:
        lost += _answered(history, entitled)
    counts = {"floors": len(floors), "unexplained": len(lost)}
    found += [violation for _, violation in lost][:REPORTED_MAX]
    looked_at = len(history.replica_reads) + len(history.floors)
    return judge(NAME, found, counts, looked_at=looked_at)


def _answered(
    history: History, entitled: list[FloorMove]
) -> list[tuple[tuple[str, int, str, int], Violation]]:
    """Return of each queue the read that names the greatest first offset, if no floor has it."""
    reads = [
        op
        for op in history.operations
        if op.f in (F.PULL, F.MAX_OFFSET, F.MIN_OFFSET)
        and op.outcome == Outcome.OK
        and op.min_off > 0
    ]
    found: list[tuple[tuple[str, int, str, int], Violation]] = []
    for topic, queue in sorted({(op.topic, op.queue) for op in reads}):
        its = [op for op in reads if (op.topic, op.queue) == (topic, queue)]
        one = min(its, key=lambda op: (-op.min_off, op.level, op.ret_ns, op.call_ns, op.op_id))
        floors = [m.min_off for m in entitled if (m.topic, m.queue) == (topic, queue)]
        begin = max(floors, default=0)
        if one.min_off > begin:
            text = (
                f"an answer has it from offset {one.min_off} on; retention let it begin at {begin}"
            )
            violation = Violation(
                REMOVED, f"{topic}/{queue}", text, (one.op_id,), at_ns=one.call_ns
            )
            found.append(((topic, queue, "", one.min_off), violation))
    return found


def _may_be_old(at_ns: int, keeps: Keeps) -> bool:
    error_ns = keeps.date_error_ns
    return error_ns is None or Fraction(at_ns + error_ns, 10**6) >= keeps.keep_ms


def _refused(move: FloorMove, keeps: Keeps) -> str:
    """Return why, by taking the log apart into its segments."""
    if move.cause in ("age", "request"):
        age_ms = move.stored_ms - move.newest_ms
        if not _may_be_old(move.at_ns, keeps):
            return f"for its {move.cause}; nothing is older than {move.at_ns / 1e9:.0f} s"
        return (
            f"for its {move.cause}: {age_ms} ms; kept are {keeps.keep_ms} ms"
            if age_ms < keeps.keep_ms
            else ""
        )
    if move.cause != "size":
        return f"for a cause that no setting has: {move.cause!r}"
    if keeps.keep_bytes <= 0:
        return "for its size, which has no limit"
    last = 0  # where the last segment ends that may go
    while move.end_position - (last + keeps.segment_bytes) >= keeps.keep_bytes:
        last += keeps.segment_bytes
    left = move.end_position - move.position
    return (
        ""
        if move.position <= last
        else f"for its size: {left} bytes are left; kept are {keeps.keep_bytes} in whole segments"
    )
