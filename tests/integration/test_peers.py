"""The measurement beside the rivals, with real programs: ours, and some that fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from dledger.output import CliError
from tests.peers.loads import Lines
from tests.peers.plan import plan
from tests.peers.processes import Program, run_program
from tests.peers.rounds import Settings, play
from tests.peers.tools import Tools

LIMIT_S = 60.0


def settings(tmp_path: Path, deadline_s: float = float("inf")) -> Settings:
    return Settings(
        seconds=0.5,
        warm_s=0.2,
        brokers_warm_s=0.2,
        kills=1,
        backlog=2_000,
        folder=tmp_path,
        deadline_s=deadline_s,
    )


async def test_program_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('why', file=sys.stderr); sys.exit(3)"
    with pytest.raises(CliError, match="it ended with status 3: why"):
        await run_program("it", [sys.executable, "-c", script], tmp_path / "log", LIMIT_S)


async def test_program_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        CliError, match="it ended with status 1: /nonexistent/program: No such file"
    ):
        await run_program("it", ["/nonexistent/program"], tmp_path / "log", LIMIT_S)


async def test_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(99)"
    with pytest.raises(CliError, match="it did not end within 3 s") as error:
        await run_program("it", [sys.executable, "-c", script], tmp_path / "log", 3.0)
    pid = int(str(error.value).rpartition(" ")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("status", [0, 143])
async def test_program_that_was_stopped_did_not_fail(tmp_path: Path, status: int) -> None:
    # A JVM ends with status 143 on SIGTERM.
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit("
        f"{status})); print('ack 1 2', flush=True); print('ack 3', end='', flush=True);"
        " time.sleep(99)"
    )
    program = Program("it", [sys.executable, "-c", script], tmp_path / "log")
    program.start(piped=True)
    lines = Lines()
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(program.read_lines, lines)
            while not lines.acks_beyond(0):
                await trio.sleep(0.01)
            await program.stop()
    assert (lines.acks, program.running) == (1, False)


async def test_rows_without_their_tools_state_the_reason(tmp_path: Path) -> None:
    tools = Tools(tmp_path, {"go": "Go is missing.", "java": "Java is missing."})
    steps = plan(1, ("nats", "rocketmq/64"))
    measured = await play(steps, tools, settings(tmp_path), lambda _: None)
    assert [(one.contender, one.error) for one in measured] == [
        *[("nats", "Go is missing.")] * 5,
        ("rocketmq", "Java is missing."),
    ]


async def test_brokers_that_do_not_start_are_rows_with_a_reason(tmp_path: Path) -> None:
    tools = Tools(tmp_path / "tools")
    notes: list[str] = []
    with trio.fail_after(LIMIT_S):
        measured = await play(plan(1, ("nats/1",)), tools, settings(tmp_path), notes.append)
    (one,) = measured
    assert "nats-server n" in one.error
    assert "ended" in one.error
    assert one.error in notes[-1]
    assert list(tmp_path.glob("peers-*")) == []


@pytest.mark.slow
async def test_ours_is_measured_with_every_kind_of_load(tmp_path: Path) -> None:
    steps = plan(1, ("ours/batches", "ours/drain", "ours/kill"))
    measured = await play(steps, Tools(tmp_path), settings(tmp_path), lambda _: None)
    assert [(one.case, one.error) for one in measured] == [
        ("batches", ""),
        ("drain", ""),
        ("kill", ""),
    ]
    for one in measured[:2]:
        assert one.messages > 0
        assert 0 < one.p50_ms <= one.p99_ms <= one.p999_ms
        assert one.broker_cpu_s > 0
        assert one.client_cpu_s > 0
    assert measured[0].messages % 100 == 0
    assert len(measured[2].gaps_ms) == 1
    assert all(one.rss_mib > 50 for one in measured)
    assert list(tmp_path.glob("peers-*")) == []


async def test_no_load_begins_after_the_time_of_the_run(tmp_path: Path) -> None:
    measured = await play(
        plan(1, ("ours/1",)), Tools(tmp_path), settings(tmp_path, 0.0), lambda _: None
    )
    assert [one.error for one in measured] == ["left out: the time of the run is up"]
