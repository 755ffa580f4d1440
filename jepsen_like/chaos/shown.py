"""What a person reads in the terminal when a run, or a search for a smaller one, is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dledger.cli.output import ExitCode, note, print_table
from jepsen_like.chaos.candidates import Candidates, step_text
from jepsen_like.chaos.extras import Extras
from jepsen_like.chaos.outcome import too_little
from jepsen_like.plans.plan import Plan, encode_plan
from jepsen_like.report.wording import many

VIOLATIONS_SHOWN: Final = 10
"""The report has all; one bug shows in hundreds."""


def show_result(result: dict[str, Any]) -> None:
    """Print what came of a run as tables."""
    names = (
        "verdict",
        "reason",
        "acknowledged",
        "acknowledged_sends",
        "lost",
        "duplicated",
        "faults_done",
        "fault_kinds",
        "aimed_at_leader",
        "failovers",
        "failover_p50_ms",
        "failover_p99_ms",
        "failover_max_ms",
        "report",
    )
    rows = [[name.replace("_", " "), result.get(name)] for name in names]
    print_table("Run", ["what", "value"], [[a, _text(b)] for a, b in rows if b not in ("", None)])
    found = [violation for verdict in result["verdicts"] for violation in verdict["violations"]]
    if found:
        print_table(
            "Violations",
            ["checker", "name", "where", "what", "operations"],
            [
                [v["checker"], v["name"], v["subject"], v["detail"], str(list(v["operations"]))]
                for v in found[:VIOLATIONS_SHOWN]
            ],
        )
    reasons = too_little(result)
    if reasons:
        note(
            f"warning: too little happened for the verdict to prove much: {', '.join(reasons)};"
            " give more --time, or another --seed"
        )
    if result["skipped"]:
        print_table(
            "Skipped",
            ["fault", "times", "why"],
            [[row["kind"], row["count"], row["reason"]] for row in result["skipped"]],
        )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_smallest(
    plan: Plan, candidates: Candidates, extras: Extras, page: Path | None
) -> ExitCode:
    """Write the smallest plan that was found, say what to do with it, or that there is none.

    Args:
        plan: What the search began with.
        candidates: Of the search.
        extras: Of the run.
        page: The report of the smallest plan's run.
    """
    small = candidates.smallest
    if small is None:
        note(
            f"no smaller plan broke it again in {many(candidates.tried, 'run')}. What real time "
            "does differs from run to run: give more --plays, or play the whole plan again:"
        )
        note(extras.command(candidates.folder / "plan.json"))
        return ExitCode.FAILED
    path = candidates.folder / "minimized.json"
    path.write_text(encode_plan(small))
    print_table(
        "Smallest plan",
        ["at", "fault", "target", "lasts"],
        [step_text(step) for step in small.steps],
    )
    note(
        f"{many(len(plan.steps), 'fault')} in {plan.duration_ms / 1000:.0f} s became "
        f"{len(small.steps)} in {small.duration_ms / 1000:.0f} s, "
        f"in {many(candidates.tried, 'run')}"
    )
    note(f"see what it broke: {page}")
    note(f"play it again: {extras.command(path)}")
    note(f"look for it in simulated time: dledger sim run --plan {path}")
    return ExitCode.OK
