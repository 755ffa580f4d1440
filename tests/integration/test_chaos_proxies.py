"""Proxies that are killed and stand still while clients of the gRPC protocol go through them.

A failing run leaves its folder; ``dledger-chaos run --plan FOLDER/plan.json`` plays it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.jepsen_like.history.operation import NOTHING, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Step, Workload
from tests.harness.chaos_runs import events, play_plan, sent_during

WORKLOAD = Workload(
    producers=4, consumers=0, readers=1, receivers=6, interval_ms=60, delayed_per_mille=0, proxies=2
)

pytestmark = pytest.mark.slow


@pytest.mark.hunt
def test_killed_proxies_lose_and_double_nothing(tmp_path: Path) -> None:
    said, history = play_plan(
        tmp_path,
        Step(1_500, Kind.PROXY_KILL, "0", 2_500),
        Step(5_000, Kind.PROXY_KILL, "all", 300),
        seconds=12,
        workload=WORKLOAD,
    )
    assert said["faults_by_kind"]["proxy_kill"] == 2
    one, both = events(history, Kind.PROXY_KILL)
    assert (one.node, both.node) == ("proxy0", "proxy0,proxy1")
    # Clients go on through the other proxy, and through both when these are back.
    assert sent_during(history, one) > 0
    rows = history.operations
    assert any(
        op.f == F.SEND and op.outcome == Outcome.OK and op.call_ns > both.end_ns for op in rows
    )
    handed_out = [op for op in rows if op.f == F.RECEIVE and op.off != NOTHING]
    assert {op.group for op in handed_out} == {"receivers", "receivers-in-order"}
    assert any(op.f == F.ACK and op.outcome == Outcome.OK for op in rows)
    for name in ("proxy0", "proxy1"):
        log = (tmp_path / "run" / "nodes" / f"{name}.log").read_text()
        assert log.count('"proxy_started"') >= 2, log[-2_000:]
        assert "call_failed" not in log
