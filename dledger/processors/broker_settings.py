"""What the processors need to know of the broker they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from dledger.processors.get_message import ReadLimits

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Fixed for the life of the process."""

    cluster_name: str
    broker_name: str
    address: str
    """Advertised ``ip:port`` of this node."""
    store_host: bytes
    """The same, packed: 8 bytes."""
    broker_permission: int = 6
    max_message_bytes: int = 4 * MIB
    delay_levels_ms: tuple[int, ...] = ()
    slave_read_enable: bool = True
    long_polling_enable: bool = True
    short_polling_time_ms: int = 1000
    msg_region: str = "DefaultRegion"
    trace_on: bool = True

    pull_limits: ReadLimits = field(default=ReadLimits(32, 256 * KIB))
    """One pull of recent data: RocketMQ's clients expect no more."""
    cold_pull_limits: ReadLimits = field(default=ReadLimits(8, 64 * KIB))
    """One pull of data that is probably on disk only."""
    bulk_pull_limits: ReadLimits = field(default=ReadLimits(8192, 4 * MIB))
    """One pull of our own SDK: a quarter of the largest frame."""
    recent_bytes: int = 1024 * MIB
    """Data this near to the end of the log is taken to be in memory."""
    max_held_pulls: int = 100_000
    """Pulls waiting in long polling; one more is answered "nothing there" at once."""
