"""Hunts planted bugs blind: drawn plans, seed after seed, until one shows a violation.

Every bug lives in a worker of its own, which is told a number and nothing else. First plans
without a single fault must pass with the bug in place: what shows there needs no simulator, but
for claims about a disk, which nothing else can look into. And the plan that shows it must pass
without the bug: what shows there is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import trio

from jepsen_like.simulation.promises import CLAIMS
from jepsen_like.soak import run_worker
from jepsen_like.worker import Order, Report

BUDGET_CPU_S: Final = 600.0
"""The worst bug must be found within this."""

FAST_BUDGET_CPU_S: Final = 60.0
DURATION_S: Final = 120.0
"""Faults of one plan: short runs reach more beginnings."""


CALM_PLANS: Final = 3
"""Runs without a fault that a bug has to pass before it counts."""


class Hunted(msgspec.Struct):
    """What came of one hunt.

    Attributes:
        number: The bug.
        found: A drawn plan showed a violation within the budget.
        counts: Runs without faults showed nothing but broken claims about a disk, and the plan
            that shows it passes without the bug: finding it says something.
        seeds: Plans played.
        cpu_s: CPU time of them.
        seed: The plan that showed it; -1 when none did.
        violation: What it showed first.
    """

    number: int
    found: bool = False
    counts: bool = True
    seeds: int = 0
    cpu_s: float = 0.0
    seed: int = -1
    violation: str = ""


async def hunt(
    numbers: Sequence[int],
    *,
    jobs: int,
    budget_cpu_s: float,
    first_seed: int = 1,
    presets: Mapping[int, str] | None = None,
    faults: Mapping[int, str] | None = None,
    on_done: Callable[[Hunted], None] = lambda _: None,
) -> list[Hunted]:
    """Hunt every bug, *jobs* at a time; return the results in the order of *numbers*.

    Args:
        presets: Workloads to play, for bugs that drawn ones do not come to.
        faults: Faults to draw from, for bugs that need what is not drawn otherwise.
    """
    results: dict[int, Hunted] = {}
    limiter = trio.CapacityLimiter(jobs)

    async def one(number: int) -> None:
        async with limiter:
            preset = (presets or {}).get(number, "")
            drawn = (faults or {}).get(number, "")
            results[number] = await _hunt_one(number, budget_cpu_s, first_seed, preset, drawn)
            on_done(results[number])

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(one, number)
    return [results[number] for number in numbers]


async def _hunt_one(
    number: int, budget_cpu_s: float, first_seed: int, preset: str, faults: str
) -> Hunted:
    hunted = Hunted(number)
    calm = await _collect(
        Order(mutant=number, count=CALM_PLANS, calm=True, duration_s=60.0, preset=preset)
    )
    hunted.counts = len(calm) == CALM_PLANS and all(map(_shows_claims_at_most, calm))
    order = Order(
        first=first_seed,
        mutant=number,
        duration_s=DURATION_S,
        seconds=20 * budget_cpu_s,
        cpu_seconds=budget_cpu_s,
        stop_at_violation=True,
        preset=preset,
        faults=faults,
    )
    for report in await _collect(order):
        hunted.seeds += 1
        hunted.cpu_s += report.cpu_s
        if report.validity == "invalid":
            hunted.found = True
            hunted.seed = report.seed
            first = report.violations[0]
            hunted.violation = f"{first.checker}: {first.name}"
    if not hunted.counts:
        shown = sorted({violation.name for report in calm for violation in report.violations})
        hunted.violation += f", and without faults: {', '.join(shown)}"
    elif hunted.found:
        await _play_without(hunted, preset, faults)
    return hunted


def _shows_claims_at_most(calm: Report) -> bool:
    return calm.validity == "valid" or set() < {shown.name for shown in calm.violations} <= CLAIMS


async def _play_without(hunted: Hunted, preset: str, faults: str) -> None:
    order = Order(first=hunted.seed, count=1, duration_s=DURATION_S, preset=preset, faults=faults)
    (report,) = await _collect(order)
    if report.validity != "valid":
        hunted.counts = False
        hunted.violation += ", without it, too"


async def _collect(order: Order) -> list[Report]:
    send, receive = trio.open_memory_channel[Report](0)
    found: list[Report] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_worker, order, send, sys.executable)
        async with receive:
            async for report in receive:
                found.append(report)
    return found
