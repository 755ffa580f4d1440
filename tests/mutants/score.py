"""The score: which planted bugs are found, by which kind of judge, and with which workload.

Each bug is hunted with the default workload of a soak and, apart from that, with the workload that
its patch names; on request unit tests run against it. The result of each bug is a line of a record,
so that a score of many hours may end and go on: with a larger budget the bugs that were not found
are hunted on, from the plan behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from tests.mutants.hunt import ASSERTION, HISTORY, INVARIANT, Hunted, hunt
from tests.mutants.patches import Patch, read_patches
from tests.mutants.unseen import found_by_tests_near

UNIT_TEST: Final = "unit test"


class Score(msgspec.Struct):
    """What came of one bug.

    Attributes:
        number: The bug.
        preset: The hunt with the workload and the faults that the patch names; None: none was made.
        soak: The hunt with the default workload of a soak; None: none was made.
        units: Unit tests that import a changed module find it; None: they were not run.
        budget_cpu_s: Of each of the two hunts.
    """

    number: int
    preset: Hunted | None = None
    soak: Hunted | None = None
    units: bool | None = None
    budget_cpu_s: float = 0.0

    @property
    def judges(self) -> frozenset[str]:
        """Kinds of judges that found it, in whichever hunt."""
        hunts = [each for each in (self.preset, self.soak) if each is not None and _is_find(each)]
        found = {judge for each in hunts for judge in each.judges}
        return frozenset(found | {UNIT_TEST} if self.units else found)


def _is_find(hunted: Hunted | None) -> bool:
    return hunted is not None and hunted.found and hunted.counts


def read_scores(record: Path) -> dict[int, Score]:
    """Return the scores in *record* by number, the newest of each; none where there is no file."""
    lines = record.read_text().splitlines() if record.is_file() else []
    return {score.number: score for score in (msgspec.json.decode(s, type=Score) for s in lines)}


def make_scores(
    numbers: Sequence[int],
    known: Mapping[int, Score],
    record: Path,
    budget_cpu_s: float,
    jobs: int,
    first_seed: int,
    *,
    soak: bool,
    brief: bool,
    units: bool,
    tell: Callable[[str], object],
) -> dict[int, Score]:
    """Hunt the bugs, append each result to *record*, and return the results by number.

    Args:
        known: Results of before: what was found there, or had as large a budget, is kept.
        budget_cpu_s: Of each hunt; there are two for a bug.
        soak: Hunt with the default workload of a soak, too.
        brief: Hunt with the workload of a bug only where that of a soak has not found it.
        units: Run the unit tests near each bug, too.
        tell: Gets a line for each bug.
    """
    patches, scores = read_patches(), dict[int, Score]()
    sound: dict[bytes, bool] = {}

    async def go_on(number: int, before: Hunted | None, *, is_soak: bool) -> Hunted:
        spent_s = before.cpu_s if before else 0.0
        if before is not None and (_is_find(before) or spent_s >= budget_cpu_s):
            return before
        (found,) = await hunt(
            [number],
            jobs=1,
            budget_cpu_s=budget_cpu_s - spent_s,
            first_seed=first_seed + (before.seeds if before else 0),
            is_soak=is_soak,
            calm=False,
            sound=sound,
        )
        return found if before is None else hunted_on(before, found)

    async def one(number: int, limiter: trio.CapacityLimiter) -> None:
        before = known.get(number, Score(number))
        async with limiter:
            of_soak, preset = before.soak, before.preset
            if soak:
                of_soak = await go_on(number, of_soak, is_soak=True)
            if not (brief and _is_find(of_soak)):
                preset = await go_on(number, preset, is_soak=False)
        seen = before.units
        if units and seen is None:
            near = partial(found_by_tests_near, patches[number])
            seen = await trio.to_thread.run_sync(near)
        score = scores[number] = Score(number, preset, of_soak, seen, budget_cpu_s)
        if score != before:
            with record.open("a") as file:
                file.write(msgspec.json.encode(score).decode() + "\n")
            tell(f"{number}: {', '.join(sorted(score.judges)) or 'not found'}")

    async def every() -> None:
        limiter = trio.CapacityLimiter(jobs)
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number, limiter)

    trio.run(every)
    return scores


def hunted_on(before: Hunted, found: Hunted) -> Hunted:
    """Return what came of a hunt that went on where *before*, which found nothing, had ended."""
    return msgspec.structs.replace(
        found, seeds=before.seeds + found.seeds, cpu_s=before.cpu_s + found.cpu_s
    )


def facts_of(scores: Mapping[int, Score], patches: Mapping[int, Patch]) -> dict[str, Any]:
    """Return the counts of a score: found and planted, by judge and by workload."""
    every = [score for number, score in scores.items() if number in patches]
    run = [score for score in every if score.units is not None]
    soaks = [score.soak for score in every if score.soak is not None]
    presets = [score.preset for score in every if score.preset is not None]

    def count(scores: Iterable[Score], *judges: str) -> int:
        return sum(any(judge in score.judges for judge in judges) for score in scores)

    return {
        "planted": len(patches),
        "hunted": len(every),
        "budget_cpu_s": sorted({score.budget_cpu_s for score in every}),
        "found": sum(bool(score.judges) for score in every),
        "found_by_simulator": count(every, HISTORY, INVARIANT, ASSERTION),
        "by_history_checker": count(every, HISTORY),
        "by_invariant": count(every, INVARIANT),
        "by_assertion": count(every, ASSERTION),
        "by_unit_test": count(run, UNIT_TEST),
        "unit_tests_run_for": len(run),
        "with_own_workload": sum(map(_is_find, presets)),
        "with_soak_workload": sum(map(_is_find, soaks)),
        "soak_workload_run_for": len(soaks),
        "own_workload_run_for": len(presets),
        "cpu_s_own_workload": round(sum(preset.cpu_s for preset in presets), 1),
        "cpu_s_soak_workload": round(sum(soak.cpu_s for soak in soaks), 1),
        "not_found": sorted(score.number for score in every if not score.judges),
        "act_late": sum(patch.sleeps for patch in patches.values()),
    }


def slowest(scores: Mapping[int, Score], count: int) -> list[int]:
    """Return the bugs that the workload of a soak found last, or not at all."""
    soaks = [score.soak for score in scores.values() if score.soak is not None]
    soaks.sort(key=lambda soak: (_is_find(soak), -soak.cpu_s, soak.number))
    return [soak.number for soak in soaks[:count]]


def compared(plain: Sequence[Hunted], guided: Sequence[Hunted]) -> dict[str, Any]:
    """Return the CPU seconds that hunts of the same bugs took in two orders of plans."""
    found: dict[str, Any] = {}
    for name, hunts in (("plain", plain), ("guided", guided)):
        found[f"{name}_found"] = sum(map(_is_find, hunts))
        found[f"{name}_cpu_s"] = round(sum(hunted.cpu_s for hunted in hunts), 1)
    found["mutants"] = [
        {
            "number": one.number,
            "plain": _shown(one),
            "plain_cpu_s": round(one.cpu_s, 1),
            "guided": f"{_shown(other)} {other.preset}".rstrip(),
            "guided_cpu_s": round(other.cpu_s, 1),
        }
        for one, other in zip(plain, guided, strict=True)
    ]
    return found


def rows_of(scores: Mapping[int, Score], patches: Mapping[int, Patch]) -> list[dict[str, Any]]:
    """Return a row for each bug of a score."""
    return [
        {
            "number": number,
            "name": patch.name,
            "judges": ", ".join(sorted(score.judges)) or "none",
            "own_workload": _shown(score.preset),
            "own_cpu_s": round(score.preset.cpu_s, 1) if score.preset else 0.0,
            "soak": _shown(score.soak),
            "soak_cpu_s": round(score.soak.cpu_s, 1) if score.soak else 0.0,
            "unit_tests": {None: "not run", True: "found", False: "not found"}[score.units],
        }
        for number, patch in patches.items()
        if (score := scores.get(number)) is not None
    ]


def _shown(hunted: Hunted | None) -> str:
    if hunted is None:
        return "not hunted"
    if not hunted.found:
        return f"not in {hunted.seeds} plans"
    return f"seed {hunted.seed}: {hunted.violation}"
