"""``dledger-chaos mutants``: test the tester with planted bugs in real brokers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter, validators

from dledger.output import CliError, ExitCode, Output, note, print_json, print_table
from jepsen_like.chaos.plan_draw import drawn_plan
from jepsen_like.chaos.planted import Looked, look_for
from jepsen_like.chaos.run_command import no_verdict, play, verdict_of
from jepsen_like.chaos.run_options import Extras
from jepsen_like.checkers.verdict import Verdict
from jepsen_like.mutants.registry import IN_REAL_BROKERS, names, numbers
from jepsen_like.plans.plan import Plan, encode_plan

FAULTS: Final = "kill,isolate,transfer,clean_restart"
INTERVAL_S: Final = 0.8
"""Most planted bugs sleep until the fourth term: leaders change quickly here."""

RATE: Final = 500.0
COLUMNS: Final = ("number", "name", "found", "counts", "seed", "runs", "shown")


def mutants(
    *,
    only: Annotated[tuple[int, ...], Parameter(help="Numbers; else those that fall at once.")] = (),
    time: Annotated[
        float, Parameter(help="Seconds of each run.", validator=validators.Number(gt=0))
    ] = 20.0,
    seed: Annotated[int, Parameter(help="Of the first plan.")] = 1,
    runs: Annotated[
        int, Parameter(help="Plans at most for a bug.", validator=validators.Number(gte=1))
    ] = 3,
    at_least: Annotated[
        int, Parameter(help="So many must be found; 0: all.", validator=validators.Number(gte=0))
    ] = 0,
    output: Output = "table",
) -> int:
    """Look for planted bugs in real brokers. Exit status 1 when one is not found."""
    chosen = only or IN_REAL_BROKERS
    unknown = sorted(set(chosen) - set(numbers()))
    if unknown:
        raise CliError(f"no planted bug has the number {unknown[0]}", exit_code=ExitCode.USAGE)

    def plan_of(seed: int) -> Plan:
        return drawn_plan(seed, "mixed", FAULTS, time, RATE, INTERVAL_S, 3, 2)

    def play_one(plan: Plan, number: int) -> list[Verdict]:
        with tempfile.TemporaryDirectory(prefix="dledger-planted-") as place:
            (Path(place) / "plan.json").write_text(encode_plan(plan))
            try:
                with no_verdict(Path(place)):
                    ran = play(plan, Path(place), Extras(mutant=number), is_live=False)
            except CliError as error:
                return [Verdict("run", "unknown", reason=str(error))]
            return [verdict_of(ran)]

    looked = look_for(chosen, range(seed, seed + runs), plan_of, play_one, _tell)
    about = names(chosen)
    rows = [
        {"name": about[each.number], "found": each.seed is not None, **msgspec.to_builtins(each)}
        for each in looked
    ]
    found = sum(each.seed is not None and each.counts for each in looked)
    if output == "json":
        print_json({"total": len(rows), "found": found, "mutants": rows})
    else:
        print_table(
            f"{found} of {len(rows)} found",
            list(COLUMNS),
            [[row[column] for column in COLUMNS] for row in rows],
        )
    return ExitCode.OK if found >= (at_least or len(rows)) else ExitCode.FAILED


def _tell(looked: Looked) -> None:
    if looked.seed is None:
        note(f"{looked.number}: not found in {looked.runs} runs")
    else:
        but = "" if looked.counts else ", without it, too"
        note(f"{looked.number}: found by seed {looked.seed}, {looked.shown}{but}")
