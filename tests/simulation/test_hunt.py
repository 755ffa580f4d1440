"""``python -m tests.mutants hunt``: a planted bug is found blind, one that is not there is not."""

import json
import subprocess
import sys

import pytest

from tests.mutants.trees import ROOT

pytestmark = pytest.mark.slow


def mutants(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.mutants", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


@pytest.mark.hunt
def test_hunt_finds_a_planted_bug() -> None:
    done = mutants("hunt", "--only", "75", "--budget", "120", "--output", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["total"], found["found"], found["survived"]) == (1, 1, 0)
