"""Plans that bring together what has not met are worth more."""

from dataclasses import dataclass, field

from dledger.jepsen_like.plans.novelty import SERVICES, Novelty, cost_of, pairs_of, services_of
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.worker import GUIDED_PRESETS, Order, Report, _Guide

SENDS = Workload(consumers=0, readers=0, delayed_per_mille=0, batch_per_mille=0)
KILL, WIPE = Step(1_000, Kind.KILL), Step(5_000, Kind.WIPE)


@dataclass
class Came:
    faults: dict[str, int]
    sometimes: dict[str, int] = field(default_factory=dict)


def test_services_are_fields_of_a_workload_and_retention() -> None:
    assert set(SERVICES.values()) <= set(Workload.__struct_fields__)
    assert services_of(Plan(1, 1_000, workload=SENDS)) == {"sends"}
    kept = Plan(1, 1_000, workload=Workload(), settings=Settings(keep_segments=2))
    assert services_of(kept) == {"sends", "commits", "reads", "batches", "delays", "retention"}


def test_pairs_are_faults_with_services_and_close_faults() -> None:
    near = Plan(1, 60_000, (KILL, WIPE), workload=SENDS)
    assert pairs_of(near) == {("kill", "sends"), ("wipe", "sends"), ("kill", "wipe")}
    far = near.with_steps((KILL, Step(40_000, Kind.WIPE)))
    assert pairs_of(far) == {("kill", "sends"), ("wipe", "sends")}
    assert pairs_of(near, done=["kill"]) == {("kill", "sends")}


def test_a_plan_is_worth_less_once_its_pairs_have_met() -> None:
    novelty, plan = Novelty(), Plan(1, 60_000, (KILL, WIPE), workload=SENDS)
    other = plan.with_steps((Step(1_000, Kind.PAUSE),))
    first = novelty.worth(plan)
    novelty.note(plan, Came({"kill": 1, "wipe": 1, "skipped": 3}, {"leader_change": 2}))
    assert novelty.worth(plan) == first / 4 < novelty.worth(other)
    assert set(novelty.reached) == {
        ("leader_change", "kill", "sends"),
        ("leader_change", "wipe", "sends"),
    }
    assert ("kill", "sends") not in novelty.never_met([Kind.KILL])
    assert ("kill", "push") in novelty.never_met([Kind.KILL])


def test_a_fault_that_did_not_happen_has_met_nothing() -> None:
    novelty, plan = Novelty(), Plan(1, 60_000, (KILL, WIPE), workload=SENDS)
    novelty.note(plan, Came({"kill": 1, "wipe": 0}))
    assert novelty.never_met([Kind.KILL, Kind.WIPE])[0] != ("kill", "sends")
    assert ("wipe", "sends") in novelty.never_met([Kind.WIPE])


def test_more_clients_cost_more() -> None:
    few, many = (Plan(1, 60_000, workload=Workload(producers=count)) for count in (1, 9))
    assert cost_of(few) < cost_of(many) < 60 * cost_of(few)


def test_a_guide_plays_every_workload_and_no_plan_twice() -> None:
    guide, played = _Guide(Order(duration_s=60.0, is_soak=True, guided=True)), []
    for _ in range(60):
        seed, order = guide.choose()
        preset = "" if order.is_soak else order.preset
        faults = {step.kind.value: 1 for step in guide._open[preset, seed].steps}
        guide.note(
            Report(seed, 1.0, 1.0, [], "valid", "", {}, faults=faults, sometimes={}, preset=preset)
        )
        played.append((preset, seed))
    assert len(set(played)) == 60
    assert {preset for preset, _ in played} == set(GUIDED_PRESETS)
    assert len({preset for preset, _ in played[: 2 * len(GUIDED_PRESETS)]}) >= 8
