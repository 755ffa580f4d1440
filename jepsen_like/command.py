"""``dledger sim``: play plans in the simulator, soak, replay, compare two interpreters."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final

import trio
from cyclopts import App, Parameter
from msgspec.structs import replace

from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.checkers.verdict import Violation
from dledger.jepsen_like.history.operation import encode_history
from dledger.jepsen_like.plans.novelty import Novelty
from dledger.jepsen_like.plans.plan import Plan, decode_plan, encode_plan
from dledger.jepsen_like.plans.shrink import shrink
from dledger.jepsen_like.soak import SOMETIMES, Gate, Totals, gate, run_worker
from dledger.jepsen_like.worker import Order, Report, kinds_of, plan_of, report_of, with_preset
from dledger.jepsen_like.workloads.presets import PRESETS
from dledger.output import (
    CliError,
    ExitCode,
    Output,
    live_text,
    note,
    print_json,
    print_table,
    show_facts,
)

app = App(
    name="sim",
    help="Run simulated clusters under faults in virtual time.",
    backend="trio",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

SHRINK_PLAYS: Final = 120
SHRINK_S: Final = 150.0
"""A plan of half an hour takes seconds to play; people wait three minutes at most."""
SOAK_DURATION_S: Final = 1800.0
GUIDED_DURATION_S: Final = 300.0
"""Short plans bring more together: a state, once there, stays for the rest of a plan."""

NEVER_MET_SHOWN: Final = 12
FAILURES_SHOWN: Final = 3
PROGRESS_S: Final = 10.0

Keep = Annotated[Path, Parameter(help="Folder for plans, histories and diagrams of failures.")]
Faults = Annotated[
    str,
    Parameter(
        help="Draw from these faults only, separated by commas; see dledger-chaos list-faults."
    ),
]
Modes = Annotated[
    bool,
    Parameter(
        negative="--no-modes",
        help="Draw the modes of long runs too; see docs/internals/simulation/modes.md.",
    ),
]

DEFAULT_KEEP: Final = Path("sim-failures")


@app.command
def run(
    *,
    seed: Annotated[int | None, Parameter(help="Draw the plan of this seed and play it.")] = None,
    plan: Annotated[Path | None, Parameter(help="Play the plan in this file.")] = None,
    duration: Annotated[float, Parameter(help="Seconds of faults, for a drawn plan.")] = 120.0,
    soak_plan: Annotated[bool, Parameter(help="Draw the plan as soak does.")] = False,
    modes: Modes = True,
    preset: Annotated[
        str,
        Parameter(
            name=["--workload", "--preset"],
            help="Workload by name; see dledger-chaos list-workloads.",
        ),
    ] = "",
    faults: Faults = "",
    print_plan: Annotated[bool, Parameter(help="Print the plan and do not play it.")] = False,
    shrink_failure: Annotated[
        bool, Parameter(name="--shrink", negative="--no-shrink", help="Shrink a plan that fails.")
    ] = True,
    keep: Keep = DEFAULT_KEEP,
    output: Output = "table",
) -> int:
    """Play one plan. Exit status 1 when a violation was found."""
    if (seed is None) == (plan is None):
        raise CliError("give either --seed or --plan", exit_code=ExitCode.USAGE)
    if plan is not None:
        chosen, name = read_plan(plan), plan.stem
    else:
        assert seed is not None
        if preset and preset not in PRESETS:
            raise CliError(f"there is no workload {preset!r}", exit_code=ExitCode.USAGE)
        order = Order(
            duration_s=duration, is_soak=soak_plan, preset=preset, faults=faults, modes=modes
        )
        try:
            chosen, name = plan_of(seed, order), f"seed-{seed}"
        except ConfigError as error:
            raise CliError(str(error), exit_code=ExitCode.USAGE) from None
    if print_plan:
        sys.stdout.write(encode_plan(chosen))
        return ExitCode.OK
    return _play_and_show(chosen, seed or 0, name, output, keep, shrink_it=shrink_failure)


@app.command
def replay(
    file: Annotated[Path, Parameter(help="File of a plan, as a failure writes it.")],
    *,
    keep: Keep = DEFAULT_KEEP,
    output: Output = "table",
) -> int:
    """Play the plan in FILE as it is, and show what happened."""
    return _play_and_show(read_plan(file), 0, file.stem, output, keep, shrink_it=False)


def read_plan(file: Path) -> Plan:
    """Return the plan in *file*. Raises CliError: there is none; a usage error."""
    try:
        return decode_plan(file.read_bytes())
    except (OSError, ConfigError) as error:
        raise CliError(f"{file}: {error}", exit_code=ExitCode.USAGE) from None


def _play_and_show(
    plan: Plan, seed: int, name: str, output: str, keep: Path, *, shrink_it: bool
) -> int:
    from dledger.jepsen_like.simulation.play import play

    begin_s = time.process_time()
    played = play(plan)
    report = report_of(seed, played, time.process_time() - begin_s)
    totals = Totals()
    totals.add(report)
    if output == "json":
        print_json({**totals.as_json(), "digest": played.digest, "validity": report.validity})
    else:
        show_totals(totals, [report])
    if played.is_valid:
        return ExitCode.OK
    if report.validity == "invalid":
        keep_failure(plan, name, keep, shrink_it=shrink_it)
    else:
        note(f"undecided: {report.reason}")
    return ExitCode.FAILED


@app.command
async def soak(
    *,
    minutes: Annotated[float, Parameter(help="Minutes after which no new plan starts.")] = 10.0,
    jobs: Annotated[int, Parameter(help="Worker processes, one per core.")] = 2,
    seed: Annotated[int, Parameter(help="First seed.")] = 1,
    duration: Annotated[
        float, Parameter(help="Simulated seconds of faults per plan; 0: 1800, with --guided 300.")
    ] = 0.0,
    at_least: Annotated[
        float, Parameter(help="Fail when a rare event is rarer than this in a simulated hour.")
    ] = 0.0,
    guided: Annotated[
        bool, Parameter(help="Prefer plans that combine faults and events not seen together yet.")
    ] = False,
    faults: Faults = "",
    modes: Modes = True,
    keep: Keep = DEFAULT_KEEP,
    output: Output = "table",
) -> int:
    """Play drawn plans for some minutes.

    Exit status 1 when a violation was found, or a checker had nothing to judge.
    """
    if minutes <= 0 or jobs < 1:
        raise CliError("--minutes and --jobs are positive", exit_code=ExitCode.USAGE)
    totals, novelty = Totals(), Novelty()
    duration = duration or (GUIDED_DURATION_S if guided else SOAK_DURATION_S)
    order = Order(
        duration_s=duration,
        seconds=minutes * 60,
        is_soak=True,
        faults=faults,
        guided=guided,
        modes=modes,
    )
    try:
        kinds = kinds_of(order)
    except ConfigError as error:
        raise CliError(str(error), exit_code=ExitCode.USAGE) from None
    orders = [replace(order, first=seed + job, step=jobs) for job in range(jobs)]
    begin_s = time.monotonic()
    with live_text(is_shown=output != "json") as update:
        async for report in _reports(orders):
            totals.add(report)
            novelty.note(plan_of(report.seed, with_preset(order, report.preset)), report)
            update(_text_of(totals))
    missing = totals.missing(at_least)
    never = sorted(f"{fault} with {service}" for fault, service in novelty.never_met(kinds))
    if output == "json":
        wall_s = round(time.monotonic() - begin_s, 1)
        reached = {"combinations": len(novelty.reached), "never_met": never}
        print_json({**totals.as_json(), **reached, "wall_s": wall_s, "missing": missing})
    else:
        show_totals(totals, totals.failed)
        note(
            f"{len(novelty.reached):,} combinations of state, fault and service reached; "
            f"{len(never)} of fault and service never met: "
            + ", ".join(never[:NEVER_MET_SHOWN])
            + (" …" if len(never) > NEVER_MET_SHOWN else "")
        )
    for report in totals.failed[:FAILURES_SHOWN]:
        await _keep_apart(report, order, keep)
    if missing:
        note(f"seen less than {at_least} times in a simulated hour: {missing}")
    if modes and output != "json" and (undrawn := totals.never_drawn()):
        note(f"never drawn: {', '.join(undrawn)}")
    if totals.without_verdict:
        note(f"without a verdict: {', '.join(totals.without_verdict)}")
    if totals.failed or missing or totals.undecided or totals.without_verdict:
        return ExitCode.FAILED
    return ExitCode.OK


@app.command
async def determinism(
    *,
    seeds: Annotated[int, Parameter(help="Seeds with a change of leader to compare.")] = 200,
    duration: Annotated[float, Parameter(help="Simulated seconds of faults per plan.")] = 300.0,
    seed: Annotated[int, Parameter(help="First seed.")] = 1,
    output: Output = "table",
) -> int:
    """Play seeds in two interpreters with different hash seeds and compare every event."""
    if seeds < 1 or duration <= 0:
        raise CliError("--seeds and --duration are positive", exit_code=ExitCode.USAGE)
    begin_s = last_s = time.monotonic()

    def show(now: Gate) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PROGRESS_S:
            last_s = time.monotonic()
            note(f"{now.counted} of {seeds} seeds compared, {len(now.differing)} differ")

    found = await gate(seeds, duration, first_seed=seed, on_progress=show)
    facts = {
        "compared": found.counted,
        "wanted": seeds,
        "played": found.played,
        "simulated_s": round(found.simulated_s, 1),
        "differing": found.differing,
        "invalid": sorted(found.invalid),
        "wall_s": round(time.monotonic() - begin_s, 1),
    }
    show_facts(output, "Determinism", facts)
    for number, why in sorted(found.invalid.items()):
        note(f"seed {number} is not valid: {why}")
        note(f"replay: dledger sim run --soak-plan --seed {number} --duration {duration:g}")
    passed = found.counted >= seeds and not (found.differing or found.invalid)
    return ExitCode.OK if passed else ExitCode.FAILED


async def _reports(orders: list[Order]) -> AsyncIterator[Report]:
    """Yield the reports of all workers as they come."""
    send, receive = trio.open_memory_channel[Report](0)
    async with trio.open_nursery() as nursery:
        async with send:
            for order in orders:
                nursery.start_soon(run_worker, order, send.clone(), sys.executable)
        async with receive:
            async for report in receive:
                yield report


def _text_of(totals: Totals) -> str:
    """Return what a person sees while a soak runs."""
    return (
        f"seeds {totals.seeds}   simulated {totals.simulated_s / 3600:,.1f} h   "
        f"x{totals.speed:,.0f} per CPU second   faults {totals.faults.total():,}   "
        f"operations {totals.operations.total():,}   violations {len(totals.failed)}\n"
        + "   ".join(f"{name} {totals.sometimes[name]:,}" for name in SOMETIMES)
    )


def show_totals(totals: Totals, reports: list[Report]) -> None:
    """Print what was done and what was found."""
    print_table(
        "Simulation",
        ["what", "count"],
        [
            ["seeds", totals.seeds],
            ["simulated s", round(totals.simulated_s)],
            ["simulated s per CPU s", round(totals.speed)],
            ["operations", totals.operations.total()],
            ["faults", totals.faults.total() - totals.faults["skipped"]],
            ["seeds with violations", len(totals.failed)],
        ],
    )
    print_table("Sometimes", ["what", "times"], sorted(totals.sometimes.items()))
    print_table("Faults", ["kind", "times"], sorted(totals.faults.items()))
    rows = [
        [report.seed, violation.checker, violation.name, violation.subject, violation.detail]
        for report in reports
        for violation in report.violations[:FAILURES_SHOWN]
    ]
    if rows:
        print_table("Violations", ["seed", "checker", "name", "where", "what"], rows)


def keep_failure(plan: Plan, name: str, folder: Path, *, shrink_it: bool) -> None:
    """Write plan, history and diagram of a failure, and say how to see it again."""
    from dledger.jepsen_like.simulation.diagram import as_svg, as_text
    from dledger.jepsen_like.simulation.play import play

    played = play(plan)
    if not played.violations:
        note(f"{name}: it did not fail a second time in this process: a determinism bug")
        return
    first = played.violations[0]
    plays = 0
    if shrink_it:
        note(f"{name}: {first.name}: shrinking {len(plan.steps)} steps")
        end_s = time.monotonic() + SHRINK_S
        plan, plays = shrink(
            plan,
            lambda candidate: _shows(candidate, first),
            plays_max=SHRINK_PLAYS,
            failed_at_ms=first.at_ns // 1_000_000 or None,
            is_over=lambda: time.monotonic() > end_s,
        )
        played = play(plan)
        first = next(v for v in played.violations if _same(v, first))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(encode_plan(plan))
    (folder / f"{name}.history.cbor").write_bytes(encode_history(played.history))
    text = as_text(played, first)
    (folder / f"{name}.svg").write_text(as_svg(text))
    note(text)
    note(f"{len(plan.steps)} steps after {plays} plays: {file}, {folder / f'{name}.svg'}")
    note(f"replay: dledger sim replay {file}")


async def _keep_apart(report: Report, order: Order, folder: Path) -> None:
    """Keep the failure of a seed, in an interpreter of its own: plays do not nest in trio."""
    command = [sys.executable, "-m", "dledger.cli.main", "sim", "run"]
    command += ["--workload", report.preset] if report.preset else ["--soak-plan"]
    command += ["--seed", str(report.seed), "--duration", str(order.duration_s)]
    command += ["--keep", str(folder)]
    command += ["--faults", order.faults] if order.faults else []
    command += [] if order.modes else ["--no-modes"]
    await trio.run_process(command, check=False, stdout=sys.stderr)


def _same(one: Violation, other: Violation) -> bool:
    return (one.checker, one.name) == (other.checker, other.name)


def _shows(plan: Plan, wanted: Violation) -> bool:
    from dledger.jepsen_like.simulation.play import play

    return any(_same(violation, wanted) for violation in play(plan).violations)
