"""Linearizability decided by trying every order of a small history: the oracle of fast checkers."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from dledger.jepsen_like.history.operation import Operation, Outcome

State = TypeVar("State")


def is_linearizable(
    operations: Sequence[Operation], start: State, step: Callable[[State, Operation], State | None]
) -> bool:
    """Decide by trying every order, remembering the states already met.

    Args:
        operations: Those that failed had no effect; those with an unknown outcome may have none.
        start: What there is before the first operation; hashable.
        step: Returns what there is after an operation; None if it cannot have its answer then.
    """
    must = [op for op in operations if op.outcome not in (Outcome.FAIL, Outcome.INFO)]
    every = must + [op for op in operations if op.outcome == Outcome.INFO]
    need = (1 << len(must)) - 1
    bits = list(enumerate(every))
    met: set[tuple[int, State]] = set()
    stack = [(0, start)]
    while stack:
        state = stack.pop()
        done, value = state
        if done & need == need:
            return True
        if state in met:
            continue
        met.add(state)
        horizon = min(op.ret_ns for at, op in bits if not done >> at & 1 and at < len(must))
        for at, op in bits:
            if done >> at & 1 or op.call_ns > horizon:
                continue
            after = step(value, op)
            if after is not None:
                stack.append((done | 1 << at, after))
    return False
