"""Faults of the real-process runner that come about by a plan each: limits, torn logs, clients.

A failing run leaves its folder; ``dledger-chaos run --plan FOLDER/plan.json`` plays it again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dledger.jepsen_like.chaos import limits
from dledger.jepsen_like.history.operation import F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Settings, Step
from tests.harness.chaos_runs import events, play_plan, sent_during

BUSY_MAX = 0.6
"""Of a processor; a loop that spins takes all of one."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(limits.why_not() is not None, reason=str(limits.why_not())),
]


def test_broker_without_descriptors_never_spins(tmp_path: Path) -> None:
    _, history = play_plan(
        tmp_path,
        Step(2_000, Kind.FD_LIMIT, "leader", 5_000, 8),
        Step(2_000, Kind.FD_LIMIT, "follower", 5_000, 0),
    )
    found = events(history, Kind.FD_LIMIT)
    assert len(found) == 2
    for event in found:
        went_on = re.fullmatch(r"at most \d+ descriptors: it went on, (\d+)% of .*", event.detail)
        assert went_on or event.detail.endswith("descriptors: it stopped"), event.detail
        assert went_on is None or int(went_on[1]) < 100 * BUSY_MAX, event.detail
    assert sent_during(history, found[0]) > 50


@pytest.mark.hunt
def test_leader_serves_beside_ten_thousand_idle_connections(tmp_path: Path) -> None:
    _, history = play_plan(tmp_path, Step(2_000, Kind.CONNECTIONS, "leader", 5_000), seconds=24)
    (event,) = events(history, Kind.CONNECTIONS)
    reported = re.fullmatch(
        r"(\d+) of (\d+) connections.*, (\d+) closed by the broker", event.detail
    )
    assert reported, event.detail
    opened, _, closed = map(int, reported.groups())
    assert opened >= 1_000, event.detail
    # None of them has to be left: a silent one gives way to each client that connects again.
    assert opened - closed <= 4_096, "max_connections"
    assert sent_during(history, event) > 100


@pytest.mark.hunt
def test_a_torn_tail_is_cut_and_refilled(tmp_path: Path) -> None:
    late_mark = Settings(
        heartbeat_ms=100,
        election_ms=800,
        segment_bytes=16 << 20,
        queue_units=30_000,
        checkpoint_ms=30_000,
        register_ms=5_000,
        delay_levels="1s 2s",
    )
    _, history = play_plan(
        tmp_path,
        Step(3_000, Kind.TORN_TAIL, "follower", 500, 4_000),
        Step(9_000, Kind.TORN_TAIL, "leader", 500, 4_000),
        seconds=16,
        settings=late_mark,
    )
    done = [e for e in events(history, Kind.TORN_TAIL) if not e.detail.startswith("skipped")]
    assert done, events(history, Kind.TORN_TAIL)
    for event in done:
        assert "bytes at" in event.detail
        log = (tmp_path / "run" / "nodes" / f"{event.node}.log").read_text()
        assert re.search(r'"bytes": [1-9]\d*.*"event": "torn_tail_cut"', log), log[-2_000:]


@pytest.mark.hunt
def test_doubled_and_killed_clients_keep_a_run_valid(tmp_path: Path) -> None:
    _, history = play_plan(
        tmp_path,
        Step(2_000, Kind.ZOMBIE_CLIENT, "all", 4_000),
        Step(4_500, Kind.KILL, "leader", 500),
        Step(7_000, Kind.MID_SEND_KILL, "all", 300),
        Step(9_000, Kind.MID_BATCH_KILL, "all", 300),
    )
    (zombie,) = events(history, Kind.ZOMBIE_CLIENT)
    assert int(zombie.detail.split()[0]) > 0, zombie.detail
    (mid_send,) = events(history, Kind.MID_SEND_KILL)
    assert any(
        op.f == F.SEND and op.outcome == Outcome.INFO and op.call_ns < mid_send.end_ns
        for op in history.operations
    )
    (mid_batch,) = events(history, Kind.MID_BATCH_KILL)
    assert not mid_batch.detail
