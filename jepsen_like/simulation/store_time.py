"""Entries as they are applied: their dates, and the timers that are stored anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger.raft.clocks import SKEW_MAX_MS
from dledger.state.apply import Applied
from dledger.state.names import TIMER_TOPIC
from dledger.state.state_record import TimersChange
from jepsen_like.simulation.sim_clock import EPOCH_MS

if TYPE_CHECKING:
    from dledger.group import Group
    from jepsen_like.simulation.node import BrokerNode
    from jepsen_like.simulation.world import World


class StoreTime:
    """The store times of one broker group.

    Attributes:
        ahead_max_ms: How far store time may be ahead of the world's; None: nobody looks. It never
            goes back, so a group that is ahead expires messages that are not old.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.ahead_max_ms: float | None = None
        self._rolled_index = 0

    def allow(self, moved_ns: int) -> None:
        """Look from now on, where the dates of most brokers are off by *moved_ns* at most."""
        self.ahead_max_ms = SKEW_MAX_MS + moved_ns / 1e6

    def watch(self, node: BrokerNode, group: Group) -> None:
        """Look at everything that a replica applies from now on."""
        apply = group.store.apply

        def applied(index: int) -> Applied:
            result = apply(index)
            if node.group is group:
                self._applied(node, group, result)
            return result

        group.store.apply = applied  # type: ignore[method-assign]

    def _applied(self, node: BrokerNode, group: Group, result: Applied) -> None:
        world = self._world
        if result.index > self._rolled_index:
            self._rolled_index = result.index
            if number := rolled(result):
                world.sometimes["timer_rolled"] += number
        if self.ahead_max_ms is None:
            return
        ahead_ms = group.state.last_store_time_ms - EPOCH_MS - 1000 * world.elapsed_s
        if ahead_ms > self.ahead_max_ms:
            world.violate(
                "store_time",
                f"{node.name}, entry {result.index}: {ahead_ms:.0f} ms ahead of the time",
            )


def rolled(result: Applied) -> int:
    """Return how many messages with a time of their own an entry stores anew. Pure."""
    if not any(isinstance(change, TimersChange) and change.done for change in result.changes):
        return 0
    return sum(len(item.units) for item in result.units if item.topic == TIMER_TOPIC)
