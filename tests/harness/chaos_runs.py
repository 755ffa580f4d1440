"""Plans that the runner plays against real processes, and what their histories hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.history.operation import Event, F, Outcome
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload, encode_plan

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
