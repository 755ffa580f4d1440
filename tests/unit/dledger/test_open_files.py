"""Connections never take the descriptors that files need."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from dledger.cli.open_files import connections_allowed

RAISED = """
import resource
from dledger.cli.open_files import raise_open_files
limit = raise_open_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(limit == soft == hard, soft)
"""


@pytest.mark.parametrize(
    ("wanted", "open_files", "allowed"),
    [(4_096, None, 4_096), (4_096, 20_000, 4_096), (4_096, 1_024, 512), (4_096, 1, 1)],
)
def test_connections_get_half_of_the_descriptors_at_most(
    wanted: int, open_files: int | None, allowed: int
) -> None:
    assert connections_allowed(wanted, open_files) == allowed


def test_a_process_started_with_few_descriptors_takes_what_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(hard, 512)
    command = f"ulimit -Sn {few // 2} && ulimit -Hn {few} && exec {sys.executable} -c '{RAISED}'"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", str(few)]
