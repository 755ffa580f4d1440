"""What the processors need to know of the broker they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one pull may carry; at least one message always fits."""

    max_messages: int
    max_bytes: int


@dataclass(slots=True)
class BrokerSettings:
    """Looked at for every request; `dledger.live_settings` alone may change it."""

    cluster_name: str
    broker_name: str
    address: str
    """Advertised ``ip:port`` of this node."""
    store_host: bytes
    """The same, packed: 8 bytes."""
    broker_permission: int = 6
    max_message_bytes: int = 4 * MIB
    delay_levels_ms: tuple[int, ...] = ()
    timer_wheel_enable: bool = True
    timer_max_delay_s: int = 3 * 24 * 3600
    timer_pending_max: int = 10_000_000
    """Messages with a time of their own that wait."""
    disk_warning_ratio: float = 0.9
    """Disk use from which sends are refused."""
    slave_read_enable: bool = True
    long_polling_enable: bool = True
    short_polling_time_ms: int = 1000
    msg_region: str = "DefaultRegion"
    trace_on: bool = True
    enable_property_filter: bool = True
    filter_support_retry: bool = True
    reject_transaction_message: bool = False
    store_reply_message_enable: bool = True

    pull_limits: ReadLimits = field(default=ReadLimits(32, 256 * KIB))
    """One pull of recent data: RocketMQ's clients expect no more."""
    cold_pull_limits: ReadLimits = field(default=ReadLimits(8, 64 * KIB))
    """One pull of data that is probably on disk only."""
    bulk_pull_limits: ReadLimits = field(default=ReadLimits(8192, 4 * MIB))
    """One pull of our own SDK: a quarter of the largest frame."""
    recent_bytes: int = 1024 * MIB
    """Data this near to the end of the log is taken to be in memory."""
    follower_id: int = 1
    """The broker id of this node while it does not lead."""
    max_held_pulls: int = 100_000
    """Pulls waiting in long polling; one more is answered "nothing there" at once."""
