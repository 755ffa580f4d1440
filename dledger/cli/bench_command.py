"""``dledger bench``: how fast it is, on this machine, now.

``all`` measures every figure this project aims at in one run, with its target beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from cyclopts import App, Parameter

from dledger.cli.bench_consume import ConsumeLoad, PopLoad, bench_consume, bench_pop
from dledger.cli.bench_load import POSITIVE, Figures, Target, Temporary
from dledger.cli.bench_scale import ScaleLoad, bench_scale
from dledger.cli.bench_sends import (
    LatencyLoad,
    ProduceLoad,
    bench_failover,
    bench_latency,
    bench_produce,
)
from dledger.cli.bench_store import StoreLoad, bench_store
from dledger.output import CliError, ExitCode, Output, note, print_json, print_table

app = App(name="bench", help="Measure sending, consuming and storing.", backend="trio")

MIB: Final = 1 << 20
FLUSHES: Final = 500
"""Flushes timed to say how fast the disk is."""

FAILOVER_SENDS: Final = 32
"""Sends outstanding while the leader is killed."""


def print_result(title: str, values: Figures, output: str) -> None:
    """Print a measurement: one JSON object, or a table of names and values."""
    if output == "json":
        print_json(values)
    else:
        rows = [
            [name.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"]
            for name, value in values.items()
        ]
        print_table(title, ["what", "value"], rows)


@app.command
def store(
    *,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 1_024,
    entry: Annotated[int, Parameter(help="Bytes of an entry, approximately.")] = MIB,
    total_mib: Annotated[int, Parameter(help="MiB to write.")] = 512,
    folder: Annotated[
        Path | None,
        Parameter(
            name="--dir", help="Folder on the disk to measure; its files are removed afterwards."
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Measure MB/s into one log with records, CRC and queue units, beside a raw write."""
    if not (0 < size < 4 * MIB and 1_024 <= entry <= 64 * MIB and total_mib > 0):
        raise CliError("--size up to 4 MiB, --entry from 1 KiB to 64 MiB", exit_code=ExitCode.USAGE)
    where = Path(tempfile.mkdtemp(prefix="dledger-bench-", dir=folder))
    load = StoreLoad(body_bytes=size, entry_bytes=entry, total_bytes=total_mib * MIB)
    print_result("One log beside a raw sequential write", bench_store(where, load), output)


@app.command
async def produce(
    *, load: ProduceLoad = ProduceLoad(), target: Target = Target(), output: Output = "table"
) -> None:
    """Send for some seconds; report rate, latency and failures.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    print_result("", await bench_produce(target, load, note), output)


@app.command
async def latency(
    *, load: LatencyLoad = LatencyLoad(), target: Target = Target(), output: Output = "table"
) -> None:
    """Send at a fixed rate; report latencies from the intended times, and the achieved rate.

    The rate does not fall while the cluster is slow: what waits then is in the percentiles.
    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    print_result("", await bench_latency(target, load, note), output)


@app.command
async def consume(
    *, load: ConsumeLoad = ConsumeLoad(), target: Target = Target(), output: Output = "table"
) -> None:
    """Write a backlog, then read all of it; report the reading.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    print_result("", await bench_consume(target, load, note), output)


@app.command
async def pop(
    *, load: PopLoad = PopLoad(), target: Target = Target(), output: Output = "table"
) -> None:
    """Write a backlog, consume it by push, then by receipts; report the rates and their ratios.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    print_result("", await bench_pop(target, load, note), output)


@app.command
async def scale(
    *,
    load: ScaleLoad = ScaleLoad(),
    target: Temporary = Temporary(),
    output: Output = "table",
) -> None:
    """Fill a temporary cluster of three brokers with topics, groups and clients, and measure it.

    Exits 0 whatever the figures are: machines differ.
    """
    print_result("", await bench_scale(target, load, note), output)


