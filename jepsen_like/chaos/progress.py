"""Counters on the screen while a run goes on; nothing for programs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from dledger.cli.output import note
from jepsen_like.plans.plan import Plan
from jepsen_like.report.wording import many

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
    """A context: says what will be done, then shows one line that changes, on standard error.

    Args:
        plan: What is played.
        is_live: Somebody looks; else only the first line is written.
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
