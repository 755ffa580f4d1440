"""Plays the steps of a plan: starts brokers, puts loads on them, and keeps what they measured."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from dledger.cli.bench_load import cpu_s, rss_mib
from dledger.commitlog.errors import MQError
from dledger.output import CliError
from tools.bench import clusters
from tools.bench.clusters import TOPIC, Cluster
from tools.bench.figures import Measured
from tools.bench.loads import CASE, Case, Lines, arguments
from tools.bench.plan import Contender, Step, kills_of
from tools.bench.processes import Program
from tools.bench.tools import Tools

SETTLE_S: Final = 1.0
"""Sends before each kill."""

BEFORE_MEASURING_S: Final = 120.0
"""At most, from the start of a load to its measured seconds; a backlog is written in it."""

ACK_TIMEOUT_S: Final = 90.0
"""After a kill: RocketMQ's clients read their routes every 30 s."""

START_TIMEOUT_S: Final = 180.0
STEP_PAUSE_S: Final = 1.0
"""Between two clusters: what the first one left to the disk is written."""

REPLICAS: Final = 3

TIME_IS_UP: Final = "left out: the time of the run is up"

FAILURES: Final = (
    *(MQError, OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError),
    *(ExceptionGroup, ValueError, LookupError, RuntimeError, msgspec.MsgspecError),
)
"""What brokers and loads of others can do to a run: the row has the reason, the run goes on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how much.

    Attributes:
        seconds: Measured of each load; `warm_s` before them, with the same load.
        brokers_warm_s: Of sends, before the first load on brokers that have just started.
        folder: Where the brokers' data lies while they run; None: the folder for temporary files.
        deadline_s: By `trio.current_time`: no load is begun after it.
    """

    seconds: float
    warm_s: float
    brokers_warm_s: float
    kills: int
    backlog: int
    folder: Path | None
    deadline_s: float


async def play(
    steps: Sequence[Step],
    tools: Tools,
    settings: Settings,
    progress: Callable[[str], None],
    save: Callable[[Sequence[Measured]], None] = lambda _: None,
) -> list[Measured]:
    """Play all steps; one that fails is in the result with its reason, and the next one follows.

    Args:
        save: Called after each load with everything measured until then.
    """
    found: list[Measured] = []
    began_s = trio.current_time()
    for number, step in enumerate(steps, 1):
        minute = (trio.current_time() - began_s) / 60
        cases = ", ".join(step.cases)
        progress(
            f"[{number}/{len(steps)}, minute {minute:.1f}] round {step.round + 1},"
            f" {step.contender.key}: {cases}"
        )

        def keep(one: Measured) -> None:
            found.append(one)
            save(found)
            minute = (trio.current_time() - began_s) / 60
            progress(f"  minute {minute:.1f}, {one.contender}/{one.case}: {summary(one)}")

        await _step(step, tools, settings, keep)
    return found


def summary(one: Measured) -> str:
    """Return a few words for the progress of a run."""
    if one.gaps_ms:
        gaps = ", ".join(f"{gap:.0f}" for gap in one.gaps_ms)
        return f"{len(one.gaps_ms)} kills, {gaps} ms {one.error}".rstrip()
    if one.error:
        return f"failed: {one.error}"
    failed = f", {one.failed} failed" if one.failed else ""
    return (
        f"{one.rate:,.0f}/s, p50 {one.p50_ms:.2f} ms, p99 {one.p99_ms:.2f} ms, CPU s per million"
        f" {one.broker_cpu_s:.1f} and {one.client_cpu_s:.1f}, {one.rss_mib:,.0f} MiB{failed}"
    )


