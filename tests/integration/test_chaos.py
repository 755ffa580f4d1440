"""`dledger-chaos` against real brokers: valid when promises are kept, invalid when they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jepsen_like.chaos import loop_disk

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

needs_disks = pytest.mark.skipif(loop_disk.why_not() is not None, reason=str(loop_disk.why_not()))


def chaos(store: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --output json; return its exit status and what it said."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "dledger.cli.main", "chaos", *arguments),
            *("--store", str(store), "--output", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        cwd=store.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_kept_promises_are_valid_and_the_folder_says_how_it_went(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    code, said = chaos(
        store, "run", "--faults", "process,proxy,names,clients", "--time", "20", "--interval", "2",
        "--seed", "3", "--rate", "600", "--name", "one",
    )  # fmt: skip
    assert (code, said["verdict"], said["lost"], said["duplicated"]) == (0, "valid", 0, 0), said
    assert said["acknowledged"] > 1_000
    assert said["faults"] >= 5
    assert said["fault_kinds"] >= 3
    folder = store / "one"
    page = (folder / "report.html").read_text()
    assert "nothing lost, nothing doubled" in page
    assert {path.name for path in (folder / "pictures").glob("*.png")} >= {
        "latency.png",
        "rate.png",
        "leader.png",
        "availability.png",
    }
    code, again = chaos(store, "check", "one")
    assert (code, again["verdict"]) == (0, "valid")
    assert again["acknowledged"] == said["acknowledged"]
    # What the runner's death leaves is judged as far as it goes, and never passes for all.
    (folder / "result.json").unlink()
    (folder / "history" / "replicas.cbor").unlink()
    rows = folder / "history" / "runner.cbor"
    rows.write_bytes(rows.read_bytes()[:-7])
    code, torn = chaos(store, "check", "one")
    assert (code, torn["verdict"]) == (2, "unknown")
    assert torn["torn_bytes"] > 0


@needs_disks
def test_power_cuts_of_all_brokers_lose_nothing(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "power_cut_all", "--time", "20", "--interval", "3",
        "--seed", "3", "--rate", "800", "--workload", "queue-log",
    )  # fmt: skip
    assert (code, said["verdict"], said["lost"]) == (0, "valid", 0), said
    assert said["faults_by_kind"]["power_cut_all"] >= 3
    assert said["acknowledged"] > 1_000


@needs_disks
def test_losses_of_an_asynchronous_flush_are_found(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "power_cut_all", "--time", "20", "--interval", "3",
        "--seed", "3", "--rate", "800", "--workload", "queue-log",
        "--set", "store.flush_disk_type=ASYNC_FLUSH",
    )  # fmt: skip
    assert (code, said["verdict"]) == (1, "invalid"), said
    assert said["lost"] > 0


def test_a_planted_bug_is_found_in_real_brokers(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "kill", "--time", "20", "--interval", "2",
        "--seed", "3", "--rate", "600", "--mutant", "87",
    )  # fmt: skip
    assert (code, said["verdict"]) == (1, "invalid"), said


def test_what_is_no_fault_or_workload_is_a_usage_error(tmp_path: Path) -> None:
    for arguments in (["--faults", "kil"], ["--workload", "mixd"]):
        done = subprocess.run(
            [sys.executable, "-m", "dledger.cli.main", "chaos", "run", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
