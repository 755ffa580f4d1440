"""Files that are no segments go bad: what is read is right, or is refused, and is made good."""

from __future__ import annotations

import pytest

from dledger.jepsen_like.plans.modes import ROT_COUNTERS
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation.platter import ROTTEN
from dledger.jepsen_like.simulation.play import play

pytestmark = pytest.mark.slow

KINDS = len(ROTTEN)


def rotten(*args: int, seed: int = 4, keep_segments: int = 0) -> Plan:
    """Return a plan in which one file after the other goes bad, on one broker after the other."""
    steps = tuple(
        Step(12_000 + 25_000 * number, Kind.FILE_ROT, str(number), 500, arg)
        for number, arg in enumerate(args)
    )
    return Plan(
        seed=seed,
        duration_ms=20_000 + 25_000 * len(args),
        steps=steps,
        workload=Workload(interval_ms=2_000, delayed_per_mille=0),
        settings=Settings(checkpoint_ms=1_000, keep_segments=keep_segments),
        modes=("searches", "follower_reads", "key_queries"),
    )


@pytest.mark.parametrize(
    ("unreadable", "keep_segments"), [(0, 2), pytest.param(1, 0, marks=pytest.mark.hunt)]
)
def test_a_file_of_each_kind_goes_bad_and_is_made_good(unreadable: int, keep_segments: int) -> None:
    args = [kind + KINDS * unreadable + 2 * KINDS * unreadable for kind in range(KINDS)]
    played = play(rotten(*args, keep_segments=keep_segments))
    assert played.is_valid, played.violations
    assert sum(played.sometimes[name] for name in ROT_COUNTERS) >= 4, played.sometimes
    assert played.sometimes["node_gave_up"] == played.sometimes["rot_identity"]