async def _step(
    step: Step, tools: Tools, settings: Settings, keep: Callable[[Measured], None]
) -> None:
    contender = step.contender
    left = list(step.cases)
    error = next((tools.missing[chain] for chain in contender.chains if chain in tools.missing), "")
    if not error and trio.current_time() >= settings.deadline_s:
        error = TIME_IS_UP
    if not error:
        with tempfile.TemporaryDirectory(
            prefix=f"peers-{contender.key}-", dir=settings.folder, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            try:
                async with _started(contender, folder, tools) as cluster:
                    await _warm_up(step, cluster, tools, settings, folder)
                    while left:
                        one = await _case(step, left[0], cluster, tools, settings, folder)
                        del left[0]
                        keep(one)
                await trio.sleep(STEP_PAUSE_S)
            except FAILURES as failure:
                error = reason(failure)
    for case in left:
        keep(_failed(step, case, error))


async def _warm_up(
    step: Step, cluster: Cluster, tools: Tools, settings: Settings, folder: Path
) -> None:
    """Put 64 outstanding sends on brokers that have just started, and leave out what they measure.

    Those of RocketMQ are compiled while they run.
    """
    once = replace(settings, seconds=settings.brokers_warm_s, warm_s=0.0)
    await _case(step, "64", cluster, tools, once, folder)


def reason(error: BaseException) -> str:
    """Return one line about an error, of a group about its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def _failed(step: Step, case: str, error: str) -> Measured:
    return Measured(contender=step.contender.key, case=case, round=step.round, error=error)


@asynccontextmanager
async def _started(contender: Contender, folder: Path, tools: Tools) -> AsyncIterator[Cluster]:
    """Give the contender's brokers; bounded is only their start."""
    opened = _opened(contender.key, folder, tools)
    with trio.fail_after(START_TIMEOUT_S) as scope:
        async with opened as cluster:
            scope.deadline = float("inf")
            yield cluster


def _opened(key: str, folder: Path, tools: Tools) -> AbstractAsyncContextManager[Cluster]:
    match key:
        case "nats":
            return clusters.nats(folder, tools, sync_interval="")
        case "nats-synced":
            return clusters.nats(folder, tools, sync_interval="always")
        case "rocketmq":
            return clusters.rocketmq(folder, tools)
        case "rocketmq-batch-push":
            return clusters.rocketmq(folder, tools, "enableBatchPush=true")
        case _:
            return clusters.ours(folder)


async def _case(
    step: Step, name: str, cluster: Cluster, tools: Tools, settings: Settings, folder: Path
) -> Measured:
    """Put one load on running brokers; a failure is in the result."""
    if trio.current_time() >= settings.deadline_s:
        return _failed(step, name, TIME_IS_UP)
    if len(cluster.pids()) < REPLICAS:
        return _failed(step, name, "a broker has ended during an earlier load")
    case = CASE[name]
    topic = f"{TOPIC}-drain" if case.mode == "drain" else TOPIC
    seconds = 3600.0 if case.mode == "kill" else settings.seconds
    given = arguments(
        case,
        cluster.address,
        topic,
        warm_s=settings.warm_s,
        seconds=seconds,
        backlog=settings.backlog,
    )
    command = client_command(step.contender.client, tools)
    load = Program(f"the load of {step.contender.key}", [*command, *given], folder / "load.log")
    try:
        if case.mode == "kill":
            return await _kills(step, case, cluster, load, settings)
        return await _window(step, case, cluster, load, settings)
    except FAILURES as failure:
        return _failed(step, name, f"{reason(failure)}; the load's log: {load.last_line()}")
    finally:
        await load.stop()


def client_command(client: str, tools: Tools) -> list[str]:
    """Return how the load program of a client is started."""
    if client == "go":
        return [str(tools.nats_load)]
    if client == "java":
        return [
            *("java", "-Xmx1g", "-Drocketmq.client.logLevel=ERROR"),
            "-Dcom.rocketmq.sendMessageWithVIPChannel=false",
            *("-cp", f"{tools.jars}/*:{tools.java_classes}", "Load"),
        ]
    return [sys.executable, "-m", "tools.bench.sdk_load"]


class _Cpu:
    """Processor seconds of the brokers and of the load, between two moments."""

    def __init__(self, cluster: Cluster, load: Program) -> None:
        self._cluster, self._load = cluster, load
        self._began = (0.0, 0.0)
        self.brokers = self.client = self.rss_mib = 0.0

    def _now(self) -> tuple[float, float]:
        return sum(map(cpu_s, self._cluster.pids())), cpu_s(self._load.pid)

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        brokers, client = self._now()
        self.brokers, self.client = brokers - self._began[0], client - self._began[1]
        self.rss_mib = sum(map(rss_mib, self._cluster.pids()))


async def _window(
    step: Step, case: Case, cluster: Cluster, load: Program, settings: Settings
) -> Measured:
    cpu = _Cpu(cluster, load)
    lines = Lines(on_begin=cpu.begin, on_end=cpu.end)
    load.start(piped=True)
    with trio.fail_after(BEFORE_MEASURING_S + settings.warm_s + 2 * settings.seconds):
        await load.read_lines(lines)
    result = lines.result
    if result is None or not result.messages:
        raise CliError("nothing was acknowledged in the measured seconds")
    return Measured(
        contender=step.contender.key,
        case=case.name,
        round=step.round,
        rate=result.messages / result.seconds,
        p50_ms=result.p50_ms,
        p99_ms=result.p99_ms,
        p999_ms=result.p999_ms,
        messages=result.messages,
        failed=result.failed,
        broker_cpu_s=1e6 * cpu.brokers / result.messages,
        client_cpu_s=1e6 * cpu.client / result.messages,
        rss_mib=cpu.rss_mib,
    )


async def _kills(
    step: Step, case: Case, cluster: Cluster, load: Program, settings: Settings
) -> Measured:
    """Kill the leader again and again. What fails ends it: the kills before it stay counted.

    A kill without an acknowledgement counts with the time after which it was given up.
    """
    lines = Lines()
    gaps: list[float] = []
    load.start(piped=True)
    rss, error = 0.0, ""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.read_lines, lines)
        try:
            for left in reversed(range(kills_of(step.contender, settings.kills))):
                await _until(partial(lines.acks_beyond, lines.acks), "no send was acknowledged")
                leader = await cluster.leader()
                await trio.sleep(SETTLE_S)
                rss = sum(map(rss_mib, cluster.pids()))
                gaps.append(1000 * ACK_TIMEOUT_S)
                lines.killed(time.time_ns() // 1_000_000)
                await cluster.kill(leader)
                await _until(lambda: lines.gap_ms is not None, "no acknowledgement after the kill")
                gaps[-1] = lines.gap_ms or 0.0
                if not left or trio.current_time() >= settings.deadline_s:
                    break
                await cluster.restart(leader)
        except FAILURES as failure:
            if not gaps:
                raise
            error = f"kill {len(gaps)}: {reason(failure)}"
        await load.stop()
    return Measured(
        contender=step.contender.key,
        case=case.name,
        round=step.round,
        error=error,
        rss_mib=rss,
        gaps_ms=tuple(gaps),
    )


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    with trio.move_on_after(ACK_TIMEOUT_S):
        while not condition():
            await trio.sleep(0.005)
        return
    raise CliError(f"{otherwise} within {ACK_TIMEOUT_S:g} s")
