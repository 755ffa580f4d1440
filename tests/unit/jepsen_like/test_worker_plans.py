"""The plan that an order means."""

import pytest

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.plan import Kind
from dledger.jepsen_like.worker import Order, plan_of


def test_a_seed_plays_what_is_drawn_from_it() -> None:
    assert plan_of(7, Order(duration_s=300)) == draw_plan(7, 300)


@pytest.mark.parametrize("preset", ["", "queue-log"])
def test_faults_asked_for_by_name_are_all_that_is_drawn(preset: str) -> None:
    order = Order(duration_s=600, preset=preset, faults="strangers,names,limits")
    kinds = {step.kind for seed in range(5) for step in plan_of(seed, order).steps}
    assert kinds == {Kind.NAME_THIEF, Kind.NAMESRV_KILL}


def test_a_fault_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fault 'thief'"):
        plan_of(1, Order(faults="thief"))
