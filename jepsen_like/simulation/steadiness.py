"""Since when a leader has served with a connected majority, and brokers with each NameServer.

What is demanded of a cluster within a bound is demanded only of one that was left alone for so
long. Checked once a second of virtual time; a fault that comes and ends between two checks shows
in the incarnations of the nodes and in the clocks.
"""

from __future__ import annotations

from typing import Any, Final

from jepsen_like.simulation.checked_world import CheckedWorld
from jepsen_like.simulation.machine import Node
from jepsen_like.simulation.node import BrokerNode

LOOK_S: Final = 1.0
"""Between two checks."""


class Steadiness:
    """What has not changed since when; times are those of the run.

    Attributes:
        served_since_s: Since when the leader of now has served steadily; None: none does.
        date_since_s: Since when no broker's date was moved.
    """

    def __init__(self, world: CheckedWorld) -> None:
        self._world = world
        self._leader: tuple[Any, ...] = ()
        self._dates: list[tuple[int, float]] = []
        self._pairs: dict[tuple[str, str], tuple[tuple[Any, ...], float]] = {}
        self.served_since_s: float | None = None
        self.date_since_s = 0.0

    def look(self) -> BrokerNode | None:
        """Look; return the leader that serves steadily, None without one."""
        world, now_s = self._world, self._world.elapsed_s
        dates = [(node.clock_offset_ms, node.clock_drift_ppm) for node in world.brokers.values()]
        if dates != self._dates:
            self._dates, self.date_since_s = dates, now_s
        node = world.leader()
        if node is None or node.group is None or not self._is_served(node):
            self.served_since_s, self._leader = None, ()
            return None
        leader = (node.name, node.incarnation, node.group.term)
        if leader != self._leader:
            self.served_since_s, self._leader = now_s, leader
        return node

    def _is_served(self, node: BrokerNode) -> bool:
        group = node.group
        assert group is not None
        members = group.node.roster.members
        voters = () if members is None else members.voter_names
        there = [name for name in voters if self._is_there(node, name)]
        return (
            2 * len(there) > len(voters)
            and _has_a_good_disk(node)
            and not len(group.store.log.damaged)
            and not group.node.state.has_hole
        )

    def _is_there(self, node: BrokerNode, name: str) -> bool:
        other = self._world.brokers.get(name)
        return other is node or (
            other is not None
            and other.is_up
            and _has_a_good_disk(other)
            and self.is_linked(node, other)
        )

    def is_linked(self, one: Node, other: Node) -> bool:
        """Whether frames pass both ways between two nodes as if nothing were wrong."""
        links = self._world.network.links
        return links[one.name, other.name].is_healthy and links[other.name, one.name].is_healthy

    def linked_s(self, one: Node, other: Node, what: object = None) -> float:
        """Return for how long two nodes have run and been linked, and *what* was the same.

        It counts from the first call on, and is to be called at each look.
        """
        key, now_s = (one.name, other.name), self._world.elapsed_s
        if not (one.is_up and other.is_up and self.is_linked(one, other)):
            self._pairs.pop(key, None)
            return 0.0
        now = (one.incarnation, other.incarnation, what)
        then = self._pairs.get(key)
        if then is None or then[0] != now:
            then = self._pairs[key] = (now, now_s)
        return now_s - then[1]


def _has_a_good_disk(node: Node) -> bool:
    disk = node.disk
    harmed = disk.delay_s or disk.late_s or disk.flush_failures
    return not harmed and disk.capacity_bytes is None
