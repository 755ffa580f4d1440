"""``dledger bench``: how fast it is, on this machine, now."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from dledger.output import CliError, ExitCode, Output, addresses, note, print_json, print_table

app = App(name="bench", help="Measure sending, consuming and storing.", backend="trio")

if TYPE_CHECKING:
    from dledger.cli.bench_load import Target

MIB = 1 << 20

ClusterFolder = Annotated[
    Path | None, Parameter(name="--dir", help="Where the temporary cluster keeps its data.")
]
ClusterSettings = Annotated[
    tuple[str, ...] | None,
    Parameter(name="--set", help="Setting of the temporary cluster, table.name=value."),
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
    entry: Annotated[int, Parameter(help="Bytes of an entry, about.")] = MIB,
    total_mib: Annotated[int, Parameter(help="How much is written, MiB.")] = 512,
    folder: Annotated[
        Path | None, Parameter(name="--dir", help="On the disk to measure; removed afterwards.")
    ] = None,
    output: Output = "table",
) -> int:
    """Measure MB/s into one log with records, CRC and queue units, beside a raw write."""
    from dledger.cli.bench_store import StoreLoad, bench_store

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
    topic: str = "bench",
    idempotent: Annotated[
        bool, Parameter(negative="--no-idempotent", help="Number the sends, as the SDK does.")
    ] = True,
    namesrv: BenchNamesrv = None,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Send for a while; report rate and latency, failures apart.

    Without --namesrv a temporary cluster of three brokers is started on this machine.
    """
    from dledger.cli.bench_load import ProduceLoad, bench_produce

    _positive(size=size, inflight=inflight, batch=batch, duration=duration, queues=queues)
    load = ProduceLoad(topic, size, inflight, batch, duration, queues, idempotent)
    result = await bench_produce(_target(namesrv, folder, set_), load, note)
    print_result("", result, output)
    return ExitCode.OK


@app.command
async def consume(
    *,
    size: Annotated[int, Parameter(help="Bytes of a body.")] = 256,
    messages: Annotated[int, Parameter(help="How many are written and then read.")] = 400_000,
    queues: Annotated[int, Parameter(help="Queues of the topic, one consumer each.")] = 4,
    topic: str = "bench-consume",
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
async def scale(
    *,
    topics: Annotated[int, Parameter(help="Topics that are created.")] = 2_000,
    queues: Annotated[int, Parameter(help="Queues of each topic; each gets a message.")] = 5,
    groups: Annotated[int, Parameter(help="Consumer groups.")] = 200,
    offsets: Annotated[int, Parameter(help="Committed offsets, over all groups.")] = 10_000,
    clients: Annotated[int, Parameter(help="Connected clients with heartbeats.")] = 200,
    rate: Annotated[int, Parameter(help="Sends a second beside it, over all queues.")] = 50,
    duration: Annotated[float, Parameter(help="Seconds of these sends.")] = 60.0,
    idle: Annotated[float, Parameter(help="Seconds for each look at an idle cluster.")] = 20.0,
    folder: ClusterFolder = None,
    set_: ClusterSettings = None,
    output: Output = "table",
) -> int:
    """Fill a temporary cluster of three brokers with topics, groups and clients, and measure it.

    Exit 0 whatever was measured: machines differ.
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
    """Measure every figure this project aims at in one run, each beside its target.

    Exit 0 whatever was measured: machines differ. Takes about two minutes.
    """
    import sys

    from dledger.cli.bench_all import as_markdown, measure_all

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
        if value <= 0:
            raise CliError(f"--{name} must be more than 0", exit_code=ExitCode.USAGE)
