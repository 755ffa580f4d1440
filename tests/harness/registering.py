"""A broker of the fake group that registers at NameServers of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from dledger.registration import Registration
from dledger.settings.parts import BrokerSettings
from dledger.settings.tables import BrokerTable, ClientTable
from dledger.state.state_record import TopicsChange
from dledger.testing.doubles import VirtualClock
from tests.harness.fake_group import BROKER, CLUSTER, LEADER, FakeGroup


@dataclass(eq=False)
class Line:
    """Stands for a connection, on both sides."""

    attributes: dict[str, Any] = field(default_factory=dict)
    on_close: list[Callable[[Line], None]] = field(default_factory=list)

    def note_heartbeat(self) -> None:
        """Nothing here takes a connection away."""

    def close(self, _reason: str) -> None:
        for callback in self.on_close:
            callback(self)


class RegisteringBroker:
    """The group, and what keeps it known to the NameServers.

    Args:
        client: Stands for the remoting client.
        addresses: Of the NameServers, read each time they are needed.
    """

    def __init__(
        self, root: Path, clock: VirtualClock, client: object, addresses: Sequence[str]
    ) -> None:
        self.clock = clock
        self.group = FakeGroup(root, clock)
        self.registration = Registration(
            self.group,
            client,  # type: ignore[arg-type]  # a fake with what it uses
            BrokerSettings(
                LEADER,
                bytes(8),
                BrokerTable(cluster_name=CLUSTER, broker_name=BROKER),
                follower_id=3,
            ),
            ClientTable(),
            lambda: addresses,
            clock,
        )
        self.group.on_applied.append(self.registration.on_applied)

    async def change(self, **changes: Any) -> None:
        """Change topics as `TopicsChange` has it, and let the NameServers have the news."""
        self.group.store(TopicsChange(**changes))
        await trio.sleep(0.1)
