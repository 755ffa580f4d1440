"""Plans for real brokers: drawn like those of the simulator, at the pace of real elections."""

from __future__ import annotations

from typing import Final

import msgspec

from jepsen_like.plans.draw import draw_plan
from jepsen_like.plans.packages import kinds_named
from jepsen_like.plans.plan import Kind, Plan, Settings, Step
from jepsen_like.workloads.presets import workload_for

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
    """Return the plan of *seed* for real brokers.

    Args:
        workload: Name of a preset.
        faults: Kinds and packages, with commas.
        seconds: How long load and faults go on.
        rate: Operations a second that clients aim at.
        interval: Mean seconds between two faults.
    """
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
