"""Random plans: every fault kind, overlapping, from one seed.

The same seed and arguments give the same plan on every machine. Faults come about every
`fault_interval_s` and last from a moment to a few election timeouts; some seeds concentrate on few
kinds. Some steps bring a scene: a few steps worth more together than one by one, at moments at
which acknowledgements are young.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from msgspec.structs import replace

from dledger.jepsen_like.plans.modes import with_mode, with_modes
from dledger.jepsen_like.plans.plan import (
    ASKED_FOR,
    LINK_QUALITIES,
    REAL_ONLY,
    Kind,
    Plan,
    Settings,
    Step,
    Workload,
)

CUTTING: Final = (Kind.ISOLATE, Kind.MUTE, Kind.DEAF, Kind.PAUSE)
"""Kinds that leave a leader alone."""


def draw_scene(rng: Random, at_ms: int) -> list[Step]:
    """Return the steps of a scene that begins at about *at_ms*."""
    return [step for step in rng.choice(SCENES)(rng, at_ms) if step.at_ms >= 0]


def draw_late_scene(rng: Random, at_ms: int) -> list[Step]:
    """Return the steps of one of `LATE_SCENES`."""
    return rng.choice(LATE_SCENES)(rng, at_ms)


def _alone_before(rng: Random, at_ms: int) -> list[Step]:
    """Whatever happens, it happens to a leader that is alone."""
    before_ms = at_ms - rng.randint(10, 3_000)
    cut = rng.choice(CUTTING)
    return [Step(before_ms, cut, "leader", rng.randint(2_000, 15_000), rng.randint(0, 1))]


def _flushes_and_power(rng: Random, at_ms: int) -> list[Step]:
    """Disks stand still, then power goes."""
    slow_ms = rng.randint(300, 6_000)
    target = rng.choice(("follower", "follower", "most_behind", "leader", "all"))
    return [
        Step(at_ms, Kind.DISK_SLOW, target, rng.randint(3_000, 15_000), slow_ms),
        Step(
            at_ms + rng.randint(500, 5_000),
            rng.choice((Kind.POWER_CUT_ALL, Kind.POWER_CUT_ALL, Kind.POWER_CUT)),
            rng.choice(("leader", "follower", "most_ahead")),
            rng.randint(0, 20_000),
        ),
    ]


def _death_in_an_election(rng: Random, at_ms: int) -> list[Step]:
    """An election at once, and a member is killed at one of the next things its disk does."""
    steps = [Step(at_ms, Kind.ISOLATE, "leader", rng.randint(2_000, 15_000), 1)]
    if rng.random() < 0.5:
        slow_ms = rng.randint(300, 3_000)
        steps.append(Step(at_ms, Kind.DISK_SLOW, "all", rng.randint(3_000, 8_000), slow_ms))
    for _ in range(rng.randint(1, 2)):
        arg = rng.randint(0, 7)
        victim, for_ms = str(rng.randrange(16)), rng.randint(0, 500)
        steps.append(Step(at_ms + rng.randint(0, 50), Kind.BUGGIFY_KILL, victim, for_ms, arg))
    after_ms = at_ms + rng.randint(300, 2_500)
    target = rng.choice(("leader", str(rng.randrange(16))))
    steps.append(Step(after_ms, Kind.ISOLATE, target, rng.randint(2_000, 10_000), 1))
    return steps


def _tail_to_lose(rng: Random, at_ms: int) -> list[Step]:
    """A member that was isolated has a tail to lose, while disks are slow; then power goes."""
    cut_ms = rng.randint(4_000, 12_000)
    slow_ms = rng.randint(300, 4_000)
    return [
        Step(at_ms, Kind.ISOLATE, "leader", cut_ms, rng.randint(0, 1)),
        Step(
            at_ms + rng.randint(0, cut_ms),
            Kind.DISK_SLOW,
            rng.choice(("all", "all", "most_behind")),
            rng.randint(3_000, 10_000),
            slow_ms,
        ),
        Step(
            at_ms + cut_ms + rng.randint(50, 3_000),
            rng.choice((Kind.POWER_CUT, Kind.POWER_CUT, Kind.POWER_CUT_ALL)),
            rng.choice(("most_behind", "follower", "most_ahead")),
            rng.randint(0, 5_000),
        ),
    ]


def _order_to_who_is_alone(rng: Random, at_ms: int) -> list[Step]:
    """A leader that is alone and does not know it yet is asked to change the members."""
    change = rng.choice((Kind.MEMBER_REMOVE, Kind.MEMBER_REMOVE, Kind.MEMBER_ADD))
    return [
        Step(at_ms, Kind.ISOLATE, "leader", rng.randint(4_000, 12_000), 0),
        Step(at_ms + rng.randint(0, 1_500), change, "follower", rng.randint(0, 10_000), 0),
    ]


def _who_is_left_to_lead(rng: Random, at_ms: int) -> list[Step]:
    """One is behind, another one loses its disk, and the leader goes."""
    behind_ms, other = rng.randint(2_000, 8_000), str(rng.randrange(3))
    return [
        Step(at_ms, Kind.ISOLATE, "most_behind", behind_ms, 0),
        Step(
            at_ms + behind_ms - rng.randint(0, 1_000),
            rng.choice((Kind.WIPE, Kind.BIT_ROT)),
            rng.choice(("most_ahead", "most_ahead", other)),
            rng.randint(0, 500),
            rng.randint(1, 8),
        ),
        Step(
            at_ms + behind_ms - rng.randint(-200, 500),
            rng.choice((Kind.KILL, Kind.ISOLATE)),
            "leader",
            rng.randint(5_000, 15_000),
            1,
        ),
    ]


def _leader_cut_off(
    rng: Random, at_ms: int, *, after_ms: tuple[int, int], for_ms: tuple[int, int]
) -> Step:
    begin_ms = at_ms + rng.randint(*after_ms)
    return Step(begin_ms, Kind.ISOLATE, "leader", rng.randint(*for_ms), rng.randint(0, 1))


def _slow_flush_of_a_lost_tail(rng: Random, at_ms: int) -> list[Step]:
    """The disk of a leader stands still; it is cut off, and back before its flush has ended."""
    slow_ms = rng.randint(3_000, 6_000)
    return [
        Step(at_ms, Kind.DISK_SLOW, "leader", rng.randint(8_000, 14_000), slow_ms),
        _leader_cut_off(rng, at_ms, after_ms=(200, 2_500), for_ms=(3_500, 8_000)),
    ]


def _uneven_tails(rng: Random, at_ms: int) -> list[Step]:
    """Links are slow, so followers hold different parts of a tail; then its leader is cut off."""
    bytes_per_s = rng.randint(1_000, 20_000)
    return [
        Step(at_ms, Kind.SLOW_LINK, "leader", rng.randint(5_000, 15_000), bytes_per_s),
        _leader_cut_off(rng, at_ms, after_ms=(1_000, 5_000), for_ms=(4_000, 12_000)),
    ]


def _second_blow(rng: Random, at_ms: int) -> list[Step]:
    """A member that has lost something loses power while that is being made whole."""
    victim = str(rng.randrange(16))
    first = rng.choice((Kind.BIT_ROT, Kind.BIT_ROT, Kind.TORN_TAIL, Kind.POWER_CUT))
    return [
        Step(at_ms, first, victim, rng.randint(0, 500), rng.randint(1, 8)),
        Step(at_ms + rng.randint(800, 6_000), Kind.POWER_CUT, victim, rng.randint(0, 3_000)),
    ]


def _sleeping_leader(rng: Random, at_ms: int) -> list[Step]:
    """A leader stands still until others have elected one, and answers what has waited for it."""
    return [Step(at_ms, Kind.PAUSE, "leader", rng.randint(4_500, 9_000))]


SCENES: Final[tuple[Callable[[Random, int], list[Step]], ...]] = (
    _alone_before,
    _flushes_and_power,
    _death_in_an_election,
    _tail_to_lose,
    _order_to_who_is_alone,
    _who_is_left_to_lead,
    _slow_flush_of_a_lost_tail,
    _uneven_tails,
)

LATE_SCENES: Final = (_second_blow, _sleeping_leader)
"""Scenes that only some seeds have, so that the others keep the plans they had."""


FAULT_INTERVALS_S: Final = (4.0, 8.0, 20.0)
"""Mean pauses between the beginnings of two faults; a plan has one of them."""

QUIET_START_MS: Final = 5_000
"""Steps begin so long after set-up."""

QUIET_END_MS: Final = 2_000
"""And the last begins so long before the end."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a kind is drawn: how often, how long (ms), with which argument."""

    weight: int
    for_ms: tuple[int, int] = (1_000, 20_000)
    arg: tuple[int, int] = (0, 0)
    roles: tuple[str, ...] = ("leader", "leader", "follower", "most_behind", "most_ahead", "#")


