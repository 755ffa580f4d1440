"""Nothing due waits while a leader serves, routes name what is there; what fails that is found."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from dledger.jepsen_like.plans.modes import in_modes
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import Played, play
from dledger.namesrv.name_server import RouteCache
from dledger.namesrv.route_table import RouteInfoManager
from dledger.registration import Registration
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import TimerMessageService
from dledger.services.transaction_check import TransactionCheckService

pytestmark = pytest.mark.slow

LOAD = Workload(
    interval_ms=500, delayed_per_mille=300, timer_per_mille=300, transactions_per_mille=200
)
PLAN = Plan(
    seed=7,
    duration_ms=120_000,
    steps=(Step(10_000, Kind.KILL, "leader", 5_000), Step(40_000, Kind.NAMESRV_KILL, "all", 5_000)),
    workload=LOAD,
)


def broken(played: Played) -> set[str]:
    return {violation.name for violation in played.violations}


def test_a_cluster_without_a_bug_keeps_all_bounds() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason


@pytest.mark.parametrize(
    ("service", "method", "what"),
    [
        (ScheduleMessageService, "_deliver_level", "delay level"),
        (TimerMessageService, "_deliver", "timer"),
        (TransactionCheckService, "_check", "half message"),
    ],
)
@pytest.mark.hunt
def test_a_service_that_stands_still_is_found(
    monkeypatch: pytest.MonkeyPatch, service: type, method: str, what: str
) -> None:
    async def stands_still(*_: Any) -> bool:
        await trio.sleep_forever()

    monkeypatch.setattr(service, method, stands_still)
    played = play(PLAN)
    assert broken(played) == {"overdue"}
    assert f"waits {what}" in played.violations[0].detail


@pytest.mark.hunt
def test_a_member_that_a_route_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    register = RouteInfoManager.register_broker

    def leaves_out(routes: RouteInfoManager, registration: Any, now_ms: int) -> Any:
        result = register(routes, registration, now_ms)
        if registration.broker_id == 2 and not result.superseded:
            routes._remove([registration.key])
        return result

    monkeypatch.setattr(RouteInfoManager, "register_broker", leaves_out)
    played = play(PLAN)
    assert broken(played) == {"route"}


@pytest.mark.hunt
def test_a_change_of_role_that_is_not_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registration, "role_changed", lambda _: None)
    played = play(PLAN)
    assert broken(played) == {"route"}
    assert "the leader" in played.violations[0].detail


@pytest.mark.hunt
def test_an_answer_older_than_the_tables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouteCache, "invalidate", lambda _self, _topics: None)
    played = play(PLAN)
    assert broken(played) == {"route"}
    assert "answers" in played.violations[0].detail


@pytest.mark.hunt
def test_a_question_before_its_pause_is_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    again_in = TransactionCheckService._again_in

    def too_soon(self: TransactionCheckService, seconds: float, *rest: Any, **more: Any) -> None:
        again_in(self, seconds / 4, *rest, **more)

    monkeypatch.setattr(TransactionCheckService, "_again_in", too_soon)
    assert "asked early" in broken(play(PLAN))


@pytest.mark.hunt
def test_a_half_message_that_is_given_up_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TransactionCheckService, "_is_over", lambda _self, half, _age_ms: half.checks > 0
    )
    assert broken(play(PLAN)) == {"given up early"}


@pytest.mark.hunt
def test_a_member_that_ended_and_is_named_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouteInfoManager, "disconnect", lambda _self, _connection: ())
    steps = (Step(20_000, Kind.KILL, "follower", 10_000),)
    played = play(Plan(8, 40_000, steps, workload=LOAD))
    assert broken(played) == {"route"}
    assert "ended" in played.violations[0].detail


@pytest.mark.hunt
def test_topics_older_than_the_leaders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registration, "on_applied", lambda _self, _touched: None)
    played = play(in_modes(Plan(8, 100_000, workload=LOAD), ("topic_deletion",)))
    assert broken(played) == {"route"}
    assert "topics older" in played.violations[0].detail
