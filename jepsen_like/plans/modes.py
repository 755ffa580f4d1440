"""Modes: what a plan of a long run has beside its steps and its workload.

Which seeds have a mode is drawn block by block, and what it brings at the end of the drawing of a
plan, from streams of its own, so that what was drawn before stays as it is. Some modes are settings
of the brokers or of the workload, some bring steps, and those of `SIDE_MODES` are work that a
machine of its own does on topics of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec.structs import replace

from dledger.jepsen_like.plans.budget import HURTING
from dledger.jepsen_like.plans.plan import Kind, Plan, Settings, Step, Workload

SIDE_MODES: Final[dict[str, str]] = {
    "compression": "bodies are compressed by the producer, and read back",
    "key_queries": "messages are queried by key",
    "follower_reads": "messages are read from any member",
    "old_commits": "offsets are committed as clients of RocketMQ do, with no wait for the log",
    "live_settings": "settings of brokers are changed while they run",
    "topic_deletion": "topics are deleted and created again under their name",
    "searches": "offsets are searched by time",
    "hostile_contents": "messages with odd names, with separators, empty and as large as can be",
    "access_control": "brokers and NameServers check signatures, and refuse strangers",
    "many_queues": "ten thousand queues are filled and read",
    "half_messages": "a half message stays open until retention has come to it",
    "administration": "topics, groups, modes and offsets are set, and shown by each view",
    "old_routes": "a client sends to one member, whichever leads, and each message once",
}
"""Name and what is done; each counts as ``mode_<name>``, once for each time it was done."""

SETTING_MODES: Final[dict[str, str]] = {
    "async_flush": "acknowledgements do not wait for flushes; power fails at one member at a time",
    "async_master": "a leader acknowledges what it alone has flushed; the law is weaker",
    "three_name_servers": "three NameServers",
    "short_logs": "the log keeps two segments, of the smallest size",
    "many_clients": "forty clients, each of them slower",
    "long_logs": "nothing is removed, and most sends are batches of large messages",
    "small_limits": "sessions, leases, timer loads, pulls and the log are as small as can be",
    "slow_listeners": "a push group whose listeners take long, and are killed meanwhile",
    "ipv6": "NameServers, every second member and every second client have IPv6 addresses",
}
"""Name and what is set; each counts as ``mode_<name>``, once for each run."""

STEP_MODES: Final[dict[str, tuple[Kind, ...]]] = {
    "stalls": (Kind.STALL,),
    "name_server_losses": (Kind.NAMESRV_LOSS,),
    "lying_flushes": (Kind.LYING_FLUSH,),
    "bad_sectors": (Kind.BAD_SECTOR,),
    "file_rot": (Kind.FILE_ROT,),
    "wrong_years": (Kind.CLOCK_YEARS,),
    "minority_away": (Kind.CHANGE_WITHOUT_MINORITY,),
    "role_orders": (Kind.ROLE_ORDER,),
    "old_leaders": (Kind.READ_BURST,),
    "late_promotions": (Kind.MEMBER_REMOVE,),
    "late_snapshots": (Kind.BUGGIFY_KILL,),
    "unknown_outcomes": (Kind.DISK_SLOW,),
    "leads_again": (Kind.TRANSFER,),
}
"""Name and the kinds of the steps it brings; they count as faults."""

MODES: Final = (*SIDE_MODES, *SETTING_MODES, *STEP_MODES)

FIRST_MODES: Final = (
    "compression",
    "key_queries",
    "follower_reads",
    "old_commits",
    "live_settings",
    "topic_deletion",
    "searches",
    "async_flush",
    "async_master",
    "three_name_servers",
    "short_logs",
    "stalls",
    "name_server_losses",
    "lying_flushes",
    "bad_sectors",
    "file_rot",
)
"""Modes whose steps are drawn from one stream, in this order; each later one has its own."""

ROT_COUNTERS: Final = (
    "rot_queues",
    "rot_shared_units",
    "rot_key_index",
    "rot_snapshot",
    "rot_identity",
    "rot_entry_index",
)
"""How often a file of a kind went bad; in the order of `Kind.FILE_ROT`."""

SEEN_COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "hostile_contents": ("hostile_read", "hostile_refused"),
    "access_control": ("stranger_refused",),
    "many_queues": ("queues_filled",),
    "half_messages": ("retention_met_half_message",),
    "old_routes": ("carried_to_leader",),
    "small_limits": ("session_forgotten",),
    "slow_listeners": ("slow_listener_killed",),
    "lying_flushes": ("flushes_undone",),
    "bad_sectors": ("sectors_bad", "read_error"),
    "file_rot": ROT_COUNTERS,
    "wrong_years": ("clock_is_off",),
    "minority_away": ("led_without_minority",),
    "role_orders": ("order_at_role_change",),
    "old_leaders": ("read_at_old_leader",),
    "late_promotions": ("promoted_while_another_lags",),
    "late_snapshots": ("started_while_refilling",),
    "leads_again": ("led_again",),
}
"""What a run counts where a mode has met what it is for, beside how often it was in use."""

COUNTERS: Final = (
    *(f"mode_{name}" for name in (*SIDE_MODES, *SETTING_MODES)),
    *(counter for counters in SEEN_COUNTERS.values() for counter in counters),
)
"""Counters of a run that show how often a mode was in use; a long run reports those at 0."""

ONE_OF: Final = 5
"""Seeds in a row of which one has a mode, mode by mode."""

ONE_OF_MORE: Final = {"many_queues": 16}
"""Likewise, of modes that cost most: this one makes a plan seven times as expensive."""

STEP_EVERY_S: Final = 90.0
"""One step of a mode for this number of seconds."""

ASKED_EVERY_S: Final = 25.0
"""Likewise, of a mode that is asked for."""

UNFLUSHED: Final = HURTING | {
    Kind.MEMBER_REMOVE,
    Kind.MEMBER_REPLACE,
    Kind.CHANGE_WITHOUT_MINORITY,
    Kind.ROLE_ORDER,
}
"""Kinds that are ruled out where members do not flush first: each that ends, by a kill too, is
uncertain of what it has acknowledged and has no vote. Beside it no member may lose its disk, and
half of a list of even length is no majority."""

WHOLE_LAW: Final = frozenset({*SIDE_MODES, "small_limits", "slow_listeners"})
"""Modes that take what is acknowledged for stored: none of an ``ASYNC_MASTER``."""

NO_JUMPS: Final = frozenset({"wrong_years", "small_limits"})
"""Modes without dates that jump: how far store time is ahead could not be judged, and a
message with a time of its own is an hour late by the date of a broker that is an hour behind."""

SHORT_LOGS: Final = frozenset({"short_logs", "half_messages", "small_limits", "late_snapshots"})
"""Modes with a log of two segments: none of them is long."""

LARGE_MESSAGES: Final = frozenset({"long_logs", "late_snapshots"})
"""Modes in which half of the sends are batches of large messages, so that logs grow fast."""

OF_FIVE: Final = {"minority_away": 0.5, "late_promotions": 1.0}
"""Modes whose moments need more members than three, and in how many of their plans there are."""

CAUSES: Final = (Kind.ISOLATE, Kind.TRANSFER, Kind.KILL)
"""What lets another member lead."""

LEFT_BEHIND_MS: Final = (20_000, 50_000)
"""So long a member is cut off with `late_snapshots`: the others' log begins behind it then."""

