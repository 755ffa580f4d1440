from __future__ import annotations

from collections.abc import Sequence

from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.plans.plan import Plan
from tests.mutants.real_brokers import CLEAN_TRIES, Looked, look_for

VALID = [Verdict("total_queue", "valid"), Verdict("replicas", "valid")]


def invalid(name: str) -> list[Verdict]:
    return [
        Verdict("replicas", "valid"),
        Verdict("total_queue", "invalid", (Violation(name, "T/0", "…", checker="total_queue"),)),
    ]


def plan_of(seed: int) -> Plan:
    return Plan(seed=seed, duration_ms=1000, steps=())


def looked_for(
    outcomes: dict[tuple[int, int], list[Verdict]], numbers: Sequence[int]
) -> tuple[list[Looked], list[tuple[int, int]]]:
    played: list[tuple[int, int]] = []

    def play(plan: Plan, number: int) -> list[Verdict]:
        played.append((plan.seed, number))
        return outcomes.get((plan.seed, number), VALID)

    reported: list[Looked] = []
    assert look_for(numbers, (5, 6), plan_of, play, reported.append) == reported
    return reported, played


def test_hunt_runs_until_a_plan_shows_the_bug() -> None:
    reported, played = looked_for({(6, 31): invalid("lost"), (5, 32): invalid("doubled")}, (31, 32))
    assert reported == [
        Looked(31, 6, "total_queue: lost", 2, counts=True),
        Looked(32, 5, "total_queue: doubled", 1, counts=True),
    ]
    assert played == [(5, 31), (6, 31), (6, 0), (5, 32), (5, 0)]


def test_what_shows_without_the_bug_does_not_count() -> None:
    reported, played = looked_for({(5, 31): invalid("lost"), (5, 0): invalid("lost")}, (31,))
    assert reported == [Looked(31, 5, "total_queue: lost", 1, counts=False)]
    assert played.count((5, 0)) == 1


def test_hunt_ignores_a_plan_that_fails_without_the_bug() -> None:
    unknown = [Verdict("run", "unknown", reason="it did not end")]
    reported, played = looked_for({(5, 31): invalid("lost"), (5, 0): unknown}, (31,))
    assert not reported[0].counts
    assert played.count((5, 0)) == CLEAN_TRIES


def test_the_run_without_a_bug_is_played_once_for_each_plan() -> None:
    reported, played = looked_for({(5, n): invalid("lost") for n in (31, 32, 33)}, (31, 32, 33))
    assert [looked.counts for looked in reported] == [True] * 3
    assert played.count((5, 0)) == 1


def test_a_bug_that_no_plan_shows_is_not_found() -> None:
    assert looked_for({}, (31,))[0] == [Looked(31, runs=2)]
