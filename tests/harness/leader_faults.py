"""Faults of the leader of a simulated cluster, one after the other."""

from __future__ import annotations

from dledger.jepsen_like.plans.plan import Kind, Step
from dledger.jepsen_like.simulation.world import World

KILL_PAUSE_ISOLATE = (
    Step(12_000, Kind.KILL, "leader", 3_000),
    Step(26_000, Kind.PAUSE, "leader", 9_000),
    Step(42_000, Kind.ISOLATE, "leader", 6_000),
)
"""Of a plan that lasts a minute."""


async def pause_and_cut_leaders(world: World, *, calm_s: float, off_s: float = 4) -> None:
    """Twice: pause the leader for 6 s, then cut off the power of the next one.

    Args:
        calm_s: How long nothing happens before each time.
        off_s: How long that machine has no power: nothing answers its clients meanwhile.
    """
    for _ in range(2):
        await world.sleep(calm_s)
        leader = await world.wait_for_leader()
        leader.pause()
        await world.sleep(6)
        leader.resume()
        await world.sleep(4)
        (await world.wait_for_leader()).power_cut()
        await world.sleep(off_s)
        await world.heal()
