"""Hunts planted bugs blind, in simulated time: drawn plans, seed after seed, until one shows it.

Every bug has a source tree and workers of its own; plans know nothing of it. First, plans without a
single fault must pass with the bug in place: what shows there needs no simulator, but for claims
about a disk, which nothing else can check. And the plan that shows it must pass without the bug:
what shows there is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from jepsen_like.simulation.promises import CLAIMS
from jepsen_like.soak import run_worker
from jepsen_like.worker import Order, Report
from tests.mutants.patches import Patch, read_patches
from tests.mutants.trees import planted_text, planted_tree

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
    on_done: Callable[[Hunted], None] = lambda _: None,
) -> list[Hunted]:
    """Hunt every bug, *jobs* at a time; return the results in the order of *numbers*.

    Raises:
        KeyError: There is no bug of a number.
        StalePatchError: The product's text is no longer what a bug was made for.
    """
    patches = read_patches()
    for number in numbers:
        planted_text(patches[number])
    results: dict[int, Hunted] = {}
    limiter = trio.CapacityLimiter(jobs)

    async def one(number: int) -> None:
        async with limiter:
            with planted_tree(number) as tree:
                results[number] = await _hunt_one(patches[number], tree, budget_cpu_s, first_seed)
            on_done(results[number])

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(one, number)
    return [results[number] for number in numbers]


async def _hunt_one(
    patch: Patch, tree: Path | None, budget_cpu_s: float, first_seed: int
) -> Hunted:
    hunted, preset, faults = Hunted(patch.number), patch.preset, patch.faults
    calm = await _collect(Order(count=CALM_PLANS, calm=True, duration_s=60.0, preset=preset), tree)
    hunted.counts = len(calm) == CALM_PLANS and all(map(_shows_claims_at_most, calm))
    order = Order(
        first=first_seed,
        duration_s=DURATION_S,
        seconds=20 * budget_cpu_s,
        cpu_seconds=budget_cpu_s,
        stop_at_violation=True,
        preset=preset,
        faults=faults,
    )
    for report in await _collect(order, tree):
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


async def _collect(order: Order, tree: Path | None = None) -> list[Report]:
    send, receive = trio.open_memory_channel[Report](0)
    found: list[Report] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_worker, order, send, sys.executable, tree=tree))
        async with receive:
            async for report in receive:
                found.append(report)
    return found
