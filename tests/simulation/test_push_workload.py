"""Push groups whose members come and go pass, with faults and without, and what they do repeats."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.simulation.play import Played, play
from dledger.jepsen_like.worker import Order, plan_of
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow


def played(seed: int, *, calm: bool) -> Played:
    return play(plan_of(seed, Order(duration_s=60.0, calm=calm, preset="push")))


@pytest.mark.parametrize("seed", gate_part([2, 8], 1))
def test_a_push_group_consumes_all_and_shares_the_queues(seed: int) -> None:
    run = played(seed, calm=False)
    (verdict,) = [verdict for verdict in run.verdicts if verdict.checker == "push_group"]
    assert run.is_valid, run.violations
    assert verdict.counts["consumed"] > 100
    assert verdict.counts["members"] == 3


@pytest.mark.hunt
def test_without_faults_no_message_is_consumed_twice() -> None:
    run = played(3, calm=True)
    (verdict,) = [verdict for verdict in run.verdicts if verdict.checker == "push_group"]
    assert run.is_valid, run.violations
    assert verdict.counts["consumed"] > 100
    assert verdict.counts["more_than_once"] == 0
