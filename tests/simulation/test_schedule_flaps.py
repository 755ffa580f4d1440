"""Leadership flaps a hundred times over delayed messages: each is delivered once, and on time."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.history.operation import NOTHING
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import play
from tests.harness.extent import EXTENT

pytestmark = [pytest.mark.slow, pytest.mark.hunt]

FLAPS = 100
EVERY_MS = 6_000

KINDS = (
    (Kind.TRANSFER, "follower", 0),
    (Kind.KILL, "leader", 2_000),
    (Kind.ISOLATE, "leader", 4_500),
)


@pytest.mark.parametrize("seed", range(1, 1 + EXTENT))
def test_hundred_flaps_deliver_each_message_once(seed: int) -> None:
    steps = tuple(
        Step(15_000 + EVERY_MS * turn, *KINDS[turn % len(KINDS)]) for turn in range(FLAPS)
    )
    workload = Workload(
        producers=2, consumers=1, readers=0, interval_ms=1200, delayed_per_mille=950
    )
    settings = Settings(delay_levels="1s 5s 10s 30s")
    played = play(Plan(seed, EVERY_MS * FLAPS, steps, workload=workload, settings=settings))
    assert played.is_valid, played.violations
    assert played.sometimes["leader_change"] >= FLAPS
    assert sum(op.due_ns != NOTHING for op in played.history.operations) > 500
