"""``dledger bench``: how fast it is, on this machine, now.

``all`` measures every figure this project aims at in one run, with its target beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from dledger.output import CliError, ExitCode, Output, addresses, note, print_json, print_table

# ---------------------------------------------------------------------------------- commands


app = App(name="bench", help="Measure sending, consuming and storing.", backend="trio")

if TYPE_CHECKING:
    from dledger.cli.bench_load import Target

MIB = 1 << 20

ClusterFolder = Annotated[
    Path | None, Parameter(name="--dir", help="Where the temporary cluster keeps its data.")
]
ClusterSettings = Annotated[
    tuple[str, ...] | None,
    Parameter(
        name="--set", help="Setting of the temporary cluster, table.name=value; may be repeated."
    ),
]
BenchNamesrv = Annotated[
    str | None,
    Parameter(name=["--namesrv", "-n"], help="An existing cluster, host:port;host:port."),
]


def print_result(title: str, result: Any, output: str) -> None:
    """Print a measurement: one JSON object, or a table of names and values."""
    values: dict[str, Any] = msgspec.to_builtins(result)
    if output == "json":
        print_json(values)
        return
    rows = [
        [name.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"]
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else [name.replace("_", " "), str(value)]
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
) -> int:
    """Measure MB/s into one log with records, CRC and queue units, beside a raw write."""
    import tempfile

    from dledger.cli.bench_load import StoreLoad, bench_store

    if not (0 < size < 4 * MIB and 1_024 <= entry <= 64 * MIB and total_mib > 0):
        raise CliError("--size up to 4 MiB, --entry from 1 KiB to 64 MiB", exit_code=ExitCode.USAGE)
    where = Path(tempfile.mkdtemp(prefix="dledger-bench-", dir=folder))
    result = bench_store(
        where, StoreLoad(body_bytes=size, entry_bytes=entry, total_bytes=total_mib * MIB)
    )
    print_result("One log beside a raw sequential write", result, output)
    return ExitCode.OK


@app.command
async def produce(
    *,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    inflight: Annotated[int, Parameter(help="Outstanding sends.")] = 64,
    batch: Annotated[int, Parameter(help="Messages of one send.")] = 1,
    duration: Annotated[float, Parameter(help="Seconds, after one second of warming up.")] = 10.0,
    queues: Annotated[int, Parameter(help="Queues of the topic.")] = 4,
    topic: Annotated[str, Parameter(help="Topic to create and use.")] = "bench",
    idempotent: Annotated[
        bool, Parameter(negative="--no-idempotent", help="Number the sends, as the SDK does.")
    ] = True,
    in_asyncio: Annotated[
        bool,
        Parameter(name="--asyncio", negative=(), help="Send through dledger.aio, not in trio."),
    ] = False,
    namesrv: BenchNamesrv = None,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Send for some seconds; report rate, latency and failures.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    from dledger.cli.bench_load import ProduceLoad, bench_produce

    _positive(size=size, inflight=inflight, batch=batch, duration=duration, queues=queues)
    load = ProduceLoad(topic, size, inflight, batch, duration, queues, idempotent, in_asyncio)
    result = await bench_produce(_target(namesrv, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command
async def latency(
    *,
    rate: Annotated[float, Parameter(help="Messages a second, whatever the answers do.")] = 1_000.0,
    duration: Annotated[float, Parameter(help="Seconds, after one second of warming up.")] = 10.0,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    queues: Annotated[int, Parameter(help="Queues of the topic.")] = 4,
    topic: Annotated[str, Parameter(help="Topic to create and use.")] = "bench-latency",
    namesrv: BenchNamesrv = None,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Send at a fixed rate; report latencies from the intended times, and the achieved rate.

    The rate does not fall while the cluster is slow: what waits then is in the percentiles.
    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    from dledger.cli.bench_latency import LatencyLoad, bench_latency

    _positive(rate=rate, duration=duration, size=size, queues=queues)
    load = LatencyLoad(topic, rate, duration, size, queues)
    result = await bench_latency(_target(namesrv, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command
async def consume(
    *,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    messages: Annotated[int, Parameter(help="Messages to write, then read.")] = 400_000,
    queues: Annotated[int, Parameter(help="Queues of the topic, one consumer each.")] = 4,
    topic: Annotated[str, Parameter(help="Topic to create and use.")] = "bench-consume",
    namesrv: BenchNamesrv = None,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Write a backlog, then read all of it; report the reading.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    from dledger.cli.bench_load import ConsumeLoad, bench_consume

    _positive(size=size, messages=messages, queues=queues)
    load = ConsumeLoad(topic, size, messages, queues)
    result = await bench_consume(_target(namesrv, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command
async def pop(
    *,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    messages: Annotated[int, Parameter(help="Messages to write, then consume.")] = 20_000,
    queues: Annotated[int, Parameter(help="Queues of the topic.")] = 4,
    receivers: Annotated[int, Parameter(help="Receives under way at the same time.")] = 64,
    batch: Annotated[int, Parameter(help="Messages of a receive of the batches.")] = 32,
    topic: Annotated[str, Parameter(help="Topic to create and use.")] = "bench-pop",
    namesrv: BenchNamesrv = None,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Write a backlog, consume it by push, then by receipts; report the rates and their ratios.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    from dledger.cli.bench_pop import PopLoad, bench_pop

    _positive(size=size, messages=messages, queues=queues, receivers=receivers, batch=batch)
    load = PopLoad(topic, size, messages, queues, receivers, batch)
    result = await bench_pop(_target(namesrv, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command
async def scale(
    *,
    topics: Annotated[int, Parameter(help="Topics to create.")] = 2_000,
    queues: Annotated[int, Parameter(help="Queues of each topic; each gets a message.")] = 5,
    groups: Annotated[int, Parameter(help="Consumer groups.")] = 200,
    offsets: Annotated[int, Parameter(help="Committed offsets, over all groups.")] = 10_000,
    clients: Annotated[int, Parameter(help="Connected clients with heartbeats.")] = 200,
    rate: Annotated[int, Parameter(help="Sends a second, over all queues.")] = 50,
    duration: Annotated[float, Parameter(help="Seconds of sending.")] = 60.0,
    idle: Annotated[
        float, Parameter(help="Seconds for each measurement of the idle cluster.")
    ] = 20.0,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Fill a temporary cluster of three brokers with topics, groups and clients, and measure it.

    Exits 0 whatever the figures are: machines differ.
    """
    from dledger.cli.bench_scale import ScaleLoad, bench_scale

    _positive(topics=topics, queues=queues, groups=groups, rate=rate, duration=duration, idle=idle)
    load = ScaleLoad(topics, queues, groups, offsets, clients, rate, duration, idle)
    result = await bench_scale(_target(None, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command(name="all")
async def all_figures(
    *,
    duration: Annotated[float, Parameter(help="Seconds of each load.")] = 10.0,
    output: Annotated[
        Literal["table", "json", "markdown"],
        Parameter(
            name=["--output", "-o"], help="markdown is the table of docs/operate/performance.md."
        ),
    ] = "table",
) -> int:
    """Measure every figure of the performance page, each beside its target.

    Exit 0 whatever was measured: machines differ. Takes about two minutes.
    """
    import sys

    _positive(duration=duration)
    figures = await measure_all(duration, note)
    if output == "json":
        print_json(msgspec.to_builtins(figures))
    elif output == "markdown":
        sys.stdout.write(as_markdown(figures))
    else:
        print_table(
            "Measured and aimed at",
            ["what", "measured", "target", "met", "repeat with"],
            [
                [
                    f.what,
                    f"{f.measured:,.2f} {f.unit}",
                    f.target,
                    "yes" if f.met else "no",
                    f.command,
                ]
                for f in figures
            ],
        )
    return ExitCode.OK


def _target(
    namesrv: str | None, folder: Path | None, assignments: tuple[str, ...] | None
) -> Target:
    from dledger.cli.bench_load import Target
    from dledger.cli.broker_command import parse_options

    return Target(
        addresses(namesrv) if namesrv else None, folder, parse_options(assignments or (), {})
    )


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise CliError(f"--{name} must be more than 0", exit_code=ExitCode.USAGE)


# -------------------------------------------------------------------------- every figure in one run


FLUSHES = 500
"""Flushes timed to say how fast the disk is."""

FAILOVER_SENDS = 32
"""Sends outstanding while the leader is killed."""


class Figure(msgspec.Struct, kw_only=True, frozen=True):
    """One aim and what was measured."""

    what: str
    measured: float
    unit: str
    target: str
    met: bool
    command: str


async def measure_all(duration_s: float, tell: Callable[[str], None]) -> list[Figure]:
    """Measure one after the other; each has a cluster of its own."""
    import tempfile

    from dledger.cli.bench_load import (
        ConsumeLoad,
        ProduceLoad,
        StoreLoad,
        Target,
        bench_consume,
        bench_failover,
        bench_produce,
        bench_store,
    )

    figures = [flush_time()]
    one = await bench_produce(Target(), ProduceLoad("bench", 256, 1, 1, duration_s, 4), tell)
    figures.append(
        _at_most("one outstanding send, p50", one.p50_ms, "ms", 1.5, "produce --inflight 1")
    )
    many = await bench_produce(Target(), ProduceLoad("bench", 256, 64, 1, duration_s, 4), tell)
    figures.append(
        _at_least("64 outstanding sends", many.messages_per_s, "msg/s", 25_000, "produce")
    )
    batches = await bench_produce(Target(), ProduceLoad("bench", 256, 16, 100, duration_s, 4), tell)
    figures.append(
        _at_least(
            "batches of 100, 16 outstanding",
            batches.messages_per_s,
            "msg/s",
            150_000,
            "produce --inflight 16 --batch 100",
        )
    )
    read = await bench_consume(Target(), ConsumeLoad("bench-consume", 256, 400_000, 4), tell)
    figures.append(
        _at_least("consuming a backlog", read.messages_per_s, "msg/s", 200_000, "consume")
    )
    with tempfile.TemporaryDirectory(prefix="dledger-bench-") as folder:
        stored = bench_store(Path(folder) / "log", StoreLoad())
    figures.append(_at_least("one log, with queues", stored.mb_per_s, "MB/s", 600, "store"))
    figures.append(
        Figure(
            what="the same bytes, raw sequential write",
            measured=stored.raw_mb_per_s,
            unit="MB/s",
            target="beside it",
            met=True,
            command="dledger bench store",
        )
    )
    figures.append(
        _at_most(
            "kill of the leader to the next acknowledgement",
            await bench_failover(FAILOVER_SENDS, tell),
            "ms",
            2_000,
            "all",
        )
    )
    return figures


def flush_time() -> Figure:
    """Time small flushes: what a durable acknowledgement costs at least, on this disk."""
    import tempfile

    with tempfile.TemporaryFile(dir=tempfile.gettempdir()) as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        os.fsync(file.fileno())
        times = []
        for number in range(FLUSHES):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(400), number * 400)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return Figure(
        what="one flush of 400 bytes on this disk, p50",
        measured=sorted(times)[FLUSHES // 2] * 1000,
        unit="ms",
        target="for comparison",
        met=True,
        command="dledger bench all",
    )


def _at_most(what: str, measured: float, unit: str, limit: float, command: str) -> Figure:
    return Figure(
        what=what,
        measured=measured,
        unit=unit,
        target=f"≤ {limit:,g}",
        met=measured <= limit,
        command=f"dledger bench {command}",
    )


def _at_least(what: str, measured: float, unit: str, limit: float, command: str) -> Figure:
    return Figure(
        what=what,
        measured=measured,
        unit=unit,
        target=f"≥ {limit:,.0f}",
        met=measured >= limit,
        command=f"dledger bench {command}",
    )


def as_markdown(figures: list[Figure]) -> str:
    """Return the table of docs/operate/performance.md."""
    lines = ["| what | measured | target | met | repeat with |", "|---|---|---|---|---|"]
    lines += [
        f"| {f.what} | {f.measured:,.2f} {f.unit} | {f.target} | {'yes' if f.met else '**no**'} |"
        f" `{f.command}` |"
        for f in figures
    ]
    return "\n".join(lines) + "\n"
