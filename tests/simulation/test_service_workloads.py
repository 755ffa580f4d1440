"""Clients of single services in simulated clusters: their law is kept whatever dies.

Groups elect and change their members while a minority is away; no member is healed first.
"""

from collections import Counter
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.checkers.locks import TWO_HOLDERS, check_history
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.history.operation import NOTHING, Decision, F, Operation, Outcome
from dledger.jepsen_like.nemesis.members import Change, can_do_without, choose, majority
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload, encode_plan
from dledger.jepsen_like.simulation.liveness import go_on_without
from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.simulation.world import World
from dledger.jepsen_like.worker import Order, plan_of
from dledger.jepsen_like.workloads.presets import simulated_workload
from dledger.jepsen_like.workloads.transactions import NEVER_KNOWN
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

STEPS = (
    Step(12_000, Kind.KILL, "leader", 3_000),
    Step(26_000, Kind.PAUSE, "leader", 9_000),
    Step(42_000, Kind.ISOLATE, "leader", 6_000),
)
WORKLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "pop": (11, {"receivers": 4, "queues": 2, "interval_ms": 700}),
    "steps": (11, {"producers": 2, "steppers": 3, "queues": 4, "interval_ms": 400}),
    "locks": (7, {"lockers": 4, "queues": 2, "interval_ms": 700}),
    "lifetimes": (12, {"expirers": 8, "queues": 2}),
}
"""By checker: seed and clients."""


@cache
def played(checker: str) -> Played:
    seed, shape = WORKLOADS[checker]
    workload = Workload(
        **{"producers": 1, "consumers": 0, "readers": 0, "delayed_per_mille": 0, **shape}
    )
    return play(
        Plan(seed, 60_000, STEPS, workload=workload, settings=Settings(lock_lease_ms=8_000))
    )


def verdict(checker: str) -> Verdict:
    return next(each for each in played(checker).verdicts if each.checker == checker)


def of_kind(run: Played, f: F) -> list[Operation]:
    return [op for op in run.history.operations if op.f == f]


def rows(checker: str, f: F) -> list[Operation]:
    return of_kind(played(checker), f)


@pytest.mark.parametrize("checker", WORKLOADS)
def test_law_is_kept_through_kills_pauses_and_cuts(checker: str) -> None:
    assert played(checker).violations == ()
    assert verdict(checker).validity == "valid"
    assert played(checker).sometimes["leader_change"] >= 3


def test_receivers_use_receipts_in_every_way() -> None:
    assert verdict("pop").counts["received"] > 100
    assert verdict("pop").counts["again"] > 5
    assert any(op.err == "ReceiptStaleError" for op in rows("pop", F.ACK))
    assert any(op.outcome == Outcome.OK for op in rows("pop", F.CHANGE_TIME))
    received = rows("pop", F.RECEIVE)
    groups = {op.group for op in received if op.off != NOTHING}
    assert groups == {"receivers", "receivers-in-order"}
    assert {op.group for op in received if op.max_off != NOTHING} == groups


def test_steps_end_in_every_way() -> None:
    counts = verdict("steps").counts
    assert min(counts["stored"], counts["overtaken"], counts["outputs"]) > 30
    steps = rows("steps", F.STEP)
    assert {op.outcome for op in steps} == {Outcome.OK, Outcome.INFO, Outcome.FAIL}
    assert any(op.err == "StepOvertakenError" for op in steps)
    assert any(op.group == "steppers" and op.cnt > 1 for op in steps)


def test_locks_change_hands_and_old_tokens_are_refused() -> None:
    locks, commits = rows("locks", F.LOCK), rows("locks", F.COMMIT)
    assert len(Counter(op.process for op in locks if op.outcome == Outcome.OK)) >= 4
    assert verdict("locks").counts["locks"] == 2
    assert any(op.err == "LockedByOther" for op in locks)
    assert any(op.err == "LockLostError" for op in commits)
    assert any(op.outcome == Outcome.OK and op.token > 0 for op in commits)


def test_lock_checker_gets_the_lease_of_the_plan() -> None:
    """With a lease that no broker gave, the same history has two holders at once."""
    longer = check_history(played("locks").history.operations, lease_ns=60_000_000_000)
    assert TWO_HOLDERS in {violation.name for violation in longer.violations}


