"""Which candidate is kept, and what of the others is left."""

from pathlib import Path

import pytest

from dledger.jepsen_like.chaos.plan_draw import Candidates, step_text
from dledger.jepsen_like.chaos.run_command import Extras, show_smallest
from dledger.jepsen_like.chaos.runner import Ran
from dledger.jepsen_like.checkers.verdict import Verdict, Violation
from dledger.jepsen_like.plans.plan import Kind, Plan, Step, decode_plan
from dledger.jepsen_like.plans.shrink import shrink
from dledger.output import CliError

STEPS = tuple(Step(at * 1000, Kind.KILL, "leader", 500 * at) for at in range(8))
WHOLE = Plan(7, 60_000, STEPS)
CULPRIT = STEPS[5]
EXTRAS = Extras(("store.flush_disk_type=ASYNC_FLUSH",), "t")


def lost(checker: str = "total_queue") -> Verdict:
    violation = Violation("acknowledged message lost", "orders/0", "…", checker=checker)
    return Verdict(checker, "invalid", (violation,))


class Play:
    """Breaks the guarantee whenever the culprit is in the plan; another one always."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan, place: Path) -> Ran:
        assert decode_plan((place / "plan.json").read_text()) == plan
        (place / "nodes").mkdir()
        self.plans.append(plan)
        if len(self.plans) == 2:
            raise CliError("a broker did not start")
        found = [lost("replicas")]
        if any(step.at_ms == CULPRIT.at_ms for step in plan.steps):
            found.append(lost())
        return Ran(plan, place, found)


def searched(folder: Path, plays: int) -> tuple[Candidates, list[str]]:
    said: list[str] = []
    wanted = ("total_queue", "acknowledged message lost")
    candidates = Candidates(folder, wanted, Play(), said.append)
    shrink(WHOLE, candidates.fails, plays_max=plays)
    return candidates, said


def test_smallest_plan_with_the_violation_is_kept(tmp_path: Path) -> None:
    candidates, said = searched(tmp_path, 40)
    assert candidates.smallest is not None
    assert [step.at_ms for step in candidates.smallest.steps] == [CULPRIT.at_ms]
    assert candidates.ran is not None
    # The one that came to no verdict stays too: a person wants to know why.
    left = sorted((tmp_path / "minimize").iterdir())
    assert left == [tmp_path / "minimize" / "1", candidates.ran.folder]
    assert decode_plan((candidates.ran.folder / "plan.json").read_text()) == candidates.smallest
    assert said[0] == "run 1: 0 faults in 60 s: does not break it"
    assert said[1] == "run 2: a broker did not start"
    assert len(said) == candidates.tried
    # A second search begins beside what the first has left.
    again, _ = searched(tmp_path, 40)
    assert again.ran is not None
    assert again.ran.folder != candidates.ran.folder


def test_result_names_the_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidates, _ = searched(tmp_path, 40)
    assert show_smallest(WHOLE, candidates, EXTRAS, tmp_path / "report.html") == 0
    reported = capsys.readouterr()
    path = tmp_path / "minimized.json"
    assert decode_plan(path.read_text()) == candidates.smallest
    assert (
        f"8 faults in 60 s became 1 in {candidates.smallest.duration_ms // 1000} s" in reported.err
    )
    assert f"see what it broke: {tmp_path / 'report.html'}" in reported.err
    command = (
        f"dledger-chaos run --plan {path} --set store.flush_disk_type=ASYNC_FLUSH --broker-tree t"
    )
    assert f"play it again: {command}\n" in reported.err
    assert f"dledger sim run --plan {path}" in reported.err
    assert "5.0 s" in reported.out


def test_no_smaller_plan_is_reported_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates, _ = searched(tmp_path, 1)
    assert show_smallest(WHOLE, candidates, EXTRAS, None) == 1
    reported = capsys.readouterr().err
    assert "no smaller plan broke it again in 1 run." in reported
    assert "--plays" in reported
    assert f"dledger-chaos run --plan {tmp_path / 'plan.json'} --set" in reported
    assert not (tmp_path / "minimized.json").exists()


def test_a_step_as_a_person_reads_it() -> None:
    assert step_text(Step(1500, Kind.ISOLATE, "leader", 2500, 1)) == [
        *("1.5 s", "isolate", "leader", "2.5 s")
    ]
    assert step_text(Step(0, Kind.RESET, "all", 0)) == ["0.0 s", "reset", "all", ""]
