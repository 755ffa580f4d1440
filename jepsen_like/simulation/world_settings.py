"""What a simulated world is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What a world is made of and how fast it runs.

    Attributes:
        brokers, name_servers: How many.
        heartbeat_ms, election_timeout_ms: Slow: a simulated second costs what happens in it.
        segment_bytes: Small, so that segments roll.
        options: Settings of the brokers over all others, ``table.name`` to value.
        compare_state_every: Tables are compared at every such applied index.
    """

    brokers: int = 3
    name_servers: int = 1
    heartbeat_ms: int = 1000
    election_timeout_ms: int = 3000
    segment_bytes: int = 256 * 1024
    checkpoint_interval_ms: int = 10_000
    client_heartbeat_s: float = 30.0
    route_poll_s: float = 30.0
    rpc_timeout_s: float = 3.0
    compare_state_every: int = 64
    options: Mapping[str, object] = field(default_factory=dict)
