"""Scenes: a few steps that are worth more together than one by one.

None of them knows of a bug. They are moments at which promises are young: a leader does not know
yet that it leads nobody; flushes are under way; an election has just begun; followers hold
different parts of a tail.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from jepsen_like.plans.plan import Kind, Step

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
    """An election at once, and somebody dies at one of the next things its disk does."""
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
    """Who comes back from isolation has a tail to lose, while disks are slow; then power goes."""
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
    """A leader that is alone and does not know it yet is told to change the members."""
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
    """Who has lost something loses power while that is being made whole."""
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
