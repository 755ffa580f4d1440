"""What the processors need to know of the broker they serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dledger.settings_tables import MIB, BrokerTable, StoreTable


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one pull may carry; at least one message always fits."""

    max_messages: int
    max_bytes: int


BULK_PULL: Final = ReadLimits(8192, 4 * MIB)
"""One pull of our own SDK: a quarter of the largest frame."""


@dataclass(slots=True)
class BrokerSettings:
    """Read for every request; `dledger.live_settings` alone replaces the tables."""

    address: str
    """Advertised ``ip:port`` of this node."""
    store_host: bytes
    """The same, packed: 8 bytes."""
    broker: BrokerTable = field(default_factory=BrokerTable)
    store: StoreTable = field(default_factory=StoreTable)
    delay_levels_ms: tuple[int, ...] = ()
    msg_region: str = "DefaultRegion"
    trace_on: bool = True
    bulk_pull_limits: ReadLimits = BULK_PULL
    recent_bytes: int = 1024 * MIB
    """Data this near to the end of the log is taken to be in memory."""
    follower_id: int = 1
    """The broker id of this node while it does not lead."""
    max_held_pulls: int = 100_000
    """Pulls waiting in long polling; one more is answered "nothing there" at once."""
