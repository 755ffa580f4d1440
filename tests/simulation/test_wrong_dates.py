"""Clusters in which one date is two years off, and back: store time stays near the right one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dledger.jepsen_like.plans.plan import ASKED_FOR, Kind, Plan, Settings, Step, Workload
from dledger.jepsen_like.simulation import play as playing
from dledger.jepsen_like.simulation.play import play
from dledger.jepsen_like.simulation.virtual_time import EPOCH_MS
from dledger.jepsen_like.simulation.world_settings import WorldSettings
from dledger.jepsen_like.worker import Order, plan_of
from dledger.log_clock import JUMP_MAX_MS
from dledger.state.apply import apply_entry
from dledger.state.tables import StateTables
from tests.mutants.patches import read_patches

pytestmark = pytest.mark.slow

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
    assert min(stored_ms) > -JUMP_MAX_MS
    assert max(stored_ms) < int(run.simulated_s * 1000) + JUMP_MAX_MS


@pytest.fixture
def segments_expire_at_any_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let expired segments go whenever there are some; by the default date none is."""
    usual = playing.world_settings
    hours = ";".join(f"{hour:02}" for hour in range(24))

    def settings(plan: Plan) -> WorldSettings:
        found = usual(plan)
        return WorldSettings(
            found.brokers,
            found.name_servers,
            found.heartbeat_ms,
            found.election_timeout_ms,
            found.segment_bytes,
            found.checkpoint_interval_ms,
            rpc_timeout_s=found.rpc_timeout_s,
            options={**found.options, "store.delete_when": hours},
        )

    monkeypatch.setattr(playing, "world_settings", settings)


@pytest.mark.usefixtures("segments_expire_at_any_hour")
@pytest.mark.parametrize("years", [2, -2])
def test_nothing_expires_or_comes_early_by_one_of_two_dates(
    years: int, stored_ms: list[int]
) -> None:
    """One of three is away all the time; of the other two the one that leads is years off."""
    steps = (
        Step(6_000, Kind.KILL, "follower", 60_000),
        *(Step(at, Kind.CLOCK_YEARS, "leader", 14_000, years) for at in (12_000, 36_000)),
        Step(56_000, Kind.CLOCK_YEARS, "0", 20_000, -years),
    )
    workload = msgspec.structs.replace(WORKLOAD, timer_per_mille=200)
    settings = Settings(segment_bytes=131_072)
    run = play(Plan(13, 62_000, steps, workload=workload, settings=settings))
    assert run.faults[Kind.CLOCK_YEARS.value] == 3
    assert run.is_valid, run.violations
    assert run.sometimes["clock_is_off"] >= 2
    assert run.sometimes["floor_moved"] == 0
    assert run.world is not None
    logs = [node.group.node.journal.log for node in run.world.brokers.values() if node.group]
    assert all(log.first_index == 1 and log.end_position > 3 * 131_072 for log in logs)
    assert max(stored_ms) < int(run.simulated_s * 1000) + JUMP_MAX_MS


def test_only_plans_that_ask_for_it_have_a_date_years_off() -> None:
    order = Order(duration_s=300, preset="years")
    steps = [step for seed in range(12) for step in plan_of(seed, order).steps]
    years = {step.arg for step in steps if step.kind is Kind.CLOCK_YEARS}
    assert {-2, 2} <= years <= {-2, -1, 0, 1, 2}
    assert Kind.CLOCK_YEARS in ASKED_FOR
    assert read_patches()[841].preset == "years"
