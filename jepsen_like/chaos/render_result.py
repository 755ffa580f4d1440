"""What a person reads in the terminal: counters while a run goes on, tables when it has ended."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dledger.output import ExitCode, note, print_table
from jepsen_like.chaos.minimize import Candidates, step_text
from jepsen_like.chaos.run_options import Extras
from jepsen_like.chaos.run_result import too_little
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


REFRESHES_PER_S: Final = 4

Tell = Callable[[str, Counter[str], Counter[str]], None]


def progress_line(phase: str, elapsed_s: float, counts: Counter[str], done: Counter[str]) -> str:
    """Return what a person sees of a run that goes on.

    Args:
        phase: What is being done.
        elapsed_s: Since the run began.
        counts: Operations by name and outcome, e.g. ``send_ok``.
        done: Faults by kind, and ``skipped`` beside them.
    """
    ended = {
        word: sum(n for name, n in counts.items() if name.endswith(word))
        for word in ("ok", "info", "fail")
    }
    faults = sum(n for kind, n in done.items() if kind != "skipped")
    return (
        f"{elapsed_s:.0f} s, {phase}: {ended['ok']:,} ok, {ended['info']:,} unknown, "
        f"{ended['fail']:,} failed, {faults} faults, {done['skipped']} skipped"
    )


class Progress:
    """A context: prints what will be done, then shows one line that changes, on standard error.

    Args:
        plan: What is played.
        is_live: A person watches; else only the first line is written.
    """

    def __init__(self, plan: Plan, *, is_live: bool) -> None:
        self._plan = plan
        self._is_live = is_live and sys.stderr.isatty()
        self._live: Any = None
        self._begin_s = time.monotonic()

    def __enter__(self) -> Tell:
        plan = self._plan
        note(
            f"{many(len(plan.steps), 'fault')} in {plan.duration_ms / 1000:.0f} s against "
            f"{many(plan.members, 'broker')}, {plan.note or f'seed {plan.seed}'}"
        )
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S)
            self._live.start()
            self._tell("starting", Counter(), Counter())
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _tell(self, phase: str, counts: Counter[str], done: Counter[str]) -> None:
        if self._live is not None:
            elapsed_s = time.monotonic() - self._begin_s
            self._live.update(progress_line(phase, elapsed_s, counts, done))
