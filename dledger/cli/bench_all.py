"""Every figure this project aims at, measured in one run, with its target beside it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dledger.cli.bench_load import (
    ConsumeLoad,
    ProduceLoad,
    Target,
    bench_consume,
    bench_failover,
    bench_produce,
)
from dledger.cli.bench_store import StoreLoad, bench_store

MIB = 1 << 20
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