_NO_TARGET = ("all",)

SHAPES: Final[dict[Kind, _Shape]] = {
    Kind.KILL: _Shape(12, (0, 15_000)),
    Kind.CLEAN_RESTART: _Shape(5, (0, 8_000)),
    Kind.ROLLING_RESTART: _Shape(1, (0, 2_000), roles=_NO_TARGET),
    Kind.PAUSE: _Shape(8, (500, 15_000)),
    Kind.POWER_CUT: _Shape(12, (0, 15_000)),
    Kind.POWER_CUT_ALL: _Shape(6, (0, 10_000), roles=_NO_TARGET),
    Kind.WIPE: _Shape(2, (0, 10_000), roles=("follower", "leader", "#")),
    Kind.BUGGIFY_KILL: _Shape(6, (0, 10_000), (0, 1_000)),
    Kind.VERSION_SKEW: _Shape(3, (2_000, 20_000)),
    Kind.FD_LIMIT: _Shape(3, (4_000, 40_000), (0, 8)),
    Kind.CONNECTIONS: _Shape(1, (8_000, 40_000), (500, 10_000)),
    Kind.ISOLATE: _Shape(10, (1_000, 25_000), (0, 1)),
    Kind.SPLIT: _Shape(4, (1_000, 25_000), (1, 1_000), _NO_TARGET),
    Kind.MUTE: _Shape(4, (1_000, 20_000)),
    Kind.DEAF: _Shape(4, (1_000, 20_000)),
    Kind.PARTIAL: _Shape(4, (1_000, 25_000), (1, 6)),
    Kind.RING: _Shape(1, (1_000, 20_000), roles=_NO_TARGET),
    Kind.BRIDGE: _Shape(1, (1_000, 20_000)),
    Kind.SWIZZLE: _Shape(2, (2_000, 20_000), roles=_NO_TARGET),
    Kind.CLIENT_CUT: _Shape(3, (500, 15_000)),
    Kind.RESET: _Shape(4, (0, 0)),
    Kind.LOSS: _Shape(4, (1_000, 30_000), (10, 400)),
    Kind.DELAY: _Shape(4, (1_000, 30_000), (10, 3_000)),
    Kind.DUPLICATE: _Shape(4, (5_000, 60_000), (50, 500)),
    Kind.REORDER: _Shape(4, (5_000, 60_000), (50, 500)),
    Kind.HOLD: _Shape(5, (5_000, 60_000), (50, 500)),
    Kind.CORRUPT: _Shape(2, (1_000, 20_000), (10, 200)),
    Kind.SLOW_LINK: _Shape(2, (1_000, 20_000), (200, 20_000)),
    Kind.DISK_FULL: _Shape(2, (2_000, 20_000)),
    Kind.DISK_SLOW: _Shape(
        3, (2_000, 20_000), (10, 6_000), ("leader", "follower", "most_behind", "all", "#")
    ),
    Kind.FSYNC_ERROR: _Shape(3, (0, 10_000)),
    Kind.BIT_ROT: _Shape(2, (0, 10_000), (1, 8)),
    Kind.TORN_TAIL: _Shape(3, (0, 10_000), (1, 8_192)),
    Kind.CLOCK_JUMP: _Shape(2, (0, 0), (-3_600_000, 3_600_000)),
    Kind.CLOCK_DRIFT: _Shape(2, (5_000, 60_000), (-20_000, 20_000)),
    Kind.TRANSFER: _Shape(4, (0, 0), roles=("follower", "most_behind", "most_ahead", "#")),
    Kind.MEMBER_ADD: _Shape(1, (0, 0), roles=_NO_TARGET),
    Kind.MEMBER_REMOVE: _Shape(2, (0, 10_000), (0, 1), ("follower", "most_behind", "leader")),
    Kind.MEMBER_REPLACE: _Shape(1, (0, 5_000), roles=("follower", "most_behind")),
    Kind.NAMESRV_KILL: _Shape(2, (1_000, 60_000), roles=("all", "#", "#")),
    Kind.CLIENT_KILL: _Shape(2, (0, 10_000), roles=("#",)),
    Kind.MID_SEND_KILL: _Shape(2, (0, 10_000), roles=_NO_TARGET),
    Kind.MID_BATCH_KILL: _Shape(2, (0, 10_000), roles=_NO_TARGET),
    Kind.ZOMBIE_CLIENT: _Shape(2, (8_000, 40_000), roles=_NO_TARGET),
    Kind.PROXY_KILL: _Shape(6, (0, 15_000), roles=("#", "#", "all")),
    Kind.PROXY_PAUSE: _Shape(4, (2_000, 40_000), roles=("#", "#", "all")),
    Kind.NAME_THIEF: _Shape(6, (5_000, 60_000), (0, 1), _NO_TARGET),
    Kind.PEER_STRANGER: _Shape(6, (5_000, 60_000), roles=_NO_TARGET),
    Kind.CLOCK_YEARS: _Shape(20, (1_000, 60_000), (-2, 2)),
    Kind.CHANGE_WITHOUT_MINORITY: _Shape(20, (5_000, 90_000), (0, 7), _NO_TARGET),
    Kind.BAD_SECTOR: _Shape(6, (0, 10_000), (0, 7)),
    Kind.FILE_ROT: _Shape(6, (0, 10_000), (0, 47)),
    Kind.LYING_FLUSH: _Shape(3, (500, 10_000), roles=("follower", "leader", "most_ahead", "#")),
    Kind.STALL: _Shape(6, (2_000, 20_000), (50, 1_500)),
    Kind.NAMESRV_LOSS: _Shape(4, (5_000, 60_000), (50, 600), _NO_TARGET),
    Kind.ROLE_ORDER: _Shape(4, (20_000, 40_000), (0, 199), _NO_TARGET),
    Kind.READ_BURST: _Shape(4, (8_000, 20_000), (10, 40), ("leader",)),
}
"""Every kind has a shape; a test holds the two tables together."""

