"""A process that is no member is after the broker name while clients send: it gets no message."""

from __future__ import annotations

import pytest

from jepsen_like.plans.plan import Kind, Plan, Step, Workload
from jepsen_like.simulation.play import play

THIEF_MS, FOR_MS = 4_000, 30_000


def plan(arg: int, *more: Step) -> Plan:
    return Plan(
        seed=11,
        duration_ms=THIEF_MS + FOR_MS + 4_000,
        steps=(Step(THIEF_MS, Kind.NAME_THIEF, "all", FOR_MS, arg), *more),
        workload=Workload(producers=3, interval_ms=300, producer_life_s=6),
    )


@pytest.mark.parametrize("arg", [0, 1], ids=["names_no_group", "second_group"])
def test_a_stranger_that_wants_the_name_gets_no_message(arg: int) -> None:
    played = play(plan(arg))
    assert played.is_valid, played.verdict.reason
    assert played.faults["name_thief"] == 1
    assert played.sometimes["thief_register_refused"] > 10
    assert played.sometimes["thief_unregister_refused"] > 10
    assert played.sometimes["thief_topic_refused"] > 10
    for taken in ("thief_registered", "thief_unregistered", "thief_topic_entered", "thief_taken"):
        assert not played.sometimes[taken], taken
    assert played.operations["send_ok"] > 50


def test_a_stranger_gets_no_message_while_leaders_and_name_servers_are_killed() -> None:
    # A NameServer that starts again knows nobody: the stranger may be first, the group comes back.
    kills = (
        Step(8_000, Kind.NAMESRV_KILL, "all", 1_500),
        Step(14_000, Kind.KILL, "leader", 3_000),
        Step(20_000, Kind.NAMESRV_KILL, "all", 100),
        Step(26_000, Kind.POWER_CUT_ALL, "all", 2_000),
    )
    played = play(plan(0, *kills))
    assert played.is_valid, played.verdict.reason
    assert not played.sometimes["thief_taken"]
    assert played.operations["send_ok"] > 30
