"""How often this node learned of a new leader."""

from __future__ import annotations

from dledger.group_api import BrokerGroup


class LeaderChanges:
    """Counts leaders: another member, or the same one in a new term.

    Attributes:
        total: Since the start; the first leader counts.
    """

    def __init__(self, group: BrokerGroup) -> None:
        self.total = 0
        self._group = group
        self._newest: tuple[int, str] | None = None

    def role_changed(self) -> None:
        """Check the leader; to be put into the group's `on_role_change`."""
        status = self._group.status()
        leader = status.get("leader")
        if leader is not None and (status["term"], leader) != self._newest:
            self._newest = (status["term"], leader)
            self.total += 1
