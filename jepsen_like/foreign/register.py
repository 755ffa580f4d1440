"""Is the history of a register linearizable? Exact: reads, writes, compare-and-set.

After each event the search keeps every state the register may be in, with the operations under way
that have taken effect in it; a completion keeps the states in which its operation has. None left:
no order of the operations explains what clients saw. Equal states are kept once, and equal
operations of unknown outcome take effect in the order of their calls.

Source: Lowe, Testing for linearizability (2017); Herlihy and Wing (1990) for locality: keys are
judged apart.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from dledger.jepsen_like.checkers.verdict import Verdict, Violation, judge
from dledger.jepsen_like.foreign.edn import frozen
from dledger.jepsen_like.foreign.recorded import Attempt, RecordError, edn_text, key_of
from dledger.jepsen_like.history.operation import NEVER

NAME: Final = "register"
NONLINEARIZABLE: Final = "nonlinearizable"

STATES_MAX: Final = 200_000
"""States of a register kept at once, about 200 MB; beyond them the verdict is unknown."""
SHOWN_MAX: Final = 8
"""Values named in a sentence."""


class Operation(NamedTuple):
    """One operation on one register; *old* and *new* are hashable."""

    attempt: Attempt
    f: str
    old: Any
    new: Any


State = tuple[Any, frozenset[int]]
"""The value, and the operations under way that have taken effect."""


class TooManyStatesError(Exception):
    """More states are possible than are kept."""


def check(attempts: list[Attempt]) -> Verdict:
    """Return the verdict over every register of a history.

    Raises:
        RecordError: A row is no operation of a register.
    """
    keyed = _is_keyed(attempts)
    registers: dict[str, list[Operation]] = {}
    for one in attempts:
        key, op = _operation(one, keyed=keyed)
        if one.kind != "fail" and not (one.kind == "info" and op.f == "read"):
            registers.setdefault(key, []).append(op)
    found: list[Violation] = []
    too_many: list[str] = []
    for key, ops in registers.items():
        try:
            violation = check_register(ops, key)
        except TooManyStatesError:
            too_many.append(key or "the register")
            continue
        if violation is not None:
            found.append(violation)
    counts = {"registers": len(registers), "operations": sum(map(len, registers.values()))}
    looked_at = sum(op.attempt.kind == "ok" for ops in registers.values() for op in ops)
    verdict = judge(NAME, found, counts, looked_at=looked_at)
    if verdict.is_valid and too_many:
        reason = (
            f"{too_many[0]} may be in more than {STATES_MAX:,} states at once: too many operations "
            "have an unknown outcome"
        )
        return Verdict(NAME, "unknown", (), counts, reason)
    return verdict


def _is_keyed(attempts: list[Attempt]) -> bool:
    """Return whether every value is a pair of a key and the value proper."""
    asked = [one.asked for one in attempts if one.f in ("read", "write")]
    pairs = [isinstance(value, tuple | list) and len(value) == 2 for value in asked]
    return bool(pairs) and all(pairs)


def _operation(one: Attempt, *, keyed: bool) -> tuple[str, Operation]:
    if one.f not in ("read", "write", "cas"):
        raise RecordError(f"row {one.index} asks for {one.f!r}, no operation of a register")
    key, value = "", one.value
    if keyed:
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise RecordError(f"row {one.index} has no key")
        key, value = key_of(value[0]), value[1]
    if one.f == "cas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise RecordError(f"row {one.index} has no pair of an old and a new value")
        old, new = map(frozen, value)
        return key, Operation(one, one.f, old, new)
    plain = frozen(value)
    return key, Operation(one, one.f, plain, plain)


def check_register(ops: list[Operation], key: str) -> Violation | None:
    """Return why the operations on one register have no order, or None.

    Raises:
        TooManyStatesError: It cannot be decided within `STATES_MAX`.
    """
    events: list[tuple[int, int]] = []
    for number, op in enumerate(ops):
        events.append((op.attempt.call, number))
        if op.attempt.ret != NEVER:
            events.append((op.attempt.ret, number))
    open_ops: dict[int, Operation] = {}
    states: set[State] = {(None, frozenset())}
    last: Operation | None = None
    for _, number in sorted(events):
        op = ops[number]
        if number not in open_ops:
            open_ops[number] = op
            continue
        before = states
        states = {
            (value, done - {number})
            for value, done in _closure(states, open_ops, number)
            if number in done
        }
        del open_ops[number]
        if not states:
            return _violation(key, op, last, before)
        last = op
    return None


def _closure(states: set[State], open_ops: dict[int, Operation], wanted: int) -> set[State]:
    """Return all states reached by letting operations under way take effect until *wanted* has."""
    reached = set(states)
    work = [state for state in states if wanted not in state[1]]
    groups: dict[Any, list[int]] = {}
    for number, op in sorted(open_ops.items()):
        is_unknown = op.attempt.ret == NEVER
        groups.setdefault((op.f, op.old, op.new) if is_unknown else number, []).append(number)
    while work:
        value, done = work.pop()
        for numbers in groups.values():
            first = next((number for number in numbers if number not in done), None)
            if first is None:
                continue
            op = open_ops[first]
            if op.f != "write" and op.old != value:
                continue
            state = (value if op.f == "read" else op.new, done | {first})
            if state not in reached:
                reached.add(state)
                if len(reached) > STATES_MAX:
                    raise TooManyStatesError
                if first != wanted:
                    work.append(state)
    return reached


def _violation(key: str, op: Operation, last: Operation | None, before: set[State]) -> Violation:
    did = {
        "read": f"reads {edn_text(op.old)}",
        "write": f"writes {edn_text(op.new)}",
        "cas": f"changes {edn_text(op.old)} to {edn_text(op.new)}",
    }[op.f]
    values = sorted({edn_text(value) for value, _ in before})
    shown = ", ".join(values[:SHOWN_MAX]) + (" …" if len(values) > SHOWN_MAX else "")
    rows = [] if last is None else [last.attempt.index]
    after = "at the beginning" if last is None else f"when row {last.attempt.index} had completed"
    return Violation(
        NONLINEARIZABLE,
        key,
        f"row {op.attempt.index} {did}, and no order of the operations explains it: {after} the "
        f"value was {shown}",
        (*rows, op.attempt.index),
        at_ns=op.attempt.ret,
    )
