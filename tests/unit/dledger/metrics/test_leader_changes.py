"""How often a node learned of a new leader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from dledger.group_api import BrokerGroup
from dledger.metrics.leader_changes import LeaderChanges


@dataclass
class Roles:
    """A group of which only the status is asked."""

    now: dict[str, Any] = field(default_factory=dict)

    def status(self) -> dict[str, Any]:
        return self.now


def test_a_leader_counts_once_and_again_in_another_term() -> None:
    roles = Roles()
    changes = LeaderChanges(cast(BrokerGroup, roles))
    seen = []
    for term, leader in [
        (0, None), (1, None), (1, "n0"), (1, "n0"), (2, None), (2, "n1"), (3, "n1"), (3, None),
        (3, "n1"),
    ]:  # fmt: skip
        roles.now = {"term": term, "leader": leader}
        changes.role_changed()
        seen.append(changes.total)
    assert seen == [0, 0, 1, 1, 1, 2, 3, 3, 3]
