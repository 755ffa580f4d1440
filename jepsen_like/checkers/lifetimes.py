"""Times to live: what has expired is not handed out, and nothing else is passed over.

A `PERISHABLE` row sends *value* with a time to live of *cnt* ms, 0: none. A `LIVING` row asks for
one message: a pull passes the offsets from *off* to *max_off* and finds *value* among them; a
receive by POP names its *group*, and has no *value* where the message comes again.

The time begins when the message is stored: between its send's call and its answer, or the first
sight of it. What lies between proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "lifetimes"

EXPIRED: Final = "expired message delivered"
PASSED: Final = "living message passed over"
LOST: Final = "acknowledged perishable message lost"

OPERATIONS: Final = frozenset({F.PERISHABLE, F.LIVING})
MS: Final = 1_000_000


def check_history(
    operations: Iterable[Operation], *, clock_error_ns: int = 0, drained: bool = True
) -> Verdict:
    """Return the verdict over all messages with a time to live, and those sent beside them."""
    rows = sorted((op for op in operations if op.f in OPERATIONS), key=lambda op: op.op_id)
    sends = {op.value: op for op in rows if op.f == F.PERISHABLE}
    reads = [op for op in rows if op.f == F.LIVING and op.outcome == Outcome.OK]
    found = [op for op in reads if op.value in sends]
    acked = [op for op in sends.values() if op.outcome == Outcome.OK]
    stored_ns = {op.value: op.ret_ns for op in acked}
    for op in found:
        stored_ns[op.value] = min(stored_ns.get(op.value, op.ret_ns), op.ret_ns)
    places = {(op.topic, op.queue, op.off): op for op in acked if op.off != NOTHING}
    violations: list[Violation] = []
    for op in found:
        send = sends[op.value]
        late_ns = op.call_ns - stored_ns[op.value] - send.cnt * MS - clock_error_ns
        if send.cnt and late_ns > 0:
            text = f"value {op.value} came {late_ns / 1e6:.1f} ms after its {send.cnt} ms"
            violations.append(violation_of(EXPIRED, op.place, text, send, op))
    for op in reads:
        for send in _passed(op, places):
            ends_ns = send.call_ns + send.cnt * MS - clock_error_ns
            if not send.cnt or op.ret_ns < ends_ns:
                text = f"value {send.value} at {send.off} is not what was found"
                violations.append(violation_of(PASSED, op.place, text, send, op))
    if drained:
        seen = {op.value for op in found}
        for send in acked:
            if not send.cnt and send.value not in seen:
                text = f"value {send.value}, which does not expire, is not there"
                violations.append(violation_of(LOST, send.place, text, send))
    violations.sort(key=lambda violation: (violation.at_ns, violation.operations, violation.name))
    counts = {"sends": len(sends), "reads": len(reads), "found": len(found)}
    return judge(NAME, violations, counts, looked_at=len(reads))


def _passed(read: Operation, places: dict[tuple[str, int, int], Operation]) -> Iterator[Operation]:
    """Yield the sends whose messages a pull went past."""
    for off in range(read.off, read.max_off):
        send = places.get((read.topic, read.queue, off))
        if send is not None and send.value != read.value:
            yield send