LAGGING: Final = (Kind.PAUSE, Kind.ISOLATE, Kind.SLOW_LINK)
"""What lets a member stay behind."""

DrawStep = Callable[[Random, Kind, int], Step]

SEGMENT_BYTES: Final = 131_072

MANY_QUEUES_MS: Final = 600_000
"""A plan with ten thousand queues ends after this: each of its minutes costs more."""

HOSTILE_PER_MILLE: Final = 100
"""Messages of the workload with properties that are reserved or odd, with `hostile_contents`."""


def with_modes(
    plan: Plan, seed: int, *, draw_step: DrawStep, draw_last: Callable[[Random, int], Step]
) -> Plan:
    """Return *plan* with the modes of *seed*.

    Args:
        draw_step: Draws a step of a kind at a time, in ms.
        draw_last: Draws the change without a minority that a plan of that length, in ms, ends with.
    """
    rng = Random(f"modes {seed}")
    own = {name: Random(f"mode {name} {seed}") for name in MODES if name not in FIRST_MODES}
    modes = {name for name in MODES if _has(name, seed)}
    steps = list(plan.steps)
    for name in STEP_MODES:
        if name in modes:
            chance = own.get(name, rng)
            steps += _drawn_steps(name, chance, plan, seed, draw_step, STEP_EVERY_S)
    if "minority_away" in modes:
        steps.append(draw_last(own["minority_away"], plan.duration_ms))
    for name, share in OF_FIVE.items():
        if name in modes and own[name].random() < share:
            plan = replace(plan, members=5)
    chosen = tuple(name for name in MODES if name in modes)
    return in_modes(plan.with_steps(tuple(steps)), chosen)


