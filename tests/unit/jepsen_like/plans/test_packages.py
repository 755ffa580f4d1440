"""Faults by name, and plans at another pace."""

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.plans.draw import SHAPES, SIMULATED, draw_plan
from dledger.jepsen_like.plans.packages import NETWORK, PACKAGES, kinds_named
from dledger.jepsen_like.plans.plan import ASKED_FOR, FRAME_KINDS, LINK_QUALITIES, REAL_ONLY, Kind


def test_every_fault_is_in_one_package_and_in_all() -> None:
    single = [kinds for name, (_, kinds) in PACKAGES.items() if name not in ("all", NETWORK)]
    assert sorted(kind for kinds in single for kind in kinds) == sorted(Kind)
    assert set(SHAPES) == set(Kind)
    assert PACKAGES["all"][1] == set(Kind) - ASKED_FOR - FRAME_KINDS


def test_the_kernel_cuts_links_as_the_proxy_does_and_no_more() -> None:
    kinds = PACKAGES[NETWORK][1]
    assert kinds < PACKAGES["proxy"][1]
    assert not kinds & LINK_QUALITIES
    assert Kind.RESET not in kinds


def test_names_of_kinds_and_packages_add_up() -> None:
    assert kinds_named(["kill", "clock"]) == {Kind.KILL, Kind.CLOCK_JUMP, Kind.CLOCK_DRIFT}
    assert kinds_named(["none"]) == frozenset()
    with pytest.raises(ConfigError, match="no fault 'kil'; see dledger-chaos list-faults"):
        kinds_named(["kil"])


def test_a_faster_plan_has_the_same_steps_sooner() -> None:
    plan = draw_plan(3, 400)
    fast = plan.faster(4.0)
    assert fast.duration_ms == 100_000
    assert [(s.kind, s.target, s.arg) for s in fast.steps] == [
        (s.kind, s.target, s.arg) for s in plan.steps
    ]
    assert all(a.at_ms == round(b.at_ms / 4) for a, b in zip(fast.steps, plan.steps, strict=True))
    assert fast.settings == plan.settings


def test_an_even_plan_draws_from_all_its_kinds() -> None:
    kinds = {step.kind for seed in range(4) for step in draw_plan(seed, 4000, even=True).steps}
    assert kinds == SIMULATED == set(Kind) - REAL_ONLY - ASKED_FOR
    real = {step.kind for step in draw_plan(1, 4000, kinds=REAL_ONLY, even=True).steps}
    assert real == REAL_ONLY
