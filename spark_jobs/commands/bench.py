"""``dledger history bench``: how fast the kernel is, and how time grows with the length."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from cyclopts import Parameter

from dledger.jepsen_like.checkers.kernel.facts import Columns
from dledger.jepsen_like.checkers.kernel.judge import judge_queue
from dledger.jepsen_like.checkers.kernel.tables import gather
from dledger.jepsen_like.history.operation import NOTHING
from dledger.output import CliError, ExitCode, Output, note, show
from dledger.spark_jobs.generate.history import BLOCK_OPS, Shape, generate
from dledger.spark_jobs.generate.queue_stream import QueueStream
from dledger.spark_jobs.run import Engine, judge_run
from dledger.spark_jobs.tables import keep_memory

KERNEL_CLIENTS: Final = (10, 1_000)
ROUNDS: Final = 10
"""The best of this number counts: what else runs here only ever makes it slower."""


class Figure(msgspec.Struct):
    """One measurement.

    Attributes:
        cpu_seconds: Of all cores together; on a busy machine the fairer of the two.
        peak_mib: Memory of the process, where it had one of its own; of several the largest.
    """

    what: str
    ops: int
    seconds: float
    cpu_seconds: float
    ops_per_s: float
    ops_per_cpu_s: float
    peak_mib: int = 0


def bench(
    *,
    ops: Annotated[
        str, Parameter(help="Lengths of histories in operations, separated by commas.")
    ] = ("1000000,10000000"),
    kernel_ops: Annotated[int, Parameter(help="Operations for the kernel alone.")] = 5_000_000,
    clients: Annotated[int, Parameter(help="Clients of the generated histories.")] = 100,
    queues: Annotated[int, Parameter(help="Queues of the generated histories.")] = 4,
    engine: Annotated[Engine, Parameter(help="Engine that checks.")] = "local",
    output: Output = "table",
) -> int:
    """Measure the kernel on one core, and Parquet to verdict for several lengths."""
    try:
        lengths = [int(part) for part in ops.split(",") if part]
    except ValueError:
        raise CliError(f"--ops {ops} is no list of numbers", exit_code=ExitCode.USAGE) from None
    keep_memory()
    figures: list[Figure] = []
    for number in KERNEL_CLIENTS:
        note(f"kernel, {kernel_ops:,} operations of {number:,} clients")
        figures.append(kernel(kernel_ops, number))
    for length in lengths:
        note(f"Parquet to verdict, {length:,} operations")
        figures.append(end_to_end(Shape(length, clients, queues), engine))
    show(output, "Checking", msgspec.to_builtins(figures), Figure.__struct_fields__)
    return ExitCode.OK


def kernel(ops: int, clients: int) -> Figure:
    """Judge one queue in memory; times, values and hashes of pulls are all looked at."""
    rows, looks = in_memory(ops, clients)
    best = (float("inf"), float("inf"))
    for _ in range(ROUNDS):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        said = judge_queue(gather(rows, looks))
        assert said.is_valid
        best = min(best, (time.process_time() - cpu_s, time.perf_counter() - wall_s))
    return _figure(f"kernel, 1 queue, {clients:,} clients", ops, best[1], best[0])


def in_memory(ops: int, clients: int) -> tuple[list[Columns], list[Columns]]:
    """Return the rows of a queue as the columns that a reader of Parquet hands over."""
    rows: list[Columns] = []
    looks: list[Columns] = []
    small = {"f": np.int8, "outcome": np.int8, "cnt": np.int32}
    for block in QueueStream(0, 1, ops, range(clients), clients, 0, 0, BLOCK_OPS).blocks():
        columns: dict[str, Any] = {
            name: column.astype(small.get(name, np.int64)) for name, column in block.ops.items()
        }
        size = len(block.at_ns)
        columns["level"] = np.zeros(size, dtype=np.int8)
        columns["due_ns"] = np.full(size, NOTHING, dtype=np.int64)
        rows.append(columns)
        count = len(block.obs["off"])
        looks.append({**block.obs, "replica": np.zeros(count, dtype=np.int64)})
        held = len(block.log)
        looks.append(
            {
                "op_id": np.full(held, -1, dtype=np.int64),
                "replica": np.zeros(held, dtype=np.int64),
                "off": block.first_off + np.arange(held, dtype=np.int64),
                "value": block.log,
            }
        )
    return rows, looks


def end_to_end(shape: Shape, engine: Engine) -> Figure:
    """Generate a history and judge its files in processes of their own, all checks included."""
    with tempfile.TemporaryDirectory(prefix="dledger-bench-") as folder:
        generate(shape, Path(folder))
        call = f"judge_once({folder!r}, {engine!r})"
        code = f"from dledger.spark_jobs.commands.bench import judge_once; {call}"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds, cpu_s, peak_mib = msgspec.json.decode(done.stdout, type=tuple[float, float, int])
    what = "Parquet to verdict" if engine == "local" else "Parquet to verdict with Spark"
    figure = _figure(f"{what}, {shape.queues} queues", shape.ops, seconds, cpu_s)
    figure.peak_mib = peak_mib
    return figure


def judge_once(folder: str, engine: Engine) -> None:
    """Judge a folder and print seconds, CPU seconds and peak memory as JSON; Spark is ended."""
    keep_memory()
    outcome = judge_run(Path(folder), engine, time.perf_counter)
    assert outcome.verdict == "valid", outcome.reason
    # Before Spark ends: its workers are killed then, and what they used is counted nowhere.
    running_s = running_cpu_s()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() + running_s + ended.ru_utime + ended.ru_stime
    if engine == "spark":
        from dledger.spark_jobs.engines.session import end_session

        end_session()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peak_mib = max(one.ru_maxrss for one in used) // 1024
    sys.stdout.write(msgspec.json.encode((outcome.seconds, cpu_s, peak_mib)).decode())


def running_cpu_s() -> float:
    """Return the processor seconds of all descendants of this process that run.

    With those of their own that have ended.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(int(field) for field in fields[11:15])
    found, level = 0, {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += sum(ticks[pid] for pid in level)
    return found / os.sysconf("SC_CLK_TCK")


def _figure(what: str, ops: int, seconds: float, cpu_s: float) -> Figure:
    return Figure(what, ops, round(seconds, 3), round(cpu_s, 3), ops / seconds, ops / cpu_s)
