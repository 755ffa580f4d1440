"""``dledger bench``: how fast it is, on this machine, now.

``all`` measures every figure this project aims at in one run, with its target beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from cyclopts import App, Parameter

from dledger.cli.bench_load import POSITIVE, Figures, Ground, Target, Temporary, open_ground
from dledger.cli.bench_scale import ScaleLoad, scale
from dledger.cli.bench_store import MIB, StoreLoad, bench_store
from dledger.cli.bench_topic import (
    ConsumeLoad,
    LatencyLoad,
    PopLoad,
    ProduceLoad,
    consume,
    failover,
    latency,
    pop,
    produce,
)
from dledger.output import Output, note, print_json, print_table

app = App(name="bench", help="Measure sending, consuming and storing.", backend="trio")

FLUSHES: Final = 500
"""Flushes timed to say how fast the disk is."""


class Bench(NamedTuple):
    """A load, what puts it on a cluster and measures, and where that may be.

    *settings*: of a temporary cluster, beside those for every bench.
    """

    load: Any
    measure: Callable[[Ground, Any], Awaitable[Figures]]
    target: Temporary = Target()
    settings: Mapping[str, object] = {}


BENCHES: Final = (
    Bench(ProduceLoad(), produce),
    Bench(LatencyLoad(), latency),
    Bench(ConsumeLoad(), consume),
    Bench(PopLoad(), pop),
    # A sparse file a queue: small ones keep the sum of sizes sane.
    Bench(ScaleLoad(), scale, Temporary(), {"store.mapped_file_size_consume_queue": 20 * 1_000}),
)
"""Each is a command: the docstring of what measures is its help."""


async def run(bench: Bench) -> Figures:
    """Set up what *bench* needs and return what it measures.

    Raises CliError: the cluster cannot be reached, or nothing succeeded.
    """
    load = bench.load
    async with open_ground(
        bench.target,
        note,
        topic=getattr(load, "topic", ""),
        queues=load.queues,
        settings=bench.settings,
    ) as ground:
        return await bench.measure(ground, load)


def _add_command(bench: Bench) -> None:
    async def command(
        *, load: Any = bench.load, target: Any = bench.target, output: Output = "table"
    ) -> None:
        print_result("", await run(bench._replace(load=load, target=target)), output)

    command.__annotations__ |= {"load": type(bench.load), "target": type(bench.target)}
    command.__doc__ = bench.measure.__doc__
    app.command(command, name=bench.measure.__name__)


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
def store(*, load: StoreLoad = StoreLoad(), output: Output = "table") -> None:
    """Measure MB/s into one log with records, CRC and queue units, beside a raw write."""
    print_result("One log beside a raw sequential write", bench_store(load), output)


for _bench in BENCHES:
    _add_command(_bench)


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
    figures = await measure_all(duration)
    if output == "json":
        print_json(figures)
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


async def measure_all(duration_s: float) -> list[dict[str, Any]]:
    """Measure one after the other; each has a cluster of its own."""
    flushed_ms = flush_ms()
    one, many, batches = [
        await run(Bench(ProduceLoad(inflight=inflight, batch=batch, duration=duration_s), produce))
        for inflight, batch in ((1, 1), (64, 1), (16, 100))
    ]
    read = await run(Bench(ConsumeLoad(), consume))
    stored = bench_store(StoreLoad())
    killed = await run(Bench(ProduceLoad(topic="bench-failover", inflight=32), failover))
    measured = (
        flushed_ms,
        one["p50_ms"],
        *(load["messages_per_s"] for load in (many, batches, read)),
        stored["mb_per_s"],
        stored["raw_mb_per_s"],
        killed["failover_ms"],
    )
    return [figure(aim, value) for aim, value in zip(AIMS, measured, strict=True)]


def figure(aim: Aim, measured: float) -> dict[str, Any]:
    """Return *measured* beside its aim: the most of what is in ms, the least of all else."""
    met, target = True, str(aim.target)
    if not isinstance(aim.target, str):
        is_time = aim.unit == "ms"
        met = measured <= aim.target if is_time else measured >= aim.target
        target = f"{'≤' if is_time else '≥'} {aim.target:,g}"
    return {
        "what": aim.what,
        "measured": measured,
        "unit": aim.unit,
        "target": target,
        "met": met,
        "command": f"dledger bench {aim.command}",
    }


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


def _cells(figure: dict[str, Any]) -> list[str]:
    measured, met = f"{figure['measured']:,.2f} {figure['unit']}", "yes" if figure["met"] else "no"
    return [figure["what"], measured, figure["target"], met, figure["command"]]


def as_markdown(figures: list[dict[str, Any]]) -> str:
    """Return the table of docs/operate/performance.md."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for what, measured, target, met, command in map(_cells, figures):
        strong = met if met == "yes" else f"**{met}**"
        lines.append(f"| {what} | {measured} | {target} | {strong} | `{command}` |")
    return "\n".join(lines) + "\n"
