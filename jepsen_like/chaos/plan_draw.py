"""Plans for real brokers: drawn at the pace of real elections, and made smaller.

Of the smaller plans of a run that are played, the smallest with the same violation is kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dledger.jepsen_like.chaos.runner import Ran
from dledger.jepsen_like.plans.draw import draw_plan
from dledger.jepsen_like.plans.packages import kinds_named
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, encode_plan
from dledger.jepsen_like.report.wording import many
from dledger.jepsen_like.workloads.presets import workload_for
from dledger.output import CliError

# ---------------------------------------------------------------------------------- drawn


FASTER: Final = 4.0
"""Plans are drawn for the slow timers of the simulator; real elections are faster by this."""

SETTINGS: Final = Settings(
    heartbeat_ms=100,
    election_ms=800,
    segment_bytes=16 << 20,
    queue_units=30_000,
    checkpoint_ms=3_000,
    register_ms=5_000,
    delay_levels="1s 2s 5s 10s",
)


JUMP_AHEAD_MAX_MS: Final = 5_000
"""Of dates, where there are timers: a run waits for them in real time."""

LOCK_LEASE_MS: Final = 3_000
"""Short, so that many end in a run; longer than an election."""


def drawn_plan(
    seed: int,
    workload: str,
    faults: str,
    seconds: float,
    rate: float,
    interval: float,
    members: int,
    name_servers: int,
) -> Plan:
    """Return the plan of *seed* for real brokers; *faults*: kinds and packages, with commas."""
    wanted = workload_for(workload, rate)
    settings = SETTINGS
    if wanted.lockers:
        settings = msgspec.structs.replace(SETTINGS, lock_lease_ms=LOCK_LEASE_MS)
    kinds = kinds_named(part for part in faults.split(",") if part)
    drawn = draw_plan(
        seed,
        seconds * FASTER,
        members=members,
        fault_interval_s=interval * FASTER,
        kinds=kinds,
        workload=wanted,
        settings=settings,
        even=True,
    ).faster(FASTER)
    if wanted.timer_per_mille:
        drawn = drawn.with_steps(tuple(map(_a_little_ahead, drawn.steps)))
    return msgspec.structs.replace(drawn, name_servers=name_servers)


def _a_little_ahead(step: Step) -> Step:
    """A timer that was taken at a date ahead of the time is due later by it, in real time."""
    if step.kind is not Kind.CLOCK_JUMP:
        return step
    return msgspec.structs.replace(step, arg=min(step.arg, JUMP_AHEAD_MAX_MS))


# ---------------------------------------------------------------------------------- made smaller


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
