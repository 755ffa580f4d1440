"""What NameServers answer, against the members that are there and those that led.

===================  =======================================================================
registered           a member that a NameServer is long connected with stands in its route
leader               where the leader has been connected for a while, the route names it
old leader           a route names no broker as leader that has not led for long
===================  =======================================================================
"""

from __future__ import annotations

from typing import Final

from jepsen_like.simulation.checked_world import CheckedWorld
from jepsen_like.simulation.node import BrokerNode, NameServerNode
from jepsen_like.simulation.steadiness import Steadiness

SPARE_S: Final = 15.0
"""Beside the pause between two registrations: one that fails is repeated after 3 s, and an attempt
to connect takes some."""

LEADER_KNOWN_S: Final = 15.0
"""A change of role is sent at once, and confirmed after an attempt that fails."""

MASTER_ID: Final = 0


class RouteWatch:
    """The routes of one broker group at all NameServers.

    Attributes:
        has_strangers: A process that is no member registers under the name of the group: then the
            leader may be kept out for a while.
    """

    def __init__(self, world: CheckedWorld, steadiness: Steadiness) -> None:
        self._world = world
        self._steadiness = steadiness
        self.has_strangers = False

    def look(self, leader: BrokerNode | None) -> None:
        """Look at every NameServer's route.

        Args:
            leader: One that serves steadily.
        """
        world, now_s = self._world, self._world.elapsed_s
        for broker in world.brokers.values():
            if broker.leads:
                broker.led_s = now_s
        for server in world.name_servers.values():
            if server.is_up and not self.has_strangers:
                self._check_old_leader(server)
                if leader is not None:
                    self._check_members(server, leader)

    def _check_old_leader(self, server: NameServerNode) -> None:
        world, routes = self._world, server.routes
        broker = None if routes is None else routes.broker_addr_table.get("sim")
        address = None if broker is None else broker.broker_addrs.get(MASTER_ID)
        if address is None or routes is None:
            return
        led_s = [node.led_s for node in world.brokers.values() if node.endpoint == address]
        ago_s = world.elapsed_s - max(led_s, default=0.0)
        known = [live for key, live in routes.broker_live_table.items() if key[1] == address]
        kept_ms = max((live.heartbeat_timeout_ms for live in known), default=0)
        if ago_s > (kept_ms + routes.settings.scan_interval_ms) / 1000 + SPARE_S:
            world.violate(
                "route", f"{server.name} names {address} as leader, which led {ago_s:.0f} s ago"
            )

    def _check_members(self, server: NameServerNode, leader: BrokerNode) -> None:
        world, routes, group = self._world, server.routes, leader.group
        if routes is None or group is None:
            return
        members = group.node.roster.members
        names = () if members is None else members.names
        broker = routes.broker_addr_table.get("sim")
        addresses = {} if broker is None else broker.broker_addrs
        for name in names:
            node = world.brokers.get(name)
            if node is None:
                continue
            leads = node is leader
            heard_s = self._steadiness.linked_s(node, server, (leads, group.term))
            settings = node.config.client
            within_s = (settings.register_interval_ms + settings.register_timeout_ms) / 1000
            if heard_s > within_s + SPARE_S and node.endpoint not in addresses.values():
                world.violate(
                    "route",
                    f"{server.name} is connected with {name} for {heard_s:.0f} s: {addresses}",
                )
            served_s = world.elapsed_s - (self._steadiness.served_since_s or world.elapsed_s)
            known_s = min(heard_s, served_s)
            if leads and known_s > LEADER_KNOWN_S and addresses.get(MASTER_ID) != node.endpoint:
                world.violate(
                    "route",
                    f"{server.name} is connected with the leader {name} for {known_s:.0f} s and "
                    f"has {addresses}",
                )
