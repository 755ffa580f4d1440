"""`dledger-chaos` against real brokers: valid when guarantees are kept, else invalid."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from dledger.jepsen_like.chaos import loop_disk
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.history.parquet import read_history, read_summary
from tests.mutants.trees import plant_tree

SHOWN = {
    *("verdict", "acknowledged", "lost", "duplicated", "faults", "fault_kinds"),
    *("failover_p99_ms", "report"),
}
"""What programs may rely on."""

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

needs_disks = pytest.mark.skipif(loop_disk.why_not() is not None, reason=str(loop_disk.why_not()))


PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def environment(path: str = PATH) -> dict[str, str]:
    """Return what commands find around them: programs in *path* only."""
    return {"PYTHONPATH": str(ROOT), "PATH": path}


def command_of(store: Path, *arguments: str) -> list[str]:
    """Return the command line of ``dledger chaos``."""
    python = (sys.executable, "-W", "ignore", "-m", "dledger.cli.main")
    return [*python, "chaos", *arguments, "--store", str(store)]


def dledger_chaos(
    store: Path, *arguments: str, path: str = PATH
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command_of(store, *arguments),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        cwd=store.parent,
        env=environment(path),
    )


def chaos(store: Path, *arguments: str, path: str = PATH) -> tuple[int, dict[str, Any]]:
    """Run a command with --output json; return its exit status and its output."""
    done = dledger_chaos(store, *arguments, "--output", "json", path=path)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.hunt
def test_chaos_run_is_valid_and_its_folder_is_complete(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    code, said = chaos(
        store, "run", "--faults", "process,proxy,names,clients", "--time", "20", "--interval", "2",
        "--seed", "3", "--rate", "600", "--name", "one",
    )  # fmt: skip
    assert (code, said["verdict"], said["lost"], said["duplicated"]) == (0, "valid", 0, 0), said
    assert said.keys() >= SHOWN
    assert said["report"] == str(store / "one" / "report.html")
    assert said["acknowledged"] > 0
    assert said["faults"] >= 5
    assert said["fault_kinds"] >= 3
    folder = store / "one"
    page = (folder / "report.html").read_text()
    assert "nothing lost, nothing doubled" in page
    assert {path.name for path in (folder / "pictures").glob("*.png")} >= {
        *("latency.png", "rate.png", "leader.png", "availability.png")
    }
    code, again = chaos(store, "check", "one")
    assert (code, again["verdict"]) == (0, "valid")
    assert again["acknowledged"] == said["acknowledged"]
    assert read_summary(folder / "parquet").bad == 0
    assert read_history(folder / "parquet").operations == read_run(folder)[0].operations
    # What the runner's death leaves is judged as far as it goes, and never passes for all.
    (folder / "result.json").unlink()
    (folder / "history" / "replicas.cbor").unlink()
    rows = folder / "history" / "runner.cbor"
    rows.write_bytes(rows.read_bytes()[:-7])
    code, torn = chaos(store, "check", "one")
    assert (code, torn["verdict"]) == (2, "unknown")
    assert torn["torn_bytes"] > 0


@needs_disks
@pytest.mark.hunt
def test_power_cuts_of_all_brokers_lose_nothing(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "power_cut_all", "--time", "20", "--interval", "3",
        "--seed", "3", "--rate", "800", "--workload", "queue-log",
    )  # fmt: skip
    assert (code, said["verdict"], said["lost"]) == (0, "valid", 0), said
    assert said["faults_by_kind"]["power_cut_all"] >= 3
    assert said["acknowledged"] > 0


@needs_disks
@pytest.mark.hunt
def test_losses_of_an_asynchronous_flush_are_found(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "power_cut_all", "--time", "20", "--interval", "3",
        "--seed", "3", "--rate", "800", "--workload", "queue-log",
        "--set", "store.flush_disk_type=ASYNC_FLUSH", "--set", "store.flush_interval_ms=2000",
    )  # fmt: skip
    assert (code, said["verdict"]) == (1, "invalid"), said
    assert said["lost"] > 0


@pytest.mark.planted
@pytest.mark.hunt
def test_chaos_finds_and_minimizes_a_planted_bug(tmp_path: Path) -> None:
    store, tree = tmp_path / "runs", plant_tree(87, tmp_path / "tree")
    code, said = chaos(
        store, "run", "--faults", "kill", "--time", "20", "--interval", "2",
        "--seed", "3", "--rate", "600", "--broker-tree", str(tree), "--name", "bad",
    )  # fmt: skip
    assert (code, said["verdict"]) == (1, "invalid"), said
    done = dledger_chaos(store, "minimize", "bad", "--plays", "3")
    reported = done.stderr.splitlines()
    assert done.returncode in (0, 1), done.stderr
    faults = len(json.loads((store / "bad" / "plan.json").read_text())["steps"])
    assert reported[0].startswith(f"looking for less than {faults} faults in 20 s that shows ")
    assert sum(line.startswith("run ") for line in reported) == 3
    if done.returncode == 1:  # real time was too short: it reports that, and what to do
        plan = store / "bad" / "plan.json"
        assert f"dledger-chaos run --plan {plan} --broker-tree {tree}" in reported
        return
    small = store / "bad" / "minimized.json"
    assert len(json.loads(small.read_text())["steps"]) < faults
    assert f"play it again: dledger-chaos run --plan {small} --broker-tree {tree}" in reported
    (page,) = [line for line in reported if line.startswith("see what it broke: ")]
    assert "invalid" in Path(page.removeprefix("see what it broke: ")).read_text()


def test_chaos_shows_live_counters_and_the_result(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = command_of(
        tmp_path / "runs", "run", "--faults", "kill", "--time", "5", "--interval", "2",
        "--seed", "3", "--rate", "300", "--name", "seen", "--workload", "queue-log",
    )  # fmt: skip
    with subprocess.Popen(
        command, stdout=slave, stderr=slave, cwd=tmp_path, env=environment()
    ) as run:
        os.close(slave)
        text = b"".join(iter(lambda: read_terminal(master), b"")).decode()
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert run.returncode == 0, text
    shown = re.findall(r"\d+ s, ([a-z ]+): ([\d,]+) ok, \d+ unknown, \d+ failed, \d+ faults", text)
    counts = [int(ok.replace(",", "")) for _, ok in shown]
    assert len(set(counts)) >= 4, text
    assert counts == sorted(counts)
    assert {"starting", "load and faults", "settling"} <= {phase for phase, _ in shown}
    below = text[text.rindex(" skipped") :]
    assert re.search(r"verdict +│ valid", below), below
    assert re.search(r"lost +│ 0 ", below)
    assert "report.html" in below


def read_terminal(master: int) -> bytes:
    """Return what was written next; nothing when the other side is closed."""
    try:
        return os.read(master, 1 << 16)
    except OSError:
        return b""


def test_what_does_not_start_is_not_known_and_nothing_worse(tmp_path: Path) -> None:
    done = dledger_chaos(tmp_path / "runs", "run", "--time", "5", "--set", "store.nonsense=3")
    assert done.returncode == 2
    assert "the run came to no verdict: " in done.stderr
    assert "unknown setting store.nonsense" in done.stderr


def test_chaos_skips_impossible_cuts_with_the_reason(tmp_path: Path) -> None:
    code, said = chaos(
        tmp_path / "runs", "run", "--faults", "network", "--time", "8", "--interval", "1",
        "--seed", "3", "--rate", "300", "--workload", "queue-log", path=str(tmp_path),
    )  # fmt: skip
    assert (code, said["verdict"], said["faults"]) == (0, "valid", 0), said
    reasons = {row["reason"] for row in said["skipped"]}
    assert len(reasons) == 1
    assert reasons <= {
        "ip is not installed; the package iproute2 has it",
        "only root may make network namespaces",
        "network namespaces need Linux",
    }
    assert "link_cut" not in said["sometimes"]


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