SIMULATED: Final = frozenset(SHAPES) - REAL_ONLY - ASKED_FOR
"""Kinds that are drawn unless others are asked for."""

LATE_SHARE: Final = 0.25
"""Seeds that have late scenes."""

LATE_EVERY_S: Final = 40.0
"""One of these scenes for this number of seconds."""

LAST_CHANGE_MS: Final = (3_000, 40_000)
"""A minority goes away so long before the end of a plan, and stays away."""

LAST_CHANGES: Final = (0, 1, 4, 5, 6, 7)
"""Changes of which a member stays away, also from a group of three."""


def draw_plan(
    seed: int,
    duration_s: float,
    *,
    members: int | None = None,
    fault_interval_s: float | None = None,
    kinds: frozenset[Kind] = SIMULATED,
    workload: Workload | None = None,
    settings: Settings | None = None,
    even: bool = False,
    modes: bool = False,
) -> Plan:
    """Return the plan of *seed*.

    Args:
        seed: Decides everything here; the run's own seed is taken from it too.
        members: Brokers; None: mostly three, sometimes five.
        fault_interval_s: Mean pause between beginnings of faults; None: drawn.
        even: Draw from all *kinds* in every plan, and never concentrate on a few.
    """
    rng = Random(f"plan {seed}")
    if members is None:
        members = 5 if rng.random() < 0.1 else 3
    if fault_interval_s is None:
        fault_interval_s = rng.choice(FAULT_INTERVALS_S)
    allowed = [kind for kind in SHAPES if kind in kinds]
    if rng.random() < 0.4 and len(allowed) > 4 and not even:
        allowed = sorted(rng.sample(allowed, rng.randint(2, 5)), key=allowed.index)
    steps = _draw_steps(rng, allowed, fault_interval_s, duration_s)
    plan = Plan(
        seed=rng.randrange(1 << 32),
        duration_ms=int(duration_s * 1000),
        members=members,
        name_servers=rng.choice((1, 1, 2)),
        workload=workload if workload is not None else _draw_workload(rng),
        settings=settings if settings is not None else _draw_settings(rng),
        note=f"drawn from seed {seed}",
    )
    late = Random(f"late scenes {seed}")
    if late.random() < LATE_SHARE and not even:
        if workload is None:
            rested = replace(plan.workload, rest_per_mille=late.choice((100, 200)))
            plan = replace(plan, workload=rested)
        steps += _draw_late_scenes(late, allowed, duration_s)
    if Kind.CHANGE_WITHOUT_MINORITY in kinds:
        steps.append(_draw_last_change(Random(f"last change {seed}"), plan.duration_ms))
    plan = plan.with_steps(tuple(sorted(steps, key=lambda step: step.at_ms)))
    if not modes:
        return plan
    return with_modes(plan, seed, draw_step=_draw_step, draw_last=_draw_last_change)


