"""Ports for child processes: no two processes choose the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dledger.cli.ports import free_ports

CHOOSER = """\
import json, sys
from dledger.cli.ports import free_ports
print(json.dumps(free_ports(200)), flush=True)
sys.stdin.read()
"""


def test_free_ports_are_distinct_and_never_two_apart() -> None:
    ports = [*free_ports(20), *free_ports(150)]
    assert len(set(ports)) == len(ports)
    assert not {port - 2 for port in ports} & set(ports)


@pytest.mark.skipif(sys.platform != "linux", reason="claims are Linux' abstract names")
def test_processes_that_run_at_once_choose_different_ports() -> None:
    command = [sys.executable, "-c", CHOOSER]
    choosers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    chosen: list[int] = free_ports(200)
    for chooser in choosers:
        assert chooser.stdout is not None
        chosen += json.loads(chooser.stdout.readline())
    for chooser in choosers:
        chooser.communicate()
    assert len(set(chosen)) == 1_000
