"""Faults of the real-process runner by a plan each: limits, torn logs, clients, proxies.

A failing run leaves its folder; ``dledger-chaos run --plan FOLDER/plan.json`` plays it again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dledger.jepsen_like.chaos import limits
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.history.operation import NOTHING, Event, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload, encode_plan

BUSY_MAX = 0.6
"""Of a processor; a loop that spins takes all of one."""

pytestmark = pytest.mark.slow

needs_limits = pytest.mark.skipif(limits.why_not() is not None, reason=str(limits.why_not()))

ROOT = Path(__file__).parents[2]

WORKLOAD = Workload(producers=4, consumers=2, readers=1, interval_ms=20, delayed_per_mille=0)
SETTINGS = Settings(
    heartbeat_ms=100,
    election_ms=800,
    segment_bytes=262_144,
    queue_units=30_000,
    checkpoint_ms=3_000,
    register_ms=5_000,
    delay_levels="1s 2s",
)
"""Segments are small, so that a broker needs a descriptor for the next one every few seconds."""


def play_plan(
    folder: Path,
    *steps: Step,
    seconds: int = 12,
    settings: Settings = SETTINGS,
    workload: Workload = WORKLOAD,
) -> Any:
    """Play *steps*, hold the run to be valid, and return the output and the history."""
    plan = folder / "plan.json"
    plan.write_text(
        encode_plan(Plan(7, seconds * 1000, steps, workload=workload, settings=settings))
    )
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "dledger.cli.main", "chaos", "run"),
            *("--plan", str(plan), "--store", str(folder), "--name", "run", "--output", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert (done.returncode, said["verdict"], said["lost"]) == (0, "valid", 0), said
    history, _ = read_run(folder / "run")
    return said, history


def events(history: Any, kind: Kind) -> list[Event]:
    """Return the faults of a kind."""
    return [event for event in history.events if event.kind == kind.value]


def sent_during(history: Any, event: Event) -> int:
    """Return how many sends were acknowledged that were called during a fault."""
    return sum(
        op.f == F.SEND and op.outcome == Outcome.OK and event.at_ns < op.call_ns < event.end_ns
        for op in history.operations
    )


@needs_limits
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
    assert sent_during(history, found[0]) > 0


@needs_limits
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
    assert sent_during(history, event) > 0


@needs_limits
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


@needs_limits
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


THROUGH_PROXIES = Workload(
    producers=4, consumers=0, readers=1, receivers=6, interval_ms=60, delayed_per_mille=0, proxies=2
)


@pytest.mark.hunt
def test_killed_proxies_lose_and_double_nothing(tmp_path: Path) -> None:
    said, history = play_plan(
        tmp_path,
        Step(1_500, Kind.PROXY_KILL, "0", 2_500),
        Step(5_000, Kind.PROXY_KILL, "all", 300),
        seconds=12,
        workload=THROUGH_PROXIES,
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
