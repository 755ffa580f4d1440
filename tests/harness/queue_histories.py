"""Small random histories of one queue, and the exhaustive search that is their oracle."""

import random

from dledger.jepsen_like.history.columns import hash_range
from dledger.jepsen_like.history.operation import NEVER, F, Operation, Outcome
from tests.harness import every_order

TOPIC = "t"


def random_history(
    rng: random.Random, size_max: int, *, all_offsets: bool = False
) -> list[Operation]:
    """Return a history that really happened to a list, or nearly: a few fields may be off.

    Args:
        all_offsets: Every acknowledgement names an offset.
    """
    operations: list[Operation] = []
    log: list[int] = []
    low = 0
    span = rng.choice((4, 8, 14))
    size = rng.randint(2, size_max)
    instants = sorted(rng.randint(0, span) for _ in range(size))
    lag = rng.choice((0, 1, 3, 6))
    for op_id, at in enumerate(instants):
        call, ret = at - rng.randint(0, lag), at + rng.randint(0, lag)
        kind = rng.random()
        if kind < 0.5:
            outcome = rng.choices((Outcome.OK, Outcome.INFO, Outcome.FAIL), (6, 3, 1))[0]
            op = _operation(op_id, F.SEND, outcome, call, ret)
            op.value = op_id + 100
            if outcome is Outcome.OK or (outcome is Outcome.INFO and rng.random() < 0.5):
                may_lack = not all_offsets and rng.random() < 0.15
                has_offset = outcome is Outcome.OK and not may_lack
                op.off = len(log) if has_offset else -1
                log.append(op.value)
        elif kind < 0.85:
            op = _operation(op_id, F.PULL, Outcome.OK, call, ret)
            op.off = rng.randint(0, len(log))
            op.values = tuple(log[op.off : op.off + rng.randint(0, 3)])
            op.cnt = len(op.values)
            # Where there are messages, an answer without one of them names no end.
            is_whole = bool(op.values) or op.off == len(log)
            op.max_off = len(log) if is_whole and rng.random() < 0.8 else -1
        elif kind < 0.95:
            op = _operation(op_id, F.MAX_OFFSET, Outcome.OK, call, ret)
            op.max_off = len(log)
        else:
            op = _operation(op_id, F.MIN_OFFSET, Outcome.OK, call, ret)
            op.min_off = low = rng.randint(low, len(log))
        operations.append(op)
    for _ in range(rng.choice((0, 1, 2, 3))):
        _spoil(rng, rng.choice(operations), span)
    return operations


def _operation(op_id: int, f: F, outcome: Outcome, call: int, ret: int) -> Operation:
    ends = NEVER if outcome is Outcome.INFO else ret
    return Operation(op_id, op_id, 0, -1, f, outcome, call, ends, TOPIC, 0)


def _spoil(rng: random.Random, op: Operation, span: int) -> None:
    kind = rng.random()
    if kind < 0.5:
        width = 0 if op.ret_ns == NEVER else op.ret_ns - op.call_ns
        op.call_ns = rng.randint(0, span)
        if op.ret_ns != NEVER:
            op.ret_ns = op.call_ns + width
    elif kind < 0.7 and op.f == F.MIN_OFFSET:
        op.min_off = max(0, op.min_off + rng.choice((-1, 1)))
    elif kind < 0.7 and op.f != F.SEND and op.max_off >= 0:
        op.max_off = max(0, op.max_off + rng.choice((-1, 1)))
    elif kind < 0.8 and op.values:
        op.values = (*op.values[:-1], 100 + rng.randint(0, 8))
    elif kind < 0.85 and op.f == F.PULL:
        op.off += rng.choice((0, 1))
    elif kind < 0.9 and op.f == F.PULL:
        op.values, op.cnt = (), 0
    elif op.f == F.SEND and op.outcome == Outcome.OK and op.off >= 0:
        op.off = max(0, op.off + rng.choice((-1, 1)))


def is_linearizable(operations: list[Operation]) -> bool:
    """Decide by trying every order, remembering the states already met.

    What is removed is removed from the beginning, at any time; a pull proves nothing of that.
    """
    nothing: tuple[tuple[int, ...], int] = ((), 0)
    return every_order.is_linearizable(operations, nothing, _step)


def _step(state: tuple[tuple[int, ...], int], op: Operation) -> tuple[tuple[int, ...], int] | None:
    log, low = state
    if op.f == F.SEND:
        return ((*log, op.value), low) if op.off in (-1, len(log)) else None
    if op.f == F.MIN_OFFSET:
        return (log, op.min_off) if low <= op.min_off <= len(log) else None
    if op.max_off >= 0 and op.max_off != len(log):
        return None
    if op.values and log[op.off : op.off + len(op.values)] != op.values:
        return None
    if not op.values and -1 < op.off < op.max_off:
        return None  # nothing was there, though its end is behind it
    return state


def folded(operations: list[Operation], rng: random.Random) -> list[Operation]:
    """Keep some pulls as a range and a hash."""
    for op in operations:
        if op.f == F.PULL and op.values and op.outcome == Outcome.OK and rng.random() < 0.7:
            op.range_hash, op.values = hash_range(op.off, op.values), ()
    return operations
