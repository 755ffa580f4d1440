"""Foreign histories against a search that tries every order of their operations.

A share runs each time; DLEDGER_ORDERS=100000 runs all that were compared when this was written.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest

from dledger.jepsen_like.foreign import list_append, log, register, sets
from dledger.jepsen_like.foreign.recorded import Attempt
from dledger.jepsen_like.history.operation import NEVER
from tests.oracles.orders import Step, has_order

pytestmark = pytest.mark.slow

SHARE = int(os.environ.get("DLEDGER_ORDERS", "0"))


def intervals(rng: random.Random, count: int, processes: int) -> list[tuple[int, int, int]]:
    """Return process, call and return of *count* operations, in the order of the calls."""
    free = [0] * processes
    found = []
    clock = 0
    for _ in range(count):
        clock += rng.randrange(1, 4)
        process = min(range(processes), key=lambda p: (free[p], rng.random()))
        call = max(clock, free[process] + 1)
        ret = call + rng.randrange(1, 9)
        free[process] = ret
        found.append((process, call, ret))
    stamps = sorted({(t, at, end) for at, one in enumerate(found) for end, t in enumerate(one[1:])})
    place = {(at, end): rank for rank, (_, at, end) in enumerate(stamps, 1)}
    made = [(process, place[at, 0], place[at, 1]) for at, (process, _, _) in enumerate(found)]
    return sorted(made, key=lambda one: one[1])


def kinds(rng: random.Random) -> str:
    return rng.choices(("ok", "info", "fail"), (8, 1, 1))[0]


def attempt(at: int, spell: tuple[int, int, int], f: str, kind: str, asked: Any, value: Any) -> Any:
    process, call, ret = spell
    return Attempt(at, process, f, kind, call, NEVER if kind == "info" else ret, asked, value)  # type: ignore[arg-type]


def step(one: Attempt, apply: Any) -> Step:
    is_info = one.kind == "info"
    return Step(one.call, math.inf if is_info else one.ret, not is_info, apply)


def moments(rng: random.Random, spells: list[tuple[int, int, int]]) -> list[int]:
    """Return an order in which operations may have taken effect."""
    at = {n: rng.uniform(call, ret) for n, (_, call, ret) in enumerate(spells)}
    return sorted(at, key=at.__getitem__)


# -- registers ---------------------------------------------------------------------------------


def a_register(rng: random.Random) -> list[Attempt]:
    spells = intervals(rng, rng.randrange(2, 8), rng.randrange(1, 5))
    value: Any = None
    made: list[Attempt] = []
    for at in moments(rng, spells):
        f = rng.choice(("read", "read", "write", "cas"))
        kind = kinds(rng)
        asked: Any = None
        if f == "write":
            asked = rng.randrange(3)
        elif f == "cas":
            asked = (value if rng.random() < 0.8 else rng.randrange(3), rng.randrange(3))
            kind = kind if kind != "ok" or asked[0] == value else "fail"
        done = kind == "ok" or (kind == "info" and rng.random() < 0.5)
        seen = value if rng.random() < 0.9 else rng.randrange(3)
        reported = seen if f == "read" and kind == "ok" else asked
        if done and f == "write":
            value = asked
        elif done and f == "cas" and asked[0] == value:
            value = asked[1]
        made.append(attempt(at, spells[at], f, kind, asked, reported))
    return sorted(made, key=lambda one: one.call)


def register_has_order(history: list[Attempt]) -> bool:
    def model(one: Attempt) -> Any:
        if one.f == "read":
            return lambda state: state if state == (one.value,) else None
        if one.f == "write":
            return lambda state: (one.value,)
        return lambda state: (one.value[1],) if state == (one.value[0],) else None

    steps = [step(one, model(one)) for one in history if one.kind != "fail"]
    return has_order(steps, (None,))


def test_registers_agree_with_every_order() -> None:
    compare(register.check, register_has_order, a_register, SHARE or 10_000, seed=1)


# -- sets --------------------------------------------------------------------------------------


def a_set(rng: random.Random) -> list[Attempt]:
    spells = intervals(rng, rng.randrange(2, 8), rng.randrange(1, 5))
    there: set[int] = set()
    made: list[Attempt] = []
    for element, at in enumerate(moments(rng, spells)):
        kind = kinds(rng)
        if rng.random() < 0.5:
            if kind == "ok" or (kind == "info" and rng.random() < 0.5):
                there.add(element)
            made.append(attempt(at, spells[at], "add", kind, element, element))
            continue
        seen = set(there)
        if rng.random() < 0.2:
            seen ^= {rng.randrange(element + 1)}
        made.append(attempt(at, spells[at], "read", kind, None, tuple(seen)))
    return sorted(made, key=lambda one: one.call)


def set_has_order(history: list[Attempt]) -> bool:
    def model(one: Attempt) -> Any:
        if one.f == "add":
            return lambda state: state | {one.asked}
        return lambda state: state if state == set(one.value) else None

    steps = [step(one, model(one)) for one in history if one.kind != "fail"]
    return has_order(steps, frozenset())


def test_sets_agree_with_every_order() -> None:
    compare(
        lambda history: sets.check(history, is_linearizable=True),
        set_has_order, a_set, SHARE or 10_000, seed=2,
    )  # fmt: skip


# -- transactions ------------------------------------------------------------------------------


def some_transactions(rng: random.Random) -> list[Attempt]:
    spells = intervals(rng, rng.randrange(2, 6), rng.randrange(1, 4))
    lists: dict[str, tuple[int, ...]] = {}
    made: list[Attempt] = []
    fresh = iter(range(100))
    old = [dict(lists)]
    for at in moments(rng, spells):
        kind = kinds(rng)
        base = dict(lists if rng.random() < 0.75 else rng.choice(old))
        asked: list[Any] = []
        reported: list[Any] = []
        for _ in range(rng.randrange(1, 4)):
            key = rng.choice("xy")
            if rng.random() < 0.5:
                value = next(fresh)
                base[key] = (*base.get(key, ()), value)
                asked.append(("append", key, value))
                reported.append(("append", key, value))
            else:
                seen = base.get(key, ())
                if rng.random() < 0.04 and seen:
                    seen = rng.choice((seen[:-1], seen[::-1], (*seen, seen[0])))
                asked.append(("r", key, None))
                reported.append(("r", key, seen or None))
        if kind == "ok" or rng.random() < 0.4:
            for _, key, value in (mop for mop in reported if mop[0] == "append"):
                lists[key] = (*lists.get(key, ()), value)
            old.append(dict(lists))
        answer = tuple(reported if kind == "ok" else asked)
        made.append(attempt(at, spells[at], "txn", kind, tuple(asked), answer))
    return sorted(made, key=lambda one: one.call)


def transactions_have_order(history: list[Attempt]) -> bool:
    def model(one: Attempt) -> Any:
        def apply(state: Any) -> Any:
            lists = dict(state)
            for name, key, value in one.value:
                if name == "append":
                    lists[key] = (*lists.get(key, ()), value)
                elif one.kind == "ok" and lists.get(key, ()) != (value or ()):
                    return None
            return frozenset(lists.items())

        return apply

    steps = [step(one, model(one)) for one in history if one.kind != "fail"]
    return has_order(steps, frozenset())


def test_transactions_agree_with_every_order() -> None:
    compare(list_append.check, transactions_have_order, some_transactions, SHARE or 10_000, seed=3)


# -- logs --------------------------------------------------------------------------------------


def a_log(rng: random.Random) -> list[Attempt]:
    spells = intervals(rng, rng.randrange(2, 8), rng.randrange(1, 4))
    stored: dict[int, int] = {}
    end = 0
    at_of: dict[int, int] = {}
    made: list[Attempt] = []
    for value, at in enumerate(moments(rng, spells)):
        kind = kinds(rng)
        process = spells[at][0]
        if rng.random() < 0.5 or not stored:
            end += rng.random() < 0.2  # the mark of a transaction
            off = end
            if kind == "ok" or (kind == "info" and rng.random() < 0.5):
                stored[off] = value
                end += 1
            if rng.random() < 0.06:
                off = max(0, off + rng.choice((-1, 1)))
            reported = (("send", "k", (off, value) if kind == "ok" else value),)
            made.append(attempt(at, spells[at], "send", kind, (("send", "k", value),), reported))
            continue
        begin = at_of.get(process, rng.randrange(end + 1))
        if rng.random() < 0.08:
            begin = rng.randrange(end + 1)
        until = rng.randrange(begin, end + 1)
        seen = [(off, stored[off]) for off in range(begin, until) if off in stored]
        if seen and rng.random() < 0.05:
            seen[-1] = (seen[-1][0], rng.randrange(value + 1))
        kind = "ok"
        at_of[process] = seen[-1][0] + 1 if seen else begin
        told_polls = (("poll", {"k": tuple(seen)}),)
        made.append(attempt(at, spells[at], "poll", kind, (("poll",),), told_polls))
    return sorted(made, key=lambda one: one.call)


def log_has_order(history: list[Attempt]) -> bool:
    polls = {one.index: one.value[0][1]["k"] for one in history if one.f == "poll"}
    sends = {one.asked[0][2]: one for one in history if one.f == "send"}
    acked = {one.value[0][2] for one in history if one.f == "send" and one.kind == "ok"}
    seen = {pair for found in polls.values() for pair in found}
    places = seen | acked
    if len({off for off, _ in places}) < len(places) or len({v for _, v in places}) < len(places):
        return False
    if any(value not in sends or sends[value].kind == "fail" for _, value in seen):
        return False
    last = max((off for off, _ in seen), default=-1)
    if {pair for pair in acked if pair[0] <= last} - seen:
        return False  # a poll found what is behind it, and none found it
    off_of = {value: off for off, value in places}

    def send(one: Attempt) -> Any:
        off = off_of.get(one.asked[0][2])

        def apply(state: Any) -> Any:
            length, positions = state
            if off is None:
                return state
            after = length
            while after < off and all(place != after for place, _ in places):
                after += 1
            return (off + 1, positions) if after == off else None

        return apply

    def poll(one: Attempt) -> Any:
        def apply(state: Any) -> Any:
            length, positions = state
            where = dict(positions)
            for off, _ in polls[one.index]:
                before = where.get(one.process)
                if off >= length:
                    return None
                if before is not None and (
                    off <= before or any(before < place < off for place, _ in places)
                ):
                    return None
                where[one.process] = off
            return length, frozenset(where.items())

        return apply

    steps = [
        step(one, (poll if one.f == "poll" else send)(one)) for one in history if one.kind != "fail"
    ]
    return has_order(steps, (0, frozenset()))


def test_logs_agree_with_every_order() -> None:
    compare(log.check, log_has_order, a_log, SHARE or 2_000, seed=4)


def compare(check: Any, oracle: Any, make: Any, count: int, *, seed: int) -> None:
    rng = random.Random(seed)
    valid = 0
    for _ in range(count):
        history = make(rng)
        verdict = check(history)
        expected = oracle(history)
        valid += expected
        assert (not verdict.violations) == expected, (history, verdict)
    assert 0.1 * count < valid < 0.95 * count, valid
