"""Clusters in which one date is two years off, and back: store time stays near that of most."""

from __future__ import annotations

from typing import Any

import pytest

from dledger.raft.clocks import SKEW_MAX_MS
from dledger.state.apply import apply_entry
from dledger.state.tables import StateTables
from jepsen_like.plans.plan import Kind, Plan, Step, Workload
from jepsen_like.simulation.play import play
from jepsen_like.simulation.sim_clock import EPOCH_MS

YEARS_MS = 2 * 365 * 86_400_000
WORKLOAD = Workload(
    producers=4,
    consumers=1,
    readers=1,
    interval_ms=700,
    delayed_per_mille=200,
    transactions_per_mille=200,
    idempotent=True,
)


@pytest.fixture
def stored_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the store times that are applied anywhere, from the beginning of the run on."""
    seen: list[int] = []

    def watched(tables: StateTables, *rest: Any) -> Any:
        applied = apply_entry(tables, *rest)
        if tables.last_store_time_ms:
            seen.append(tables.last_store_time_ms - EPOCH_MS)
        return applied

    monkeypatch.setattr("dledger.store.apply_entry", watched)
    return seen


@pytest.mark.parametrize("sign", [1, -1])
def test_a_leader_two_years_off_takes_the_group_along_nowhere(
    sign: int, stored_ms: list[int]
) -> None:
    """Each member in turn, so that one of them leads when its date jumps."""
    steps = tuple(
        Step(at_ms + 8_000 * number, Kind.CLOCK_JUMP, str(number), 0, by_ms)
        for number in range(3)
        for at_ms, by_ms in ((8_000, sign * YEARS_MS), (14_000, -sign * YEARS_MS))
    )
    run = play(Plan(11, 45_000, steps, workload=WORKLOAD))
    assert run.faults[Kind.CLOCK_JUMP.value] == 6
    assert run.is_valid, run.violations
    assert len(stored_ms) > 300
    assert min(stored_ms) > -SKEW_MAX_MS
    assert max(stored_ms) < int(run.simulated_s * 1000) + SKEW_MAX_MS
