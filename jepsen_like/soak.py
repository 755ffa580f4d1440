"""Many seeds in worker processes: totals of a soak, and the determinism gate.

The gate plays the same plans in two interpreters with different hash seeds: the digests over every
event of a run (frames, writes, flushes, roles, applied entries, faults, each with its time) must be
equal, byte for byte. A plan without a change of leader proves little and is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from dledger.jepsen_like.checkers import (
    availability,
    consumer_offsets,
    contents,
    final_reads,
    polls,
    queue_log,
    replicas,
    total_queue,
)
from dledger.jepsen_like.plans.draw import SIMULATED
from dledger.jepsen_like.plans.modes import COUNTERS, STEP_MODES
from dledger.jepsen_like.worker import Order, Report

SOMETIMES: Final = (
    "leader_change",
    "truncation",
    "two_believe_they_lead",
    "snapshot_install",
    "torn_tail_cut",
    "repair",
    "membership_change",
    "unknown_send_appeared",
    "unknown_send_vanished",
)
"""What must really have happened in a long run, or it has proved little."""

SOAK_CHECKERS: Final = (
    queue_log.NAME,
    consumer_offsets.NAME,
    polls.NAME,
    replicas.NAME,
    total_queue.NAME,
    availability.NAME,
    final_reads.NAME,
    contents.NAME,
)
"""Checkers that have something to judge in a soak: without a verdict of each it failed."""

LINE_BYTES_MAX: Final = 1 << 20
"""One report; longer ones are a fault of the worker."""


@dataclass(slots=True)
class Totals:
    """What all workers together have done."""

    seeds: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sometimes: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    failed: list[Report] = field(default_factory=list)
    undecided: int = 0

    def add(self, report: Report) -> None:
        """Take one report in."""
        self.seeds += 1
        self.simulated_s += report.simulated_s
        self.cpu_s += report.cpu_s
        self.operations.update(report.operations)
        self.faults.update(report.faults)
        self.sometimes.update(report.sometimes)
        self.verdicts.update(set(report.checked))
        if report.validity == "invalid":
            self.failed.append(report)
        elif report.validity != "valid":
            self.undecided += 1

    @property
    def speed(self) -> float:
        """Simulated seconds per CPU second."""
        return self.simulated_s / self.cpu_s if self.cpu_s else 0.0

    def missing(self, per_hour: float) -> dict[str, int]:
        """Return what happened less often than *per_hour* in simulated time, with how often."""
        floor = per_hour * self.simulated_s / 3_600
        return {name: self.sometimes[name] for name in SOMETIMES if self.sometimes[name] < floor}

    def never_drawn(self) -> list[str]:
        """Return faults and modes of long runs that no plan has had so far."""
        kinds = SIMULATED.union(*STEP_MODES.values())
        names = [kind.value for kind in kinds if not self.faults[kind.value]]
        return sorted([*names, *(name for name in COUNTERS if not self.sometimes[name])])

    @property
    def without_verdict(self) -> list[str]:
        """The checkers of a soak that have judged nothing."""
        return [name for name in SOAK_CHECKERS if not self.verdicts[name]]

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        violations: list[dict[str, Any]] = []
        for report in self.failed:
            for violation in report.violations:
                violations.append({"seed": report.seed, **msgspec.to_builtins(violation)})
        return {
            "violations": violations,
            "simulated_s": round(self.simulated_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "simulated_s_per_cpu_s": round(self.speed, 1),
            "seeds": self.seeds,
            "undecided": self.undecided,
            "sometimes": {**dict.fromkeys(SOMETIMES, 0), **dict(sorted(self.sometimes.items()))},
            "verdicts": {**dict.fromkeys(SOAK_CHECKERS, 0), **dict(sorted(self.verdicts.items()))},
            "operations": dict(sorted(self.operations.items())),
            "faults": dict(sorted(self.faults.items())),
            "never_drawn": self.never_drawn(),
        }


async def run_worker(
    order: Order,
    reports: trio.MemorySendChannel[Report],
    python: str,
    hash_seed: str = "random",
    *,
    tree: Path | None = None,
) -> None:
    """Run one worker in an interpreter of its own and pass its reports on.

    Cancellation: The worker is killed.
    """
    command = [
        python,
        "-W",
        "ignore",
        "-m",
        "dledger.jepsen_like.worker",
        msgspec.json.encode(order).decode(),
    ]
    async with reports, trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdout=subprocess.PIPE,
                check=False,
                env=_environment(hash_seed, tree),
            )
        )
        assert process.stdout is not None
        async with aclosing(_lines(process.stdout)) as lines:
            async for line in lines:
                await reports.send(msgspec.json.decode(line, type=Report))


def _environment(hash_seed: str, tree: Path | None) -> dict[str, str]:
    own = {**os.environ, "PYTHONHASHSEED": hash_seed}
    # Without the second one ``python -m`` finds the packages of the working directory first.
    return own if tree is None else {**own, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in stream:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > LINE_BYTES_MAX:
            raise ValueError("a worker wrote a line without end")


HASH_SEEDS: Final = ("0", "4711")

SEEDS_PER_COUNTED: Final = 4
"""Plans played at most for each that is counted."""

NO_LIMIT_S: Final = 1e9


class Gate(msgspec.Struct):
    """What came of it.

    Attributes:
        counted: Seeds with faults and a change of leader, equal in both interpreters.
        simulated_s: Virtual time of one interpreter.
    """

    counted: int = 0
    played: int = 0
    simulated_s: float = 0.0
    differing: list[int] = msgspec.field(default_factory=list)
    invalid: dict[int, str] = msgspec.field(default_factory=dict)

    def compare(self, one: Report, other: Report) -> None:
        """Take the reports of the same seed from both interpreters."""
        self.played += 1
        self.simulated_s += one.simulated_s
        if (one.digest, one.operations) != (other.digest, other.operations) or not one.digest:
            self.differing.append(one.seed)
        elif one.validity != "valid":
            found = [f"{violation.name}: {violation.detail}" for violation in one.violations[:1]]
            self.invalid[one.seed] = found[0] if found else one.reason
        elif one.sometimes.get("leader_change") and sum(one.faults.values()):
            self.counted += 1


async def gate(
    count: int,
    duration_s: float,
    *,
    first_seed: int = 0,
    on_progress: Callable[[Gate], None] = lambda _: None,
) -> Gate:
    """Compare until *count* seeds are counted; one process per hash seed."""
    found = Gate()
    waiting: dict[int, Report] = {}
    order = Order(
        first=first_seed,
        count=SEEDS_PER_COUNTED * count,
        duration_s=duration_s,
        seconds=NO_LIMIT_S,
        is_soak=True,
        modes=True,
    )
    send, receive = trio.open_memory_channel[Report](0)
    async with trio.open_nursery() as nursery:
        async with send:
            for hash_seed in HASH_SEEDS:
                nursery.start_soon(run_worker, order, send.clone(), sys.executable, hash_seed)
        async with receive:
            async for report in receive:
                other = waiting.pop(report.seed, None)
                if other is None:
                    waiting[report.seed] = report
                    continue
                found.compare(other, report)
                on_progress(found)
                if found.counted >= count:
                    break
        nursery.cancel_scope.cancel()
    return found
