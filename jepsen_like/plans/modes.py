"""Modes: what a plan of a long run has beside its steps and its workload.

A mode is drawn from a stream of its own at the end of the drawing of a plan, so that what was
drawn before stays as it is. Some modes are settings of the brokers, some bring steps, and those of
`SIDE_MODES` are work that a machine of its own does on topics of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec.structs import replace

from jepsen_like.plans.plan import Kind, Plan, Step

SIDE_MODES: Final[dict[str, str]] = {
    "compression": "bodies are compressed by the producer, and read back",
    "key_queries": "messages are queried by key",
    "follower_reads": "messages are read from any member",
    "old_commits": "offsets are committed as clients of RocketMQ do, with no wait for the log",
    "live_settings": "settings of brokers are changed while they run",
    "topic_deletion": "topics are deleted and created again under their name",
    "searches": "offsets are searched by time",
}
"""Name and what is done; each counts as ``mode_<name>``, once for each time it was done."""

SETTING_MODES: Final[dict[str, str]] = {
    "async_flush": "acknowledgements do not wait for flushes; power fails at one member at a time",
    "async_master": "a leader acknowledges what it alone has flushed; the law is weaker",
    "three_name_servers": "three NameServers",
    "short_logs": "the log keeps two segments, of the smallest size",
}
"""Name and what is set; each counts as ``mode_<name>``, once for each run."""

STEP_MODES: Final[dict[str, tuple[Kind, ...]]] = {
    "stalls": (Kind.STALL,),
    "name_server_losses": (Kind.NAMESRV_LOSS,),
    "lying_flushes": (Kind.LYING_FLUSH,),
    "bad_sectors": (Kind.BAD_SECTOR,),
    "file_rot": (Kind.FILE_ROT,),
}
"""Name and the kinds of the steps it brings; they count as faults."""

MODES: Final = (*SIDE_MODES, *SETTING_MODES, *STEP_MODES)

ROT_COUNTERS: Final = (
    "rot_queues",
    "rot_shared_units",
    "rot_key_index",
    "rot_snapshot",
    "rot_identity",
    "rot_entry_index",
)
"""How often a file of a kind went bad; in the order of `Kind.FILE_ROT`."""

COUNTERS: Final = (*(f"mode_{name}" for name in (*SIDE_MODES, *SETTING_MODES)), *ROT_COUNTERS)
"""Counters of a run that show how often a mode was in use; a long run reports those at 0."""

SHARE: Final = 0.2
"""Of plans that have a mode, mode by mode."""

STEP_EVERY_S: Final = 90.0
"""One step of a mode for this number of seconds."""

UNFLUSHED: Final = frozenset({Kind.LYING_FLUSH})
"""Kinds that prove nothing of members that do not flush first."""

DrawStep = Callable[[Random, Kind, int], Step]

SEGMENT_BYTES: Final = 131_072


def with_modes(plan: Plan, seed: int, *, draw_step: DrawStep) -> Plan:
    """Return *plan* with the modes of *seed*.

    Args:
        draw_step: Draws a step of a kind at a time, in ms.
    """
    rng = Random(f"modes {seed}")
    modes = tuple(name for name in MODES if rng.random() < SHARE)
    steps = list(plan.steps)
    for name, kinds in STEP_MODES.items():
        if name in modes:
            for _ in range(max(1, int(plan.duration_ms / 1000 / STEP_EVERY_S))):
                at_ms = rng.randrange(max(1, plan.duration_ms))
                steps.append(draw_step(rng, rng.choice(kinds), at_ms))
    return in_modes(plan.with_steps(tuple(steps)), modes)


def in_modes(plan: Plan, modes: tuple[str, ...]) -> Plan:
    """Return *plan* with what *modes* set, and without the steps that they rule out."""
    steps, settings, name_servers = plan.steps, plan.settings, plan.name_servers
    if "async_flush" in modes:
        steps = tuple(step for step in steps if step.kind not in UNFLUSHED)
        settings = replace(settings, sync_flush=False)
    if "async_master" in modes:
        # Work beside the workload takes what is acknowledged for stored.
        modes = tuple(name for name in modes if name not in SIDE_MODES)
        settings = replace(settings, async_master=True)
    if "short_logs" in modes:
        settings = replace(settings, keep_segments=2, segment_bytes=SEGMENT_BYTES)
    if "three_name_servers" in modes or "name_server_losses" in modes:
        name_servers = 3
    in_order = tuple(sorted(steps, key=lambda step: step.at_ms))
    return replace(plan, modes=modes, steps=in_order, settings=settings, name_servers=name_servers)