def test_expirers_read_and_pass_over_messages() -> None:
    reads = [op for op in rows("lifetimes", F.LIVING) if op.outcome == Outcome.OK]
    assert sum(op.value != NOTHING and not op.group for op in reads) > 30
    assert sum(op.value != NOTHING and bool(op.group) for op in reads) > 10
    assert any(op.max_off - op.off > 1 for op in reads), "nothing is passed over"


def pushed(seed: int, *, calm: bool, preset: str = "push") -> Played:
    return play(plan_of(seed, Order(duration_s=60.0, calm=calm, preset=preset)))


@pytest.mark.parametrize("preset", ["push", "push-in-order", "polls"])
@pytest.mark.parametrize("seed", gate_part([2, 8], 1))
def test_a_push_group_consumes_all_and_shares_the_queues(preset: str, seed: int) -> None:
    run = pushed(seed, calm=False, preset=preset)
    (verdict,) = [verdict for verdict in run.verdicts if verdict.checker == "push_group"]
    assert run.is_valid, run.violations
    assert verdict.counts["consumed"] > 100
    assert verdict.counts["members"] == 3


@pytest.mark.hunt
def test_without_faults_no_message_is_consumed_twice() -> None:
    run = pushed(3, calm=True)
    (verdict,) = [verdict for verdict in run.verdicts if verdict.checker == "push_group"]
    assert run.is_valid, run.violations
    assert verdict.counts["consumed"] > 100
    assert verdict.counts["more_than_once"] == 0


HOSTILE = msgspec.structs.replace(simulated_workload("hostile"), interval_ms=700)


@pytest.mark.parametrize("seed", gate_part([1, 2], 1))
def test_hostile_messages_through_every_service_under_kills(seed: int) -> None:
    kills = tuple(Step(at, Kind.KILL, "leader", 2_000) for at in range(6_000, 30_000, 8_000))
    run = play(Plan(seed, 40_000, kills, workload=HOSTILE))
    assert run.is_valid, run.violations
    assert run.operations["send_ok"] > 50
    assert run.operations["send_back_ok"] > 10
    assert run.sometimes["leader_change"] >= 2


@pytest.mark.hunt
def test_hostile_timers_roll_in_a_cluster_under_kills() -> None:
    """A roll window of a minute stands for the two days that no run lasts."""
    workload = msgspec.structs.replace(simulated_workload("rolls"), interval_ms=1000)
    assert workload.hostile_per_mille > 500
    kills = tuple(Step(at, Kind.KILL, "leader", 3_000) for at in range(20_000, 200_000, 40_000))
    run = play(Plan(4, 200_000, kills, workload=workload))
    assert run.is_valid, run.violations
    assert run.sometimes["leader_change"] >= 4
    assert run.sometimes["timer_rolled"] > 50
    texts = [encode_plan(plan_of(1, Order(preset=name))) for name in ("rolls", "timers")]
    assert ["timer_roll_s" in text for text in texts] == [True, False]


TRANSACTIONS = msgspec.structs.replace(simulated_workload("transactions"), interval_ms=700)


def decided(seed: int, *steps: Step) -> Played:
    return play(Plan(seed, 45_000, steps, workload=TRANSACTIONS))


def decisions(run: Played) -> dict[int, Counter[tuple[int, int]]]:
    """Return, for each value, how often which decision ended how."""
    found: dict[int, Counter[tuple[int, int]]] = {}
    for op in of_kind(run, F.END_TRANSACTION):
        found.setdefault(op.value, Counter())[op.decision, op.outcome] += 1
    return found


def test_without_faults_each_transaction_ends_as_decided() -> None:
    run = decided(1)
    assert run.is_valid, run.violations
    halves = [op for op in of_kind(run, F.HALF) if op.outcome == Outcome.OK]
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
    run = decided(seed, *kills)
    assert run.is_valid, run.violations
    assert run.sometimes["leader_change"] >= 2
    ended = of_kind(run, F.END_TRANSACTION)
    assert {op.decision for op in ended if op.outcome == Outcome.OK} == {
        Decision.COMMIT,
        Decision.ROLLBACK,
    }
    assert {op.outcome for op in ended} >= {Outcome.OK, Outcome.FAIL}


