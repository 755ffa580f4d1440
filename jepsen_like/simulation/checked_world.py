"""What checks need of the world that they look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jepsen_like.simulation.node import BrokerNode, NodeWorld


class CheckedWorld(NodeWorld, Protocol):
    """A world with one broker group.

    Attributes:
        last_leader, last_term: The newest leader that was seen.
    """

    last_leader: BrokerNode | None
    last_term: int

    @property
    def brokers(self) -> Mapping[str, BrokerNode]:
        """The brokers by name."""

    def leader(self) -> BrokerNode | None:
        """Return the running broker that may act as leader in the highest term, if any."""
