"""Hunts planted bugs blind, in simulated time: drawn plans, seed after seed, until one shows it.

Every bug has a source tree and workers of its own; plans know nothing of it. The plan that shows it
must pass without the bug: what shows there is another one. Plans without a single fault are played
first; what shows there needs no fault, and is noted.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.simulation.play import INVARIANTS, LIVENESS
from dledger.jepsen_like.soak import run_worker
from dledger.jepsen_like.worker import Order, Report, with_preset
from tests.mutants.patches import Patch, read_patches
from tests.mutants.trees import planted_text, planted_tree

BUDGET_CPU_S: Final = 600.0
"""The worst bug must be found within this."""

FAST_BUDGET_CPU_S: Final = 60.0
DURATION_S: Final = 120.0
"""Faults of one plan: short runs reach more beginnings."""


CALM_PLANS: Final = 3
"""Runs without a fault that come first."""

SOAK_DURATION_S: Final = 300.0
"""Faults of one plan with the workload of a soak, which has few operations a second."""

HISTORY: Final = "history checker"
INVARIANT: Final = "invariant of the simulator"
ASSERTION: Final = "assertion of the product"
JUDGES: Final = (HISTORY, INVARIANT, ASSERTION)

HARNESS: Final = "harness"
"""Checker of a worker: the run itself broke."""


def judge_of(violation: Violation) -> str:
    """Return which kind of judge found a violation."""
    if violation.name == "crash":
        return ASSERTION
    if violation.checker in (INVARIANTS, LIVENESS, HARNESS):
        return INVARIANT
    return HISTORY


class Hunted(msgspec.Struct):
    """What came of one hunt.

    Attributes:
        number: The bug.
        found: A drawn plan showed a violation within the budget.
        counts: The plan that shows it passes without the bug: finding it proves something.
        calm: A plan without faults showed it, too.
        seeds: Plans played.
        cpu_s: CPU time of them.
        seed: The plan that showed it; -1 when none did.
        violation: What it showed first.
        judges: Kinds of judges that found it in that plan. An invariant ends the run, and checkers
            see the history up to there.
        preset: The workload that a guided hunt found it with.
    """

    number: int
    found: bool = False
    counts: bool = True
    calm: bool = False
    seeds: int = 0
    cpu_s: float = 0.0
    seed: int = -1
    violation: str = ""
    judges: tuple[str, ...] = ()
    preset: str = ""


async def hunt(
    numbers: Sequence[int],
    *,
    jobs: int,
    budget_cpu_s: float,
    first_seed: int = 1,
    is_soak: bool = False,
    guided: bool = False,
    on_done: Callable[[Hunted], None] = lambda _: None,
) -> list[Hunted]:
    """Hunt every bug, *jobs* at a time; return the results in the order of *numbers*.

    Args:
        is_soak: With the workload and the modes of a soak, and not with those of the bug.
        guided: As a guided soak does, with plans of any workload.

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
                results[number] = await _hunt_one(
                    patches[number],
                    tree,
                    Order(
                        first=first_seed,
                        seconds=20 * budget_cpu_s,
                        cpu_seconds=budget_cpu_s,
                        stop_at_violation=True,
                        is_soak=is_soak,
                        modes=is_soak,
                        guided=guided,
                    ),
                )
            on_done(results[number])

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(one, number)
    return [results[number] for number in numbers]


async def _hunt_one(patch: Patch, tree: Path | None, order: Order) -> Hunted:
    hunted = Hunted(patch.number)
    if not order.is_soak:
        order = msgspec.structs.replace(
            order, preset=patch.preset, faults=patch.faults, mode=patch.mode
        )
        still = Order(count=CALM_PLANS, calm=True, duration_s=60.0, preset=patch.preset)
        played = await _collect(still, tree)
        hunted.calm = len(played) < CALM_PLANS or any(r.validity == "invalid" for r in played)
    order.duration_s = SOAK_DURATION_S if order.is_soak and not order.guided else DURATION_S
    for report in await _collect(order, tree):
        hunted.seeds += 1
        hunted.cpu_s += report.cpu_s
        if report.validity == "invalid":
            hunted.found = True
            hunted.seed, hunted.preset = report.seed, report.preset
            first = report.violations[0]
            hunted.violation = f"{first.checker}: {first.name}"
            kinds = set(map(judge_of, report.violations))
            hunted.judges = tuple(judge for judge in JUDGES if judge in kinds)
    if hunted.found and not await _is_sound(hunted, order):
        hunted.counts = False
        hunted.violation += ", without it, too"
    return hunted


async def _is_sound(hunted: Hunted, order: Order) -> bool:
    """Return whether the plan that showed a bug is valid without it."""
    once = msgspec.structs.replace(
        with_preset(order, hunted.preset), first=hunted.seed, count=1, cpu_seconds=0.0, guided=False
    )
    (report,) = await _collect(once)
    return report.validity == "valid"


async def _collect(order: Order, tree: Path | None = None) -> list[Report]:
    send, receive = trio.open_memory_channel[Report](0)
    found: list[Report] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_worker, order, send, sys.executable, tree=tree))
        async with receive:
            async for report in receive:
                found.append(report)
    return found
