"""Scenarios: commands with everything they print, read and found right, then compared.

``pytest tests/unit/test_scenarios.py --rewrite-scenarios`` writes down what they print now; read
the difference line by line before it is committed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.scenario import Scenario, replay
from tests.harness.scenario_cluster import ScenarioError

SCENARIOS = Path(__file__).parents[1] / "scenarios"
FILES = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_scenario_prints_what_was_reviewed(path: Path, pytestconfig: pytest.Config) -> None:
    reviewed = path.read_text()
    now = replay(reviewed)
    if pytestconfig.getoption("rewrite_scenarios", default=False):
        path.write_text(now)
        return
    assert now.splitlines() == reviewed.splitlines()


def test_scenario_begins_with_its_subject_and_ends_with_state() -> None:
    assert len(FILES) >= 8
    for path in FILES:
        lines = path.read_text().splitlines()
        commands = [line for line in lines if line and not line.startswith(("#", " "))]
        assert lines[0].startswith("# "), path.name
        assert commands[-1] == "status", path.name


def test_every_command_is_described_and_used() -> None:
    commands = Scenario.commands()
    used = {
        word
        for path in FILES
        for line in path.read_text().splitlines()
        if line and not line.startswith(("#", " "))
        for word in line.removeprefix("quietly ").split()[:1]
    }
    assert used == commands.keys()
    for name, described in commands.items():
        assert described.startswith(f"``{name}"), name


def test_a_difference_shows() -> None:
    text = "members 1\nelect n0\nstatus\n  n0 follower\n"
    assert "  n0 follower" not in replay(text).splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step\n", "line 1, `step`: a scenario begins"),
        ("members 1\ndance n0\n", "line 2, `dance n0`: no command 'dance'"),
        ("members 3\ndeliver n0 n1\n", "no letter n0 > n1"),
    ],
)
def test_a_wrong_command_names_its_line(text: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        replay(text)
