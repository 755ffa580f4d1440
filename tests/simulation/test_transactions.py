"""Transactions in simulated clusters: ends sent twice, late, both ways or never, under faults."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from dledger.jepsen_like.history.operation import Decision, F, Operation, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Step
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.workloads.presets import simulated_workload
from dledger.jepsen_like.workloads.transactions import NEVER_KNOWN
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

WORKLOAD = msgspec.structs.replace(simulated_workload("transactions"), interval_ms=700)


def played(seed: int, *steps: Step, duration_ms: int = 45_000) -> Played:
    return play(Plan(seed, duration_ms, steps, workload=WORKLOAD))


def rows(run: Played, f: F) -> list[Operation]:
    return [op for op in run.history.operations if op.f == f]


def decisions(run: Played) -> dict[int, Counter[tuple[int, int]]]:
    """Return, for each value, how often which decision ended how."""
    found: dict[int, Counter[tuple[int, int]]] = {}
    for op in rows(run, F.END_TRANSACTION):
        found.setdefault(op.value, Counter())[op.decision, op.outcome] += 1
    return found


def test_without_faults_each_transaction_ends_as_decided() -> None:
    run = played(1)
    assert run.is_valid, run.violations
    halves = [op for op in rows(run, F.HALF) if op.outcome == Outcome.OK]
    assert len(halves) >= 50
    counted = decisions(run)
    both_ways = twice = 0
    for half in halves:
        ends = counted.get(half.value, Counter())
        ok = {decision for decision, outcome in ends if outcome == Outcome.OK}
        assert len(ok) == (0 if half.value % NEVER_KNOWN == 0 else 1)
        both_ways += len({decision for decision, _ in ends}) == 2
        twice += max(ends.values(), default=0) > 1
    assert both_ways >= 5
    assert twice >= 5
    verdict = next(each for each in run.verdicts if each.checker == "transactions")
    assert verdict.counts["discarded"] >= 1
    assert verdict.counts["checks"] >= 10


@pytest.mark.parametrize("seed", gate_part([2, 3], 1))
def test_leaders_killed_in_between_change_no_decision(seed: int) -> None:
    kills = (Step(at, Kind.KILL, "leader", 2_000) for at in range(5_000, 30_000, 6_000))
    run = played(seed, *kills)
    assert run.is_valid, run.violations
    assert run.sometimes["leader_change"] >= 2
    ended = rows(run, F.END_TRANSACTION)
    assert {op.decision for op in ended if op.outcome == Outcome.OK} == {
        Decision.COMMIT,
        Decision.ROLLBACK,
    }
    assert {op.outcome for op in ended} >= {Outcome.OK, Outcome.FAIL}


def test_producers_that_die_leave_nothing_open() -> None:
    kills = (Step(at, Kind.CLIENT_KILL, "0", 3_000) for at in (6_000, 14_000, 22_000))
    run = played(4, *kills)
    assert run.is_valid, run.violations
    by_check = [
        op
        for op in rows(run, F.END_TRANSACTION)
        if op.outcome == Outcome.OK and any(check.value == op.value for check in rows(run, F.CHECK))
    ]
    assert len(by_check) >= 5