def add_mode(plan: Plan, seed: int, mode: str) -> Plan:
    """Return the plan of *seed* with one mode more, whether it is drawn for that seed or not."""
    return with_mode(plan, seed, mode, draw_step=_draw_step)


def _draw_steps(
    rng: Random, allowed: list[Kind], fault_interval_s: float, duration_s: float
) -> list[Step]:
    weights = [SHAPES[kind].weight for kind in allowed]
    steps: list[Step] = []
    at_ms = QUIET_START_MS
    while allowed:
        at_ms += int(rng.expovariate(1.0 / (fault_interval_s * 1000)))
        if at_ms >= int(duration_s * 1000) - QUIET_END_MS:
            break
        kind = rng.choices(allowed, weights)[0]
        steps.append(_draw_step(rng, kind, at_ms))
        chance = rng.random()
        if chance < 0.15:  # things that happen at the same moment
            kind = rng.choices(allowed, weights)[0]
            steps.append(_draw_step(rng, kind, at_ms + rng.choice((0, 0, 1, 10, 500))))
        elif chance < 0.35:
            steps += [step for step in draw_scene(rng, at_ms) if step.kind in allowed]
    return steps


def _draw_late_scenes(rng: Random, allowed: list[Kind], duration_s: float) -> list[Step]:
    last_ms = max(QUIET_START_MS, int(duration_s * 1000) - QUIET_END_MS)
    steps: list[Step] = []
    for _ in range(int(duration_s // LATE_EVERY_S)):
        steps += draw_late_scene(rng, rng.randint(QUIET_START_MS, last_ms))
    return [step for step in steps if step.kind in allowed]


def _draw_last_change(rng: Random, duration_ms: int) -> Step:
    """Return a change without a minority that the end of the plan finds under way."""
    before_ms = rng.randint(*LAST_CHANGE_MS)
    step = _draw_step(rng, Kind.CHANGE_WITHOUT_MINORITY, max(0, duration_ms - before_ms))
    return replace(step, for_ms=LAST_CHANGE_MS[1], arg=rng.choice(LAST_CHANGES))


def _draw_step(rng: Random, kind: Kind, at_ms: int) -> Step:
    shape = SHAPES[kind]
    target = rng.choice(shape.roles)
    if kind in LINK_QUALITIES and rng.random() < 0.5:
        target = "all"
    if target == "#":
        target = str(rng.randrange(16))
    low, high = shape.for_ms
    # Short ones are as interesting as long ones: even over orders of magnitude.
    for_ms = 0 if high == 0 else min(high, int((low or 1) * (high / (low or 1)) ** rng.random()))
    return Step(at_ms, kind, target, for_ms, rng.randint(*shape.arg))


def _draw_workload(rng: Random) -> Workload:
    return Workload(
        producers=rng.choice((1, 2, 2, 3)),
        consumers=rng.choice((1, 1, 2)),
        readers=rng.choice((1, 1, 2)),
        interval_ms=rng.choice((500, 1000, 2000)),
        queues=rng.choice((1, 2, 4)),
        body_bytes=rng.choice((64, 2048, 16_384)),
        delayed_per_mille=rng.choice((0, 100, 300)),
        batch_per_mille=rng.choice((0, 50, 300)),
        producer_life_s=rng.choice((0, 0, 120)),
    )


def _draw_settings(rng: Random) -> Settings:
    return Settings(
        segment_bytes=rng.choice((131_072, 131_072, 262_144)),
        queue_units=rng.choice((8, 64, 512)),
        checkpoint_ms=rng.choice((1_000, 3_000, 30_000)),
        keep_segments=rng.choice((0, 0, 2, 2, 4)),
        append_bytes=rng.choice((4_096, 16_384, 1 << 20)),
    )
