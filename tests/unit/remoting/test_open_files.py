"""Connections never take the descriptors that files need."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from remoting.open_files import (
    MIN_LOG_DESCRIPTORS,
    OWN_DESCRIPTORS,
    DescriptorShares,
    share_descriptors,
)

RAISED = """
import resource
from remoting.open_files import raise_open_files
limit = raise_open_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(limit == soft == hard, soft)
"""


@pytest.mark.parametrize(
    ("wanted", "open_files", "shares"),
    [
        (4_096, None, DescriptorShares(4_096, 200, None)),
        (4_096, 20_000, DescriptorShares(4_096, 200, 400 + 3_000)),
        (4_096, 1_024, DescriptorShares(512, 128, 256 + 153)),
        (4_096, 100, DescriptorShares(28, 12, 24 + 16)),
        (4_096, 1, DescriptorShares(1, 4, 8 + 16)),
    ],
)
def test_connections_and_queue_files_share_the_descriptors(
    wanted: int, open_files: int | None, shares: DescriptorShares
) -> None:
    assert share_descriptors(wanted, 200, open_files) == shares


@pytest.mark.parametrize("open_files", [100, 128, 256, 1_024, 65_536])
def test_all_shares_together_fit_into_the_limit(open_files: int) -> None:
    shares = share_descriptors(1_000_000, 200, open_files)
    assert shares.file_descriptors is not None
    assert shares.connections + shares.file_descriptors + OWN_DESCRIPTORS <= open_files
    assert shares.file_descriptors >= 2 * shares.queue_files + MIN_LOG_DESCRIPTORS


def test_a_process_started_with_few_descriptors_takes_what_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(hard, 512)
    command = f"ulimit -Sn {few // 2} && ulimit -Hn {few} && exec {sys.executable} -c '{RAISED}'"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", str(few)]
