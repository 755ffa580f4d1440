"""Who leads which broker group, from what answers and routes have said. Pure state.

A route names the leader as broker id 0, but lags: brokers register again after an election, and
clients poll. A "not leader" answer is fresher and carries the term, so it wins until the route
itself changes its mind or the address fails.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Group:
    term: int = -1
    hinted: str | None = None
    routed: str | None = None


class LeaderTable:
    """Broker name → address of the leader."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def address(self, broker_name: str) -> str | None:
        """Return the address to send to, or None when nobody is known to lead."""
        group = self._groups.get(broker_name)
        if group is None:
            return None
        return group.hinted or group.routed

    def term(self, broker_name: str) -> int:
        """Return the highest term heard of, -1 before any."""
        group = self._groups.get(broker_name)
        return -1 if group is None else group.term

    def learn(
        self, broker_name: str, address: str, term: int, *, told_by: str | None = None
    ) -> bool:
        """Take a hint; return whether it was news or a confirmation, False for a stale one.

        A hint of a lower term than one already heard is from a node that has slept, unless the
        very node we took for the leader says so: then the group has been set up anew.

        Args:
            broker_name: The group.
            address: Who is said to lead.
            term: In which term.
            told_by: Address of the node that said it.
        """
        group = self._groups.setdefault(broker_name, _Group())
        if term < group.term and (told_by is None or told_by != group.hinted):
            return False
        group.term = term
        group.hinted = address
        return True

    def take_route(self, broker_name: str, address: str | None) -> None:
        """Take what a fresh route says; it overrides a hint only where it changed."""
        group = self._groups.setdefault(broker_name, _Group())
        if address == group.routed:
            return
        group.routed = address
        if address is not None:
            group.hinted = None

    def suspect(self, broker_name: str, address: str) -> None:
        """Drop the hint to an address that failed; the route's word stands again.

        If the route names the failed address too, a search has to find the next leader.
        """
        group = self._groups.get(broker_name)
        if group is not None and group.hinted == address:
            group.hinted = None
