"""Messages that consumers gave back: every one is there, as often as was said, and counted right.

A message that was given back when it had been tried *n* times is there once more with *n* + 1, in
the retry topic, or in the dead letter topic when that was asked for or it was tried too often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from jepsen_like.checkers.verdict import Verdict, Violation, judge
from jepsen_like.history.operation import NOTHING, F, Operation, Outcome

NAME: Final = "retries"

LOST: Final = "message given back is lost"
DOUBLED: Final = "message given back too often there"
NOWHERE: Final = "retry out of nothing"
REPORTED_MAX: Final = 8

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
MAX_TRIES: Final = 3
"""What consumers of a workload ask for: so many tries, then the dead letters."""

OPERATIONS: Final = frozenset({F.SEND_BACK, F.RETURNED})

_Copy = tuple[str, int, int, bool]
"""Consumer group, value, how often it was tried, and whether it is given up."""


def _asked_for(op: Operation) -> _Copy:
    return op.group, op.value, op.cnt + 1, op.status < 0 or op.cnt >= MAX_TRIES


def check_history(operations: Iterable[Operation], *, drained: bool = True) -> Verdict:
    """Return the verdict over what was given back.

    Args:
        drained: Everything due was delivered and both topics were read when the run was over.
    """
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
    counts = {
        "acknowledged": acked.total(),
        "unknown": perhaps.total(),
        "there": there.total(),
        "dead": sum(count for (*_, dead), count in there.items() if dead),
        "tries_max": max((tries for _, _, tries, _ in there), default=0),
    }
    return judge(NAME, found[:REPORTED_MAX], counts, looked_at=acked.total())


def _violation(name: str, copy: _Copy, text: str, witness: dict[_Copy, int]) -> Violation:
    group, value, tries, dead = copy
    where = f"{'dead letters' if dead else 'retry topic'} of {group}"
    return Violation(
        name, where, f"value {value}, tried {tries} times, is there {text}", (witness[copy],)
    )
