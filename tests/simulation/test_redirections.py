"""A client that asked the wrong member needs one more round trip; what costs two is found."""

import pytest

from dledger.broker_errors import NotLeaderError
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload
from dledger.jepsen_like.simulation.play import play
from tests.harness.judged import broken

pytestmark = pytest.mark.slow

PLAN = Plan(
    seed=2,
    duration_ms=50_000,
    steps=tuple(
        Step(at_ms, Kind.PAUSE, "leader", 6_000) for at_ms in range(10_000, 45_000, 15_000)
    ),
    workload=Workload(interval_ms=3_000, delayed_per_mille=0),
)
"""The leader stands still while another is elected; then clients that were idle ask it."""


def test_a_redirected_client_goes_to_the_leader_at_once() -> None:
    played = play(PLAN)
    assert played.is_valid, played.verdict.reason
    assert played.sometimes["redirected"] > 0


def test_a_refusal_that_names_no_leader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    init = NotLeaderError.__init__

    def nameless(error: NotLeaderError, _: str | None, term: int) -> None:
        init(error, None, term)

    monkeypatch.setattr(NotLeaderError, "__init__", nameless)
    assert broken(play(PLAN)) == {"redirected"}
