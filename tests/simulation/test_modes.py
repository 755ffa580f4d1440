"""Modes of long runs: they break nothing, and answers that contradict what is stored are found."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from client.core import message_ext
from commitlog.key_index import KeyIndex
from dledger.processors import offsets
from jepsen_like.checkers.all_checks import check_everything
from jepsen_like.plans.draw import SHAPES
from jepsen_like.plans.modes import SETTING_MODES, SIDE_MODES, STEP_MODES, in_modes
from jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload
from jepsen_like.plans.promised import promised
from jepsen_like.simulation.play import Played, play

PLAN = Plan(
    seed=8,
    duration_ms=150_000,
    steps=(Step(30_000, Kind.KILL, "leader", 5_000), Step(60_000, Kind.ISOLATE, "leader", 9_000)),
    workload=Workload(interval_ms=2_000),
    modes=tuple(SIDE_MODES),
)


def broken(played: Played) -> set[str]:
    return {violation.name for violation in played.violations}


def test_work_beside_the_workload_breaks_nothing() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason
    done = {mode for mode in SIDE_MODES if played.sometimes[f"mode_{mode}"]}
    assert len(done) >= 4, played.sometimes
    assert not any(played.sometimes[f"mode_{mode}"] for mode in SETTING_MODES)


def _only(mode: str) -> Plan:
    return Plan(8, 60_000, workload=PLAN.workload, modes=(mode,))


def test_a_key_that_a_query_does_not_find_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyIndex, "candidates", lambda *_: iter(()))
    assert broken(play(_only("key_queries"))) == {"side_work"}


def test_a_body_that_is_not_what_was_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_ext, "decompress", lambda body, *_: bytes(body))
    played = play(_only("compression"))
    assert broken(played) == {"side_work"}


def test_a_search_that_goes_too_far_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    search = offsets.search_offset

    def too_far(*place: Any, upper: bool) -> int:
        return search(*place, upper=upper) + 1

    monkeypatch.setattr(offsets, "search_offset", too_far)
    assert broken(play(_only("searches"))) == {"side_work"}


@pytest.mark.parametrize("mode", STEP_MODES)
def test_steps_of_a_mode_break_nothing(mode: str) -> None:
    rng, kinds = Random(mode), STEP_MODES[mode]
    steps = tuple(
        Step(at_ms, kind, target, 6_000, rng.randint(*SHAPES[kind].arg))
        for at_ms, target in ((10_000, "leader"), (40_000, "follower"), (70_000, "most_ahead"))
        for kind in kinds
    )
    played = play(Plan(9, 100_000, steps, name_servers=3, workload=PLAN.workload))
    assert played.is_valid, played.verdict.reason
    assert sum(played.faults[kind] for kind in kinds) >= 1
    if mode == "lying_flushes":
        assert played.sometimes["flushes_undone"] > 0


def _power(seed: int, settings: Settings) -> Plan:
    kinds = (Kind.POWER_CUT, Kind.KILL, Kind.POWER_CUT_ALL, Kind.ISOLATE, Kind.BUGGIFY_KILL)
    steps = tuple(
        Step(10_000 + 12_000 * number, kind, "leader", 6_000, 2 * number)
        for number, kind in enumerate(kinds * 2)
    )
    workload = Workload(interval_ms=700)
    return Plan(seed, 135_000, steps, workload=workload, settings=settings)


def test_flushes_that_come_late_lose_nothing_of_a_majority() -> None:
    played = play(in_modes(_power(3, Settings()), ("async_flush",)))
    assert played.is_valid, played.violations
    assert played.sometimes["doubt_ended"] > 0
    assert sum(played.faults[kind] for kind in (Kind.POWER_CUT, Kind.POWER_CUT_ALL)) >= 2


def test_a_power_cut_of_all_loses_what_is_not_flushed() -> None:
    played = play(_power(3, Settings(sync_flush=False)))
    assert played.faults[Kind.POWER_CUT_ALL] >= 2
    assert not played.is_valid
    assert "leader_incomplete" in broken(played)


def test_a_leader_that_acknowledges_alone_keeps_the_weaker_law() -> None:
    plan = _power(3, Settings(async_master=True))
    played = play(plan)
    assert played.is_valid, played.violations
    whole = check_everything(played.history, clock_error_ns=promised(plan)["clock_error_ns"])
    assert "acknowledged message lost" in {v.name for verdict in whole for v in verdict.violations}