def with_mode(plan: Plan, seed: int, mode: str, *, draw_step: DrawStep) -> Plan:
    """Return *plan* with one mode more, which need not be drawn for *seed*, and with its steps."""
    chance = Random(f"mode {mode} is asked for in {seed}")
    steps = plan.steps
    if mode in STEP_MODES:
        steps += tuple(_drawn_steps(mode, chance, plan, seed, draw_step, ASKED_EVERY_S))
    if chance.random() < OF_FIVE.get(mode, 0.0):
        plan = replace(plan, members=5)
    return in_modes(plan.with_steps(steps), (*plan.modes, mode))


def _drawn_steps(
    name: str, chance: Random, plan: Plan, seed: int, draw_step: DrawStep, every_s: float
) -> list[Step]:
    """Return the steps that a mode brings to a plan."""
    steps: list[Step] = []
    for number in range(max(1, int(plan.duration_ms / 1000 / every_s))):
        at_ms = chance.randrange(max(1, plan.duration_ms))
        steps += _steps_of(name, chance, at_ms, draw_step, seed + number)
    return steps


def _has(mode: str, seed: int) -> bool:
    """Return whether the plan of a seed has a mode: that of one seed in each block of seeds has."""
    block, place = divmod(seed, ONE_OF_MORE.get(mode, ONE_OF))
    return Random(f"mode {mode} in {block}").randrange(ONE_OF_MORE.get(mode, ONE_OF)) == place


