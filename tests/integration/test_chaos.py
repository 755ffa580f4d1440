"""`dledger-chaos` against real brokers: valid when guarantees are kept, else invalid.

Faults of the real-process runner by a plan each: limits, torn logs, clients, proxies.
"""

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

from dledger.jepsen_like.chaos import limits, loop_disk
from dledger.jepsen_like.chaos.recorder import read_run
from dledger.jepsen_like.history.operation import NOTHING, Event, F, Outcome
from dledger.jepsen_like.history.parquet import read_summary
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload, encode_plan
from tests.harness.generated import read_tables
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
    assert read_tables(folder / "parquet").operations == read_run(folder)[0].operations
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


BUSY_MAX = 0.6
"""Of a processor; a loop that spins takes all of one."""


needs_limits = pytest.mark.skipif(limits.why_not() is not None, reason=str(limits.why_not()))


WORKLOAD = Workload(producers=4, consumers=2, readers=1, interval_ms=20, delayed_per_mille=0)
SETTINGS = Settings(
    heartbeat_ms=100,
    election_ms=800,
    segment_bytes=262_144,
    queue_units=30_000,
    checkpoint_ms=3_000,
    register_ms=5_000,
    delay_levels="1s 2s",
)
"""Segments are small, so that a broker needs a descriptor for the next one every few seconds."""


def play_plan(
    folder: Path,
    *steps: Step,
    seconds: int = 12,
    settings: Settings = SETTINGS,
    workload: Workload = WORKLOAD,
) -> Any:
    """Play *steps*, hold the run to be valid, and return the output and the history."""
    plan = folder / "plan.json"
    plan.write_text(
        encode_plan(Plan(7, seconds * 1000, steps, workload=workload, settings=settings))
    )
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "dledger.cli.main", "chaos", "run"),
            *("--plan", str(plan), "--store", str(folder), "--name", "run", "--output", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert (done.returncode, said["verdict"], said["lost"]) == (0, "valid", 0), said
    history, _ = read_run(folder / "run")
    return said, history


def events(history: Any, kind: Kind) -> list[Event]:
    """Return the faults of a kind."""
    return [event for event in history.events if event.kind == kind.value]


def sent_during(history: Any, event: Event) -> int:
    """Return how many sends were acknowledged that were called during a fault."""
    return sum(
        op.f == F.SEND and op.outcome == Outcome.OK and event.at_ns < op.call_ns < event.end_ns
        for op in history.operations
    )


@needs_limits
def test_broker_without_descriptors_never_spins(tmp_path: Path) -> None:
    _, history = play_plan(
        tmp_path,
        Step(2_000, Kind.FD_LIMIT, "leader", 5_000, 8),
        Step(2_000, Kind.FD_LIMIT, "follower", 5_000, 0),
    )
    found = events(history, Kind.FD_LIMIT)
    assert len(found) == 2
    for event in found:
        went_on = re.fullmatch(r"at most \d+ descriptors: it went on, (\d+)% of .*", event.detail)
        assert went_on or event.detail.endswith("descriptors: it stopped"), event.detail
        assert went_on is None or int(went_on[1]) < 100 * BUSY_MAX, event.detail
    assert sent_during(history, found[0]) > 0


@needs_limits
@pytest.mark.hunt
def test_leader_serves_beside_ten_thousand_idle_connections(tmp_path: Path) -> None:
    _, history = play_plan(tmp_path, Step(2_000, Kind.CONNECTIONS, "leader", 5_000), seconds=24)
    (event,) = events(history, Kind.CONNECTIONS)
    reported = re.fullmatch(
        r"(\d+) of (\d+) connections.*, (\d+) closed by the broker", event.detail
    )
    assert reported, event.detail
    opened, _, closed = map(int, reported.groups())
    assert opened >= 1_000, event.detail
    # None of them has to be left: a silent one gives way to each client that connects again.
    assert opened - closed <= 4_096, "max_connections"
    assert sent_during(history, event) > 0


@needs_limits
@pytest.mark.hunt
def test_a_torn_tail_is_cut_and_refilled(tmp_path: Path) -> None:
    late_mark = Settings(
        heartbeat_ms=100,
        election_ms=800,
        segment_bytes=16 << 20,
        queue_units=30_000,
        checkpoint_ms=30_000,
        register_ms=5_000,
        delay_levels="1s 2s",
    )
    _, history = play_plan(
        tmp_path,
        Step(3_000, Kind.TORN_TAIL, "follower", 500, 4_000),
        Step(9_000, Kind.TORN_TAIL, "leader", 500, 4_000),
        seconds=16,
        settings=late_mark,
    )
    done = [e for e in events(history, Kind.TORN_TAIL) if not e.detail.startswith("skipped")]
    assert done, events(history, Kind.TORN_TAIL)
    for event in done:
        assert "bytes at" in event.detail
        log = (tmp_path / "run" / "nodes" / f"{event.node}.log").read_text()
        assert re.search(r'"bytes": [1-9]\d*.*"event": "torn_tail_cut"', log), log[-2_000:]


@needs_limits
@pytest.mark.hunt
def test_doubled_and_killed_clients_keep_a_run_valid(tmp_path: Path) -> None:
    _, history = play_plan(
        tmp_path,
        Step(2_000, Kind.ZOMBIE_CLIENT, "all", 4_000),
        Step(4_500, Kind.KILL, "leader", 500),
        Step(7_000, Kind.MID_SEND_KILL, "all", 300),
        Step(9_000, Kind.MID_BATCH_KILL, "all", 300),
    )
    (zombie,) = events(history, Kind.ZOMBIE_CLIENT)
    assert int(zombie.detail.split()[0]) > 0, zombie.detail
    (mid_send,) = events(history, Kind.MID_SEND_KILL)
    assert any(
        op.f == F.SEND and op.outcome == Outcome.INFO and op.call_ns < mid_send.end_ns
        for op in history.operations
    )
    (mid_batch,) = events(history, Kind.MID_BATCH_KILL)
    assert not mid_batch.detail


THROUGH_PROXIES = Workload(
    producers=4, consumers=0, readers=1, receivers=6, interval_ms=60, delayed_per_mille=0, proxies=2
)


@pytest.mark.hunt
def test_killed_proxies_lose_and_double_nothing(tmp_path: Path) -> None:
    said, history = play_plan(
        tmp_path,
        Step(1_500, Kind.PROXY_KILL, "0", 2_500),
        Step(5_000, Kind.PROXY_KILL, "all", 300),
        seconds=12,
        workload=THROUGH_PROXIES,
    )
    assert said["faults_by_kind"]["proxy_kill"] == 2
    one, both = events(history, Kind.PROXY_KILL)
    assert (one.node, both.node) == ("proxy0", "proxy0,proxy1")
    # Clients go on through the other proxy, and through both when these are back.
    assert sent_during(history, one) > 0
    rows = history.operations
    assert any(
        op.f == F.SEND and op.outcome == Outcome.OK and op.call_ns > both.end_ns for op in rows
    )
    handed_out = [op for op in rows if op.f == F.RECEIVE and op.off != NOTHING]
    assert {op.group for op in handed_out} == {"receivers", "receivers-in-order"}
    assert any(op.f == F.ACK and op.outcome == Outcome.OK for op in rows)
    for name in ("proxy0", "proxy1"):
        log = (tmp_path / "run" / "nodes" / f"{name}.log").read_text()
        assert log.count('"proxy_started"') >= 2, log[-2_000:]
        assert "call_failed" not in log
