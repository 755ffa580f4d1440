"""Searches planted bugs in real brokers: drawn plans, one after the other, until one shows it.

The counterpart of `tests.mutants.hunt`, which does so in simulated time. A bug counts as found when
the same plan is valid without it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.plans.plan import Plan

CLEAN_TRIES = 2
"""So often is a plan played without the bug that comes to no verdict: a machine may be busy."""

Play = Callable[[Plan, int], Sequence[Verdict]]
"""Plays a plan in brokers with a planted bug, 0: none, and returns what the checkers say."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What came of looking for one bug.

    Attributes:
        number: The bug.
        seed: Of the plan that showed it; None: none did.
        shown: Checker and name of the first violation.
        runs: Plans played.
        counts: That plan is valid without the bug.
    """

    number: int
    seed: int | None = None
    shown: str = ""
    runs: int = 0
    counts: bool = False


def look_for(
    numbers: Iterable[int],
    seeds: Sequence[int],
    plan_of: Callable[[int], Plan],
    play: Play,
    tell: Callable[[Looked], object],
) -> list[Looked]:
    """Look for each bug with the plans of *seeds*, until one shows it; tell of each."""
    sound: dict[int, bool] = {}
    done: list[Looked] = []
    for number in numbers:
        looked = _look_for_one(number, seeds, plan_of, play)
        if looked.seed is not None:
            if looked.seed not in sound:
                sound[looked.seed] = _is_sound(plan_of(looked.seed), play)
            looked = replace(looked, counts=sound[looked.seed])
        tell(looked)
        done.append(looked)
    return done


def _is_sound(plan: Plan, play: Play) -> bool:
    for _ in range(CLEAN_TRIES):
        validities = {verdict.validity for verdict in play(plan, 0)}
        if validities == {"valid"}:
            return True
        if "invalid" in validities:
            return False
    return False


def _look_for_one(
    number: int, seeds: Sequence[int], plan_of: Callable[[int], Plan], play: Play
) -> Looked:
    for runs, seed in enumerate(seeds, start=1):
        broken = [v for verdict in play(plan_of(seed), number) for v in verdict.violations]
        if broken:
            return Looked(number, seed, f"{broken[0].checker}: {broken[0].name}", runs)
    return Looked(number, runs=len(seeds))