def _steps_of(name: str, rng: Random, at_ms: int, draw_step: DrawStep, number: int) -> list[Step]:
    """Return the steps of one scene of a mode; most are a single step."""
    step = draw_step(rng, rng.choice(STEP_MODES[name]), at_ms)
    if name == "file_rot":  # each kind of file in turn
        kinds = len(ROT_COUNTERS)
        return [replace(step, arg=step.arg // kinds * kinds + number % kinds)]
    if name == "role_orders":
        return [step, draw_step(rng, rng.choice(CAUSES), at_ms + rng.randint(1, 2_000))]
    if name == "late_promotions":
        # A member is removed and comes back with an empty disk, while another one stays behind.
        late_ms = at_ms + rng.randint(0, 2_000)
        lag = Step(late_ms, rng.choice(LAGGING), str(rng.randrange(16)), rng.randint(8_000, 25_000))
        slow = replace(lag, arg=rng.randint(200, 1_000)) if lag.kind is Kind.SLOW_LINK else lag
        return [replace(step, target="follower", for_ms=rng.randint(500, 3_000), arg=1), slow]
    if name == "unknown_outcomes":
        # A broker waits less for a majority, and the leader stays: heartbeats need no disk.
        for_ms, flush_ms = rng.randint(200, 3_000), rng.randint(5_500, 9_000)
        return [replace(step, target="all", for_ms=for_ms, arg=flush_ms)]
    if name == "leads_again":  # a process that led, then followed, and has not started again
        pause_ms, (leader, other) = rng.randint(1_000, 5_000), rng.sample("012", 2)
        each = enumerate((leader, other, leader))
        return [replace(step, at_ms=at_ms + at * pause_ms, target=who) for at, who in each]
    if name == "late_snapshots":
        # The first things its disk does when it is back are those of a snapshot and a new log.
        for_ms = rng.randint(*LEFT_BEHIND_MS)
        begin_ms = max(0, at_ms - for_ms)
        behind = Step(begin_ms, Kind.ISOLATE, "most_behind", for_ms)
        back_ms = begin_ms + for_ms + rng.randint(0, 100)
        return [behind, replace(step, at_ms=back_ms, target=behind.target)]
    return [step]


def in_modes(plan: Plan, modes: tuple[str, ...]) -> Plan:
    """Return *plan* with what *modes* set, and without the steps that they rule out."""
    steps, settings, workload, name_servers = (
        plan.steps,
        plan.settings,
        plan.workload,
        plan.name_servers,
    )
    if "async_master" in modes:
        modes = tuple(name for name in modes if name not in WHOLE_LAW)
        settings = replace(settings, async_master=True)
    if "late_promotions" in modes:  # seldom left over otherwise
        modes = tuple(name for name in modes if name != "async_flush")
    if "async_flush" in modes:
        steps = tuple(step for step in steps if step.kind not in UNFLUSHED)
        modes = tuple(
            name for name in modes if not UNFLUSHED.intersection(STEP_MODES.get(name, ()))
        )
        settings = replace(settings, sync_flush=False)
    if NO_JUMPS.intersection(modes):
        steps = tuple(step for step in steps if step.kind is not Kind.CLOCK_JUMP)
    if SHORT_LOGS.intersection(modes):
        modes = tuple(name for name in modes if name != "long_logs")
        settings = replace(settings, keep_segments=2, segment_bytes=SEGMENT_BYTES)
    if "small_limits" in modes:
        settings, workload = _with_small_limits(settings, workload)
    if "many_queues" in modes:
        settings = replace(settings, queue_units=8, checkpoint_ms=10_000)
        plan = replace(plan, duration_ms=min(plan.duration_ms, MANY_QUEUES_MS), members=3)
        steps = tuple(step for step in steps if step.at_ms < plan.duration_ms)
    if "hostile_contents" in modes:
        workload = replace(workload, hostile_per_mille=HOSTILE_PER_MILLE)
    if "many_clients" in modes and "many_clients" not in plan.modes:
        interval_ms = 10 * workload.interval_ms
        workload = replace(workload, producers=24, consumers=8, readers=8, interval_ms=interval_ms)
    if LARGE_MESSAGES.intersection(modes):
        workload = replace(workload, batch_per_mille=500, body_bytes=16_384)
    if "long_logs" in modes:
        settings = replace(settings, keep_segments=0)
    if "slow_listeners" in modes:
        workload = replace(workload, push_members=2, push_change_s=60)
    if "three_name_servers" in modes or "name_server_losses" in modes:
        name_servers = 3
    return replace(
        plan,
        modes=modes,
        steps=tuple(sorted(steps, key=lambda step: step.at_ms)),
        settings=settings,
        workload=workload,
        name_servers=name_servers,
    )


def _with_small_limits(settings: Settings, workload: Workload) -> tuple[Settings, Workload]:
    """Return both with the smallest limits, and with clients that meet each of them."""
    return (
        replace(
            settings, sessions_max=3, timer_load_units=2, pull_messages=3, lock_lease_ms=10_000
        ),
        replace(
            workload,
            idempotent=True,
            producer_life_s=120,
            lockers=2,
            timer_per_mille=100,
            recall_per_mille=30,
        ),
    )