def test_producers_that_die_leave_nothing_open() -> None:
    kills = (Step(at, Kind.CLIENT_KILL, "0", 3_000) for at in (6_000, 14_000, 22_000))
    run = decided(4, *kills)
    assert run.is_valid, run.violations
    by_check = [
        op
        for op in of_kind(run, F.END_TRANSACTION)
        if op.outcome == Outcome.OK
        and any(check.value == op.value for check in of_kind(run, F.CHECK))
    ]
    assert len(by_check) >= 5


NAMES = ("n0", "n1", "n2", "n3", "n4")
WORKLOAD = Workload(producers=2, consumers=1, readers=1, interval_ms=1500, delayed_per_mille=0)
AWAY = 60_000
"""Longer than what is left of a plan."""


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("change", Change)
def test_a_majority_is_left_before_and_after_any_change(change: Change, size: int) -> None:
    voters = NAMES[:size]
    for seed in range(20):
        chosen = choose(change, "n1", voters, Random(seed).shuffle)
        if chosen is None:
            assert change is Change.REMOVE_AND_LEAD_NO_MORE
            assert size == 3
            continue
        away = {*chosen.away, *(["n1"] if chosen.leader_goes else [])}
        after = [name for name in voters if name != chosen.removed]
        assert "n1" not in (*chosen.away, chosen.removed)
        for voting in (voters, after):
            assert len(set(voting) - away) >= majority(len(voting))
        assert can_do_without(away, [voters, tuple(after)], set(NAMES))
        assert (chosen.removed in chosen.away) is (change is Change.REMOVE_ABSENT)


def test_without_a_majority_of_sure_members_nothing_is_demanded() -> None:
    three = [("n0", "n1", "n2")]
    assert can_do_without(["n0"], three, ["n1", "n2"])
    assert not can_do_without(["n0"], three, ["n0", "n1"])
    assert not can_do_without(["n0"], three, ["n1"])
    assert not can_do_without(["n0"], [*three, ("n0", "n1")], ["n1", "n2"])
    assert not can_do_without([], [], ["n0", "n1", "n2"])


@pytest.mark.parametrize("arg", gate_part(range(8), 2))
@pytest.mark.parametrize("members", [3, 4])
def test_the_others_elect_and_change_without_a_minority(arg: int, members: int) -> None:
    away = (Step(at, Kind.CHANGE_WITHOUT_MINORITY, "all", AWAY, arg) for at in (12_000, 12_500))
    run = play(Plan(7, 18_000, tuple(away), members=members, workload=WORKLOAD))
    assert run.is_valid, run.violations
    nobody_away = members == 3 and arg // 2 == Change.REMOVE_PRESENT
    assert run.faults["skipped"] == 1, "one minority at a time"
    assert run.sometimes["led_without_minority"] == (not nobody_away)


def test_a_group_that_cannot_go_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everybody healed first it would not be."""

    async def unable(world: World, *rest: object) -> None:
        monkeypatch.setattr("dledger.jepsen_like.simulation.liveness._leads", lambda *_: None)
        await go_on_without(world, *rest)  # type: ignore[arg-type]  # passes on what it is given

    monkeypatch.setattr("dledger.jepsen_like.simulation.play.go_on_without", unable)
    steps = (Step(12_000, Kind.CHANGE_WITHOUT_MINORITY, "all", AWAY, 4),)
    run = play(Plan(7, 18_000, steps, workload=WORKLOAD))
    (found,) = run.violations
    assert (found.checker, found.name) == ("liveness", "liveness")
    assert "no leader without n" in found.detail


def test_plans_of_the_preset_end_with_a_minority_away() -> None:
    order = Order(duration_s=120, preset="minority")
    plans = [plan_of(seed, order) for seed in range(30)]
    assert {plan.members for plan in plans} == {3, 4, 5}
    late = [
        plan
        for plan in plans
        if any(s.kind is Kind.CHANGE_WITHOUT_MINORITY and s.end_ms >= 120_000 for s in plan.steps)
    ]
    assert len(late) > 15
    without = plan_of(3, msgspec.structs.replace(order, preset="mixed"))
    assert Kind.CHANGE_WITHOUT_MINORITY not in {step.kind for step in without.steps}