@app.command(name="all")
async def all_figures(
    *,
    duration: Annotated[float, POSITIVE, Parameter(help="Seconds of each load.")] = 10.0,
    output: Annotated[
        Literal["table", "json", "markdown"],
        Parameter(
            name=["--output", "-o"], help="markdown is the table of docs/operate/performance.md."
        ),
    ] = "table",
) -> None:
    """Measure every figure of the performance page, each beside its target.

    Exit 0 whatever was measured: machines differ. Takes about two minutes.
    """
    figures = await measure_all(duration, note)
    if output == "json":
        print_json(msgspec.to_builtins(figures))
    elif output == "markdown":
        sys.stdout.write(as_markdown(figures))
    else:
        print_table("Measured and aimed at", HEAD, [_cells(one) for one in figures])


# -------------------------------------------------------------------------- every figure in one run


HEAD: Final = ["what", "measured", "target", "met", "repeat with"]


class Aim(NamedTuple):
    """What is measured, and its target: a number, or why there is none."""

    what: str
    unit: str
    target: float | str
    command: str


AIMS: Final = (
    Aim("one flush of 400 bytes on this disk, p50", "ms", "for comparison", "all"),
    Aim("one outstanding send, p50", "ms", 1.5, "produce --inflight 1"),
    Aim("64 outstanding sends", "msg/s", 25_000, "produce"),
    Aim("batches of 100, 16 outstanding", "msg/s", 150_000, "produce --inflight 16 --batch 100"),
    Aim("consuming a backlog", "msg/s", 200_000, "consume"),
    Aim("one log, with queues", "MB/s", 600, "store"),
    Aim("the same bytes, raw sequential write", "MB/s", "beside it", "store"),
    Aim("kill of the leader to the next acknowledgement", "ms", 2_000, "all"),
)


class Figure(msgspec.Struct, frozen=True):
    """One aim and what was measured."""

    what: str
    measured: float
    unit: str
    target: str
    met: bool
    command: str


async def measure_all(duration_s: float, tell: Callable[[str], None]) -> list[Figure]:
    """Measure one after the other; each has a cluster of its own."""
    flushed_ms = flush_ms()
    one, many, batches = [
        await bench_produce(
            Target(), ProduceLoad(inflight=inflight, batch=batch, duration=duration_s), tell
        )
        for inflight, batch in ((1, 1), (64, 1), (16, 100))
    ]
    read = await bench_consume(Target(), ConsumeLoad(), tell)
    with tempfile.TemporaryDirectory(prefix="dledger-bench-") as folder:
        stored = bench_store(Path(folder) / "log", StoreLoad())
    failover_ms = await bench_failover(FAILOVER_SENDS, tell)
    measured = (
        flushed_ms,
        one["p50_ms"],
        *(load["messages_per_s"] for load in (many, batches, read)),
        stored["mb_per_s"],
        stored["raw_mb_per_s"],
        failover_ms,
    )
    return [figure(aim, value) for aim, value in zip(AIMS, measured, strict=True)]


def figure(aim: Aim, measured: float) -> Figure:
    """Return *measured* beside its aim: the most of what is in ms, the least of all else."""
    met, target = True, str(aim.target)
    if not isinstance(aim.target, str):
        is_time = aim.unit == "ms"
        met = measured <= aim.target if is_time else measured >= aim.target
        target = f"{'≤' if is_time else '≥'} {aim.target:,g}"
    command = f"dledger bench {aim.command}"
    return Figure(aim.what, measured, aim.unit, target, met, command)


def flush_ms() -> float:
    """Return what a durable acknowledgement costs at least on this disk: a small flush, p50."""
    with tempfile.TemporaryFile(dir=tempfile.gettempdir()) as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        os.fsync(file.fileno())
        times = []
        for number in range(FLUSHES):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(400), number * 400)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return sorted(times)[FLUSHES // 2] * 1000


def _cells(f: Figure) -> list[str]:
    met = "yes" if f.met else "no"
    return [f.what, f"{f.measured:,.2f} {f.unit}", f.target, met, f.command]


def as_markdown(figures: list[Figure]) -> str:
    """Return the table of docs/operate/performance.md."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for what, measured, target, met, command in map(_cells, figures):
        strong = met if met == "yes" else f"**{met}**"
        lines.append(f"| {what} | {measured} | {target} | {strong} | `{command}` |")
    return "\n".join(lines) + "\n"
