"""Leadership changes a hundred times over delayed messages: each is delivered once, and in time.

That a message is in its queue exactly once, none is lost, and the progress is the same on all
replicas, is what the laws and the invariants of a played plan judge.
"""

from __future__ import annotations

import pytest

from dledger.jepsen_like.checkers import delayed
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.play import play
from tests.harness.extent import EXTENT

pytestmark = pytest.mark.slow

CHANGES = 100
BETWEEN_MS = (4_000, 5_000, 7_000, 12_000)
"""Some leaders never deliver anything, some everything that is due."""

KINDS = (Kind.TRANSFER, Kind.KILL, Kind.ISOLATE)


def changes() -> tuple[Step, ...]:
    """Return steps that take the leadership away, with connections reset or not."""
    steps, at_ms = [], 15_000
    for turn in range(CHANGES):
        kind = KINDS[turn % len(KINDS)]
        target = "follower" if kind is Kind.TRANSFER else "leader"
        steps.append(Step(at_ms, kind, target, 3_000, turn % 2))
        at_ms += BETWEEN_MS[turn % len(BETWEEN_MS)]
    return tuple(steps)


@pytest.mark.parametrize("seed", range(1, 1 + EXTENT))
@pytest.mark.hunt
def test_a_hundred_leaders_deliver_each_message_once(seed: int) -> None:
    steps = changes()
    played = play(
        Plan(
            seed,
            steps[-1].at_ms + 10_000,
            steps,
            workload=Workload(
                producers=2, consumers=1, readers=0, interval_ms=1200, delayed_per_mille=950
            ),
            settings=Settings(delay_levels="1s 5s 10s 30s", heartbeat_ms=300, election_ms=1_000),
        )
    )
    assert played.is_valid, f"seed {seed}: {played.verdict.reason} {played.violations}"
    assert played.faults.total() == CHANGES
    assert played.sometimes["leader_change"] >= CHANGES - 5
    (judged,) = [verdict for verdict in played.verdicts if verdict.checker == delayed.NAME]
    assert judged.is_valid, judged.reason
    assert judged.counts["seen"] > 500
