"""Messages that consumers gave back: every one is there, as often as given back, and counted right.

A message that was given back when it had been tried *n* times is there once more with *n* + 1, in
the retry topic, or in the dead letter topic when that was asked for or it was tried too often. Nor
does it come before its delay: a consumer that gives it back with *n* + 1 tries has read it, so it
calls no earlier than the time that the row of *n* tries has as due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge, violation_of
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "retries"

LOST: Final = "message given back is lost"
DOUBLED: Final = "message given back too often there"
NOWHERE: Final = "retry out of nothing"
EARLY: Final = "retry before its delay"

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
MAX_TRIES: Final = 3
"""What consumers of a workload ask for: this many tries, then the dead letters."""

OPERATIONS: Final = frozenset({F.SEND_BACK, F.RETURNED})

_Copy = tuple[str, int, int, bool]
"""Consumer group, value, how often it was tried, and whether it is given up."""


def _asked_for(op: Operation) -> _Copy:
    return op.group, op.value, op.cnt + 1, op.status < 0 or op.cnt >= MAX_TRIES


def check_history(
    operations: Sequence[Operation], *, drained: bool = True, clock_error_ns: int = 0
) -> Verdict:
    """Return the verdict over what was given back."""
    acked: Counter[_Copy] = Counter()
    perhaps: Counter[_Copy] = Counter()
    there: Counter[_Copy] = Counter()
    witness: dict[_Copy, int] = {}
    is_cut = False
    for op in operations:
        if op.f == F.SEND_BACK:
            copy = _asked_for(op)
            witness[copy] = op.op_id
            if op.outcome == Outcome.OK:
                acked[copy] += 1
            elif op.outcome == Outcome.INFO:
                perhaps[copy] += 1
        elif op.f == F.RETURNED:
            if op.value == NOTHING:
                is_cut |= op.min_off > 0  # retention took the beginning
                continue
            copy = (op.group, op.value, op.cnt, op.topic.startswith(DEAD_PREFIX))
            there[copy] += 1
            witness.setdefault(copy, op.op_id)
    found: list[Violation] = []
    if drained:
        for copy, count in there.items():
            most = acked[copy] + perhaps[copy]
            if count > most:
                name = DOUBLED if most else NOWHERE
                found.append(_violation(name, copy, f"{count} times, at most {most}", witness))
        if not is_cut:
            for copy, count in acked.items():
                if there[copy] < count:
                    text = f"{there[copy]} times, acknowledged {count}"
                    found.append(_violation(LOST, copy, text, witness))
    found += _early(operations, clock_error_ns)
    counts = {
        "acknowledged": acked.total(),
        "unknown": perhaps.total(),
        "there": there.total(),
        "dead": sum(count for (*_, dead), count in there.items() if dead),
        "tries_max": max((tries for _, _, tries, _ in there), default=0),
    }
    return judge(NAME, found, counts, looked_at=acked.total())


def _early(operations: Iterable[Operation], clock_error_ns: int) -> list[Violation]:
    """Return a violation for each of the first that were given back before they were due."""
    given_back = [op for op in operations if op.f == F.SEND_BACK]
    due: dict[tuple[str, int, int], Operation] = {}
    for op in given_back:
        if op.due_ns != NOTHING and op.outcome != Outcome.FAIL:
            known = due.setdefault((op.group, op.value, op.cnt + 1), op)
            if (op.due_ns, op.op_id) < (known.due_ns, known.op_id):
                due[op.group, op.value, op.cnt + 1] = op
    found = []
    for op in sorted(given_back, key=lambda op: op.op_id):
        before = due.get((op.group, op.value, op.cnt))
        if before is not None and op.call_ns + clock_error_ns < before.due_ns:
            early_ms = (before.due_ns - op.call_ns) // 1_000_000
            text = f"value {op.value}, tried {op.cnt} times, is read {early_ms} ms before it is due"
            found.append(violation_of(EARLY, f"retry topic of {op.group}", text, before, op))
    return found


def _violation(name: str, copy: _Copy, text: str, witness: dict[_Copy, int]) -> Violation:
    group, value, tries, dead = copy
    where = f"{'dead letters' if dead else 'retry topic'} of {group}"
    return Violation(
        name, where, f"value {value}, tried {tries} times, is there {text}", (witness[copy],)
    )
