"""``python -m tests.mutants``: test the tests with planted bugs.

::

    list                      every planted bug
    hunt [--fast]             drawn plans in simulated time, blind
    brokers                   drawn plans against real processes
    named                     do the tests that patches name still find their bugs?
    plant NUMBER FOLDER       a source tree with one bug, for ``dledger-chaos run --broker-tree``
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from cyclopts import App, Parameter, validators

from dledger.cli.main import run as run_app
from dledger.jepsen_like.chaos.plan_draw import drawn_plan
from dledger.jepsen_like.chaos.run_command import Extras, no_verdict, play, verdict_of
from dledger.jepsen_like.checkers.verdict import Verdict
from dledger.jepsen_like.plans.plan import Plan, encode_plan
from dledger.output import CliError, ExitCode, Output, note, print_json, print_table
from tests.mutants.hunt import BUDGET_CPU_S, FAST_BUDGET_CPU_S, Hunted, hunt
from tests.mutants.named import run_named
from tests.mutants.patches import REAL_BROKERS, Patch, read_patches
from tests.mutants.real_brokers import Looked, look_for
from tests.mutants.trees import plant_tree, planted_tree

app = App(
    name="mutants",
    help="Planted bugs: list them, hunt them, plant one.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

Only = Annotated[tuple[int, ...], Parameter(help="Numbers of single bugs.")]

FAULTS: Final = "kill,isolate,transfer,clean_restart"
INTERVAL_S: Final = 0.8
"""Most planted bugs need a change of leader: leaders change quickly here."""

RATE: Final = 500.0


def _chosen(only: tuple[int, ...], otherwise: tuple[int, ...] = ()) -> dict[int, Patch]:
    """Return the bugs that are asked for, else *otherwise*, else all, in that order."""
    every = read_patches()
    unknown = sorted(set(only) - set(every))
    if unknown:
        raise CliError(f"no planted bug has the number {unknown[0]}", exit_code=ExitCode.USAGE)
    return {number: every[number] for number in only or otherwise or every}


@app.command(name="list")
def show(*, only: Only = (), output: Output = "table") -> int:
    """Show what is wrong with each bug, and when it acts."""
    rows = [
        {
            "number": patch.number,
            "name": patch.name,
            "acts": patch.acts,
            "finds": ", ".join(patch.finds),
            "preset": patch.preset,
            "faults": patch.faults,
        }
        for patch in _chosen(only).values()
    ]
    if output == "json":
        print_json(rows)
    else:
        print_table("", list(rows[0]), [list(row.values()) for row in rows])
    return ExitCode.OK


@app.command
def plant(number: int, folder: Path, /) -> int:
    """Copy the source tree into FOLDER, with the bug NUMBER in it."""
    _chosen((number,))
    if folder.exists() and any(folder.iterdir()):
        raise CliError(f"{folder} is not empty", exit_code=ExitCode.USAGE)
    folder.mkdir(parents=True, exist_ok=True)
    print(plant_tree(number, folder))
    return ExitCode.OK


@app.command
def named(
    *,
    only: Only = (),
    jobs: Annotated[int, Parameter(help="Runs at the same time, one per core.")] = 2,
) -> int:
    """Run the tests that patches name against their bugs. Exit status 1 when a bug survives."""
    naming = tuple(patch.number for patch in read_patches().values() if patch.tests)
    results = run_named(
        [patch for patch in _chosen(only, naming).values() if patch.tests],
        jobs,
        lambda named: note(
            f"{named.number}: {'found' if named.found else 'SURVIVED'}: {named.said}"
        ),
    )
    survived = [named.number for named in results if not named.found]
    print(f"{len(results) - len(survived)} of {len(results)} found; survived: {survived or 'none'}")
    return ExitCode.FAILED if survived else ExitCode.OK


@app.command(name="hunt")
def hunt_bugs(
    *,
    fast: Annotated[bool, Parameter(help="A subset that is found within seconds.")] = False,
    only: Only = (),
    jobs: Annotated[int, Parameter(help="Hunts at the same time, one per core.")] = 2,
    budget: Annotated[float, Parameter(help="CPU seconds per bug; 0: 600, with --fast 60.")] = 0.0,
    seed: Annotated[int, Parameter(help="First seed of every hunt.")] = 1,
    soak: Annotated[
        bool, Parameter(help="With the workload of a soak, and not with that of the bug.")
    ] = False,
    guided: Annotated[bool, Parameter(help="With --soak: as a guided soak does.")] = False,
    output: Output = "table",
) -> int:
    """Hunt planted bugs with drawn plans. Exit status 1 when one survives."""
    subset = tuple(patch.number for patch in read_patches().values() if patch.fast)
    patches = _chosen(only, subset if fast else ())
    budget_cpu_s = budget or (FAST_BUDGET_CPU_S if fast else BUDGET_CPU_S)

    def on_done(hunted: Hunted) -> None:
        verdict = f"found by seed {hunted.seed}" if hunted.found else "SURVIVED"
        verdict += "" if hunted.counts else ", which does not count"
        note(f"{hunted.number}: {verdict} after {hunted.cpu_s:.1f} CPU s, {hunted.seeds} plans")

    async def hunt_all() -> list[Hunted]:
        return await hunt(
            list(patches),
            jobs=jobs,
            budget_cpu_s=budget_cpu_s,
            first_seed=seed,
            is_soak=soak,
            guided=guided,
            on_done=on_done,
        )

    results = trio.run(hunt_all)
    found = [hunted for hunted in results if hunted.found and hunted.counts]
    rows = [
        {
            "number": hunted.number,
            "name": patches[hunted.number].name,
            "found": hunted.found,
            "counts": hunted.counts,
            "calm": hunted.calm,
            "judges": ", ".join(hunted.judges),
            "seed": hunted.seed,
            "seeds": hunted.seeds,
            "cpu_s": round(hunted.cpu_s, 2),
            "violation": hunted.violation,
        }
        for hunted in results
    ]
    if output == "json":
        print_json(
            {
                "total": len(results),
                "found": len(found),
                "survived": len(results) - len(found),
                "worst_cpu_s": round(max((h.cpu_s for h in results), default=0.0), 2),
                "by_judge": Counter(judge for h in found for judge in h.judges),
                "mutants": rows,
            }
        )
    else:
        columns = ["number", "name", "found", "counts", "calm", "seed", "seeds", "cpu_s"]
        columns += ["judges", "violation"]
        print_table(
            f"{len(found)} of {len(results)} found",
            [name.replace("_", " ") for name in columns],
            [[row[name] for name in columns] for row in rows],
        )
    return ExitCode.OK if len(found) == len(results) else ExitCode.FAILED


@app.command
def brokers(
    *,
    only: Annotated[
        tuple[int, ...], Parameter(help="Numbers; else those that real brokers show soon.")
    ] = (),
    time: Annotated[
        float, Parameter(help="Seconds of each run.", validator=validators.Number(gt=0))
    ] = 20.0,
    seed: Annotated[int, Parameter(help="Of the first plan.")] = 1,
    runs: Annotated[
        int, Parameter(help="Plans at most for a bug.", validator=validators.Number(gte=1))
    ] = 3,
    at_least: Annotated[
        int, Parameter(help="How many must be found; 0: all.", validator=validators.Number(gte=0))
    ] = 0,
    output: Output = "table",
) -> int:
    """Look for planted bugs in real brokers. Exit status 1 when too few are found."""
    soon = tuple(p.number for p in read_patches().values() if REAL_BROKERS in p.finds)
    patches = _chosen(only, soon)

    def plan_of(seed: int) -> Plan:
        return drawn_plan(seed, "mixed", FAULTS, time, RATE, INTERVAL_S, 3, 2)

    def play_one(plan: Plan, number: int) -> list[Verdict]:
        with (
            planted_tree(number) as tree,
            tempfile.TemporaryDirectory(prefix="dledger-planted-") as place,
        ):
            extras = Extras(broker_tree=str(tree or ""))
            (Path(place) / "plan.json").write_text(encode_plan(plan))
            try:
                with no_verdict(Path(place)):
                    ran = play(plan, Path(place), extras, is_live=False)
            except CliError as error:
                return [Verdict("run", "unknown", reason=str(error))]
            return [verdict_of(ran)]

    def on_done(looked: Looked) -> None:
        if looked.seed is None:
            note(f"{looked.number}: not found in {looked.runs} runs")
        else:
            but = "" if looked.counts else ", without it, too"
            note(f"{looked.number}: found by seed {looked.seed}, {looked.shown}{but}")

    looked = look_for(list(patches), range(seed, seed + runs), plan_of, play_one, on_done)
    rows = [
        {
            "name": patches[each.number].name,
            "found": each.seed is not None,
            **msgspec.to_builtins(each),
        }
        for each in looked
    ]
    found = sum(each.seed is not None and each.counts for each in looked)
    if output == "json":
        print_json({"total": len(rows), "found": found, "mutants": rows})
    else:
        columns = ("number", "name", "found", "counts", "seed", "runs", "shown")
        print_table(
            f"{found} of {len(rows)} found",
            list(columns),
            [[row[column] for column in columns] for row in rows],
        )
    return ExitCode.OK if found >= (at_least or len(rows)) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
