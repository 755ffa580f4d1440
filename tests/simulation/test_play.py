"""Plans played in a world: kept guarantees are valid, the same plan is the same run."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from dledger.cli.main import main
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import encode_history
from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, Workload, encode_plan
from dledger.jepsen_like.simulation.diagram import as_svg, as_text
from dledger.jepsen_like.simulation.play import Played, play
from tests.harness.extent import EXTENT

SHORT = Plan(
    seed=5,
    duration_ms=20_000,
    steps=(
        Step(6_000, Kind.KILL, "leader", 2_000),
        Step(9_000, Kind.POWER_CUT, "follower", 1_000),
        Step(12_000, Kind.ISOLATE, "leader", 4_000),
    ),
    workload=Workload(interval_ms=500, delayed_per_mille=300),
)


@pytest.fixture(scope="module")
def played() -> Played:
    return play(SHORT)


def test_a_plan_whose_guarantees_are_kept_is_valid(played: Played) -> None:
    assert played.violations == ()
    assert played.is_valid, played.verdict.reason
    assert {verdict.checker for verdict in played.verdicts} >= {
        *("queue_log", "delayed", "replicas", "total_queue")
    }
    assert played.operations["send_ok"] > 20
    assert played.faults["kill"] == played.faults["power_cut"] == played.faults["isolate"] == 1
    assert played.sometimes["leader_change"] >= 1
    assert len({read.node for read in played.history.replica_reads}) == 3


@pytest.mark.slow
def test_a_fault_that_the_end_cuts_short_was_done_until_then() -> None:
    played = play(SHORT.with_steps((Step(15_000, Kind.ISOLATE, "follower", 60_000),)))
    assert played.faults["isolate"] == 1
    (event,) = [event for event in played.history.events if event.kind == Kind.ISOLATE]
    lasted_ms = (event.end_ns - event.at_ns) / 1e6
    assert 4_900 <= lasted_ms <= 5_100


@pytest.mark.slow
def test_a_step_of_real_brokers_is_skipped_with_the_reason() -> None:
    played = play(SHORT.with_steps((Step(6_000, Kind.VERSION_SKEW, "leader", 3_000),)))
    assert played.is_valid, played.verdict.reason
    assert (played.faults["skipped"], played.faults["version_skew"]) == (1, 0)
    details = [e.detail for e in played.history.events if e.kind == Kind.VERSION_SKEW]
    assert details == ["skipped: all simulated brokers are one program, of one version"]
    assert played.faults["restarted_by_supervisor"] == 0, "it was stopped all the same"


@pytest.mark.slow
def test_the_same_plan_is_the_same_run_byte_for_byte(played: Played) -> None:
    again = play(SHORT)
    assert again.digest == played.digest
    assert encode_history(again.history) == encode_history(played.history)
    assert play(replace(SHORT, seed=SHORT.seed + 1)).digest != played.digest


@pytest.mark.slow
def test_a_plan_without_later_steps_is_the_same_before_them(played: Played) -> None:
    """Else a failing plan without them would be another run, and could not be made small."""
    fewer = play(SHORT.with_steps(SHORT.steps[:1]))
    before_ns = SHORT.steps[1].at_ms * 1_000_000

    def rows(one: Played) -> list[tuple[int, int, int]]:
        return [
            (op.op_id, op.call_ns, op.ret_ns)
            for op in one.history.operations
            if op.ret_ns < before_ns
        ]

    assert len(rows(played)) > 10
    assert rows(fewer) == rows(played)
    assert fewer.faults["power_cut"] == fewer.faults["isolate"] == 0


def test_a_diagram_shows_the_witnesses_and_the_faults(played: Played) -> None:
    sends = [op for op in played.history.operations if op.f == 0 and op.outcome == 0]
    witness = next(op for op in sends if op.call_ns > 7e9)
    violation = Violation("planted", "orders/0", "for the picture", (witness.op_id,), "test")
    text = as_text(played, violation)
    assert f"{witness.op_id}> p" in text
    assert any(line[11] == "*" for line in text.splitlines()[2:])
    assert "# kill leader" in text
    assert as_svg(text).startswith("<svg ")


@pytest.mark.slow
def test_the_command_plays_a_file_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(encode_plan(SHORT))
    assert main(["sim", "run", "--plan", str(file), "--output", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["violations"] == []
    assert printed["seeds"] == 1
    assert printed["simulated_s"] > 20
    assert {"simulated_s_per_cpu_s", "sometimes"} <= printed.keys()


def test_what_is_no_plan_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert main(["sim", "replay", str(tmp_path / "bad.json")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["sim", "run"]) == 2


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.parametrize("seed", range(1, 1 + 2 * EXTENT))
def test_drawn_plans_break_nothing(seed: int) -> None:
    result = play(draw_plan(seed, 300))
    assert result.violations == ()
