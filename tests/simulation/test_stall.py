"""A run without acknowledgements is a violation where a majority could give them, only there."""

from collections.abc import Callable
from typing import Any

import pytest

from dledger.broker_errors import PendingFullError
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.liveness import STALL_S, could_acknowledge
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.world import World
from dledger.proposals import Proposals

pytestmark = pytest.mark.slow

WORKLOAD = Workload(interval_ms=1000, readers=0, delayed_per_mille=0)
SILENT_FROM_S = 20.0
OFF_MS = 75_000


def refuse_from(monkeypatch: pytest.MonkeyPatch, begin_s: float) -> Callable[[World], None]:
    """Let leaders refuse every proposal from some time on, and say nothing else."""
    worlds: list[World] = []
    propose = Proposals.propose

    def refusing(self: Proposals, *arguments: Any, **options: Any) -> None:
        if worlds[0].elapsed_s > begin_s:
            raise PendingFullError("no place")
        propose(self, *arguments, **options)

    monkeypatch.setattr(Proposals, "propose", refusing)
    return worlds.append


def test_a_leader_that_refuses_everything_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(1, 90_000, workload=WORKLOAD)
    played = play(plan, prepare=refuse_from(monkeypatch, SILENT_FROM_S))
    (found,) = (each for each in played.violations if each.name == "stalled")
    assert found.checker == "invariants"
    # Counted from the last acknowledgement.
    pause_s = WORKLOAD.interval_ms / 1000
    assert -2 * pause_s < found.at_ns / 1e9 - (SILENT_FROM_S + STALL_S) < 20


@pytest.mark.parametrize(
    "steps",
    [
        (Step(10_000, Kind.KILL, "0", OFF_MS), Step(10_000, Kind.KILL, "1", OFF_MS)),
        (Step(10_000, Kind.CLIENT_CUT, "leader", OFF_MS),),
        (Step(10_000, Kind.DISK_FULL, "all", OFF_MS),),
        (Step(10_000, Kind.LOSS, "all", OFF_MS, 400),),
    ],
    ids=["no majority", "leader without clients", "full disks", "lossy links"],
)
def test_no_stall_is_claimed_where_none_could_acknowledge(steps: tuple[Step, ...]) -> None:
    played = play(Plan(2, OFF_MS + 10_000, steps, workload=WORKLOAD))
    assert "stalled" not in {violation.name for violation in played.violations}


def test_a_majority_without_its_minority_could_acknowledge() -> None:
    seen: dict[str, bool] = {}

    def look(world: World) -> None:
        def at_45_s(_: object) -> None:
            seen["majority"] = could_acknowledge(world, "c0")

        def at_80_s(_: object) -> None:
            seen["one"] = could_acknowledge(world, "c0")

        world.time.call_later(45.0, at_45_s, None)
        world.time.call_later(80.0, at_80_s, None)

    steps = (Step(10_000, Kind.KILL, "0", 80_000), Step(50_000, Kind.KILL, "1", 40_000))
    assert play(Plan(3, 95_000, steps, workload=WORKLOAD), prepare=look).is_valid
    assert seen == {"majority": True, "one": False}
