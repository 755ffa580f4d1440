"""A broker of a later release in a group: refused with one line, missed by no member, taken back.

Real processes. Replay: ``dledger-chaos run --plan FILE`` with the plan below.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from dledger.jepsen_like.chaos.plan_draw import SETTINGS
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.chaos.runner import run_plan
from dledger.jepsen_like.plans.plan import Kind, Plan, Step
from dledger.jepsen_like.workloads.presets import workload_for
from dledger.raft.wire import PROTOCOL_VERSION
from tests.harness.fast_part import gate_part

pytestmark = pytest.mark.slow

AT_MS, FOR_MS = 2_000, 12_000
"""Three interpreters start slowly on a busy machine: the newer broker has to be up well before."""
NOTICED_NS = 2_500_000_000
"""So long after it stopped another one leads, if it led."""


def plan(target: str, *more: Step, for_ms: int = FOR_MS, duration_ms: int = 0) -> Plan:
    return Plan(
        seed=4,
        duration_ms=duration_ms or AT_MS + for_ms + 5_000,
        steps=(Step(AT_MS, Kind.VERSION_SKEW, target, for_ms), *more),
        name_servers=1,
        workload=workload_for("mixed", 400.0),
        settings=msgspec.structs.replace(SETTINGS, delay_levels="1s 2s"),
    )


def events_of(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return [said for said in map(json.loads, lines) if said["event"] == event]


@pytest.mark.parametrize("target", gate_part(["leader", "follower"], 1))
def test_newer_broker_is_refused_and_comes_back(tmp_path: Path, target: str) -> None:
    ran = trio.run(run_plan, plan(target), tmp_path)
    verdicts = {verdict.checker: verdict.validity for verdict in ran.verdicts}
    assert "invalid" not in verdicts.values(), ran.verdicts
    assert ran.settled, "it never came back"
    assert ran.faults["version_skew"] == 1
    history, _ = read_run(tmp_path)
    (skew,) = [event for event in history.events if event.kind == Kind.VERSION_SKEW]
    newer = skew.node
    others = {f"n{number}" for number in range(3)} - {newer}
    reason = f"{newer} speaks version {PROTOCOL_VERSION + 1}, known here is {PROTOCOL_VERSION}"
    for name in others:
        refused = events_of(tmp_path / "nodes" / f"{name}.log", "peer_refused")
        assert Counter(line["error"] for line in refused)[reason] == 1, refused
    # The others carried on without it …
    alone_ns = (skew.at_ns + NOTICED_NS, skew.end_ns)
    stored = [
        op
        for op in history.operations
        if op.f == 0 and op.outcome == 0 and alone_ns[0] < op.call_ns < alone_ns[1]
    ]
    assert stored
    # … no member voted for it, and it holds what it missed when all is over.
    leading = [
        event.node
        for event in history.events
        if event.kind == "role" and event.detail.startswith("leader")
        if alone_ns[0] < event.at_ns < alone_ns[1]
    ]
    assert newer not in leading
    assert {read.node for read in ran.history.replica_reads} == others | {newer}


@pytest.mark.hunt
def test_killed_newer_broker_comes_back(tmp_path: Path) -> None:
    for stretch in (1, 2, 4):  # it has to be up when it is killed
        for_ms = stretch * FOR_MS
        kill = Step(AT_MS + for_ms - 2_000, Kind.KILL, "1", 500)
        folder = tmp_path / str(stretch)
        ran = trio.run(run_plan, plan("1", kill, for_ms=for_ms), folder)
        verdicts = [verdict for verdict in ran.verdicts if verdict.validity == "invalid"]
        assert not verdicts, ran.verdicts
        assert ran.settled
        if len(starts := events_of(folder / "nodes" / "n1.log", "settings")) >= 3:
            break
    assert len(starts) == 3, "it was started as itself while it was to be newer"


def test_a_run_that_ends_meanwhile_heals_it(tmp_path: Path) -> None:
    endless = Step(AT_MS, Kind.VERSION_SKEW, "1", 600_000)
    ends_soon = plan("1", duration_ms=AT_MS + 8_000).with_steps((endless,))
    ran = trio.run(run_plan, ends_soon, tmp_path)
    assert not [verdict for verdict in ran.verdicts if verdict.validity == "invalid"], ran.verdicts
    assert ran.settled
