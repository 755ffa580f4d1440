"""Plays smaller plans of one run and keeps the smallest with the same violation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.output import CliError
from jepsen_like.chaos.runner import Ran
from jepsen_like.plans.plan import Plan, Step, encode_plan
from jepsen_like.report.wording import many

FOLDER: Final = "minimize"
"""Below the run's folder: the run of the smallest plan so far, and runs without a verdict."""


@dataclass(slots=True)
class Candidates:
    """What was tried.

    Attributes:
        folder: Of the run with a violation.
        wanted: Checker and name of the violation that a smaller plan must show again.
        play: Plays a plan in a folder that holds it as `plan.json`; a `CliError` is no verdict.
        tell: Called with a sentence after each play.
        smallest: The smallest plan so far that showed it; None: none did.
        ran: What came of its play.
        tried: Plays so far.
    """

    folder: Path
    wanted: tuple[str, str]
    play: Callable[[Plan, Path], Ran]
    tell: Callable[[str], object]
    smallest: Plan | None = None
    ran: Ran | None = None
    tried: int = 0

    def fails(self, candidate: Plan) -> bool:
        """Play *candidate* and return whether it shows the same violation."""
        self.tried += 1
        place = self._place()
        (place / "plan.json").write_text(encode_plan(candidate))
        try:
            ran = self.play(candidate, place)
        except CliError as error:
            self.tell(f"run {self.tried}: {error}")
            return False
        is_broken = self.wanted in {
            (v.checker, v.name) for each in ran.verdicts for v in each.violations
        }
        self.tell(
            f"run {self.tried}: {many(len(candidate.steps), 'fault')} in "
            f"{candidate.duration_ms / 1000:.0f} s: "
            f"{'still breaks it' if is_broken else 'does not break it'}"
        )
        # Each holds the brokers' logs, gigabytes in all; one of them is enough to look at.
        if not is_broken:
            shutil.rmtree(place)
        else:
            if self.ran is not None:
                shutil.rmtree(self.ran.folder)
            self.ran, self.smallest = ran, candidate
        return is_broken

    def _place(self) -> Path:
        above = self.folder / FOLDER
        above.mkdir(exist_ok=True)
        taken = [int(path.name) for path in above.iterdir() if path.name.isdigit()]
        place = above / str(max(taken, default=0) + 1)
        place.mkdir()
        return place


def step_text(step: Step) -> list[str]:
    """Return when, what, to whom and for how long, as cells of a table."""
    lasts = f"{step.for_ms / 1000:,.1f} s" if step.for_ms else ""
    return [f"{step.at_ms / 1000:,.1f} s", step.kind.value, step.target, lasts]
