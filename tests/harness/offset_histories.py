"""Small random histories of one committed offset, and the exhaustive search that judges them."""

from __future__ import annotations

import random

from dledger.jepsen_like.history.operation import NEVER, F, Operation, Outcome
from tests.harness import every_order


def random_history(
    rng: random.Random, size_max: int, *, offsets: int | None = None
) -> list[Operation]:
    """Return a history that really happened to a register, or nearly.

    Args:
        offsets: Commits take one of this many; None: each one of its own.
    """
    operations: list[Operation] = []
    now, span, lag = -1, rng.choice((4, 8, 14)), rng.choice((0, 1, 3, 6))
    size = rng.randint(2, size_max)
    instants = sorted(rng.randint(0, span) for _ in range(size))
    for op_id, at in enumerate(instants):
        call, ret = at - rng.randint(0, lag), at + rng.randint(0, lag)
        if rng.random() < 0.5:
            outcome = rng.choices((Outcome.OK, Outcome.INFO, Outcome.FAIL), (6, 3, 1))[0]
            off = op_id + 10 if offsets is None else 10 + rng.randrange(offsets)
            if outcome is Outcome.OK or (outcome is Outcome.INFO and rng.random() < 0.5):
                now = off
            # A return of an unknown commit proves nothing: some histories name one.
            ret = NEVER if outcome is Outcome.INFO and op_id % 2 else ret
            f = F.COMMIT
        else:
            f, outcome, off = F.FETCH_COMMIT, Outcome.OK, now
        operations.append(
            Operation(op_id, op_id, 0, -1, f, outcome, call, ret, "t", 0, off, group="g")
        )
    for _ in range(rng.choice((0, 1, 2, 3))):
        op = rng.choice(operations)
        if rng.random() < 0.6:
            width = 0 if op.ret_ns == NEVER else op.ret_ns - op.call_ns
            op.call_ns = rng.randint(0, span)
            op.ret_ns = NEVER if op.ret_ns == NEVER else op.call_ns + width
        elif op.f == F.FETCH_COMMIT:
            op.off = rng.choice((-1, *(other.off for other in operations)))
    return operations


def is_linearizable(operations: list[Operation]) -> bool:
    """Decide by trying every order."""
    return every_order.is_linearizable(operations, -1, _step)


def _step(value: int, op: Operation) -> int | None:
    if op.f == F.COMMIT:
        return op.off
    return value if op.off == value else None
