"""The determinism gate: the same seed is the same run in another interpreter, byte for byte.

Two interpreters with different hash seeds play the same plans; the digests over every event of a
run (frames, writes, flushes, roles, applied entries, faults, each with its time) must be equal.
A plan without a change of leader proves little and is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from jepsen_like.soak import run_worker
from jepsen_like.worker import Order, Report

HASH_SEEDS: Final = ("0", "4711")

SEEDS_PER_COUNTED: Final = 4
"""Plans played at most for each that is counted."""

NO_LIMIT_S: Final = 1e9


class Gate(msgspec.Struct):
    """What came of it.

    Attributes:
        counted: Seeds with faults and a change of leader, equal in both interpreters.
        played: Seeds both have played.
        simulated_s: Virtual time of one interpreter.
        differing: Seeds whose digests differ.
        invalid: Seeds that broke a promise.
    """

    counted: int = 0
    played: int = 0
    simulated_s: float = 0.0
    differing: list[int] = msgspec.field(default_factory=list)
    invalid: list[int] = msgspec.field(default_factory=list)

    def compare(self, one: Report, other: Report) -> None:
        """Take the reports of the same seed from both interpreters."""
        self.played += 1
        self.simulated_s += one.simulated_s
        if (one.digest, one.operations) != (other.digest, other.operations) or not one.digest:
            self.differing.append(one.seed)
        elif one.validity != "valid":
            self.invalid.append(one.seed)
        elif one.sometimes.get("leader_change") and sum(one.faults.values()):
            self.counted += 1


async def gate(
    count: int,
    duration_s: float,
    *,
    first_seed: int = 0,
    on_progress: Callable[[Gate], None] = lambda _: None,
) -> Gate:
    """Compare until *count* seeds are counted; one process per hash seed.

    Args:
        count: Seeds to count.
        duration_s: Of the faults of each plan, virtual.
    """
    found = Gate()
    waiting: dict[int, Report] = {}
    order = Order(
        first=first_seed,
        count=SEEDS_PER_COUNTED * count,
        duration_s=duration_s,
        seconds=NO_LIMIT_S,
        is_soak=True,
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
