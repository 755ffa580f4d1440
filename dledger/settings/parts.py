"""What parts of a broker need that is more than their table: secrets, addresses, limits.

Spec: docs/internals/protocol/semantics.md, section 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from dledger.commitlog.errors import ConfigError, LocalProtocolError
from dledger.commitlog.record import pack_host
from dledger.commitlog.seams import Disk
from dledger.raft.identity import GroupSecret
from dledger.raft.settings import RaftSettings
from dledger.remoting.access.account_file import parse_credentials
from dledger.remoting.certificates import Certificates
from dledger.remoting.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from dledger.remoting.memory_budget import BudgetLimits, FrameSpace, MemoryBudget, budget_bytes
from dledger.remoting.protocol.codes import BROKER_RESERVED
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.server import ServerLimits
from dledger.settings.config import BrokerConfig
from dledger.settings.tables import MIB, BrokerTable, StoreTable
from dledger.state.producer_sessions import SESSIONS_MAX, ProducerSessions
from dledger.state.tables import StateTables
from dledger.state.topics import builtin_groups, builtin_topics

# ---------------------------------------------------------------------------------- secrets


def _secret(disk: Disk, path: str) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def group_secret(config: BrokerConfig, disk: Disk) -> GroupSecret | None:
    """Return what the members share; None: nothing.

    Raises ConfigError: the file cannot be read, or holds too little.
    """
    path = config.raft.secret_file
    if not path:
        return None
    try:
        return GroupSecret(_secret(disk, path).strip())
    except ConfigError as error:
        raise ConfigError(f"raft.secret_file: {error}") from None


def own_credentials(config: BrokerConfig, disk: Disk) -> Credentials | None:
    """Return whom this broker calls itself to NameServers; None: it does not sign.

    Raises ConfigError: the file cannot be read, or not as credentials.
    """
    path = config.client.credentials_file
    return parse_credentials(path, _secret(disk, path)) if path else None


# ---------------------------------------------------------------------------------- the group


def raft_settings(config: BrokerConfig, disk: Disk, certificates: Certificates) -> RaftSettings:
    """Return the settings of the Raft member; secrets and certificates are read from their files.

    Raises ConfigError: a file is missing or not what it should be.
    """
    raft, has_tls = config.raft, bool(config.raft.tls_cert_file)
    return RaftSettings(
        cluster=config.broker.cluster_name,
        group=raft.group,
        self_id=raft.self_id,
        peers={peer.id: (peer.host, peer.port) for peer in raft.peers},
        listen_port=raft.listen_port,
        client_address=config.advertised_address,
        election_timeout_s=raft.election_timeout_ms / 1000,
        heartbeat_interval_s=raft.heartbeat_interval_ms / 1000,
        window_bytes=raft.window_bytes,
        append_bytes=raft.append_bytes,
        entry_bytes_max=raft.max_entry_bytes,
        sync_flush=config.store.sync_flush,
        flush_interval_s=config.store.flush_interval_ms / 1000,
        secret=group_secret(config, disk),
        listen_tls=certificates.of_server("enforcing", raft) if has_tls else None,
        dial_tls=certificates.of_client(raft) if has_tls else None,
    )


def empty_tables(config: BrokerConfig, sessions_max: int = SESSIONS_MAX) -> StateTables:
    """Return tables with the built-in topics and groups."""
    broker = config.broker
    return StateTables(
        builtin_topics=builtin_topics(
            broker.cluster_name,
            broker.broker_name,
            default_topic_queue_nums=broker.default_topic_queue_nums,
            delay_levels=len(config.store.delay_levels_ms),
            auto_create_topic_enable=broker.auto_create_topic_enable,
            trace_topic=broker.msg_trace_topic_name if broker.trace_topic_enable else "",
        ),
        builtin_groups=builtin_groups(),
        producers=ProducerSessions(sessions_max),
    )


# ---------------------------------------------------------------------------------- the ports


def packed_address(config: BrokerConfig) -> bytes:
    """Return the advertised address as it stands in message ids.

    Raises ConfigError: `broker.broker_ip1` is no address.
    """
    name = config.broker.broker_ip1
    host = "127.0.0.1" if name == "localhost" else name
    try:
        return pack_host(host, config.advertised_port)
    except LocalProtocolError:
        raise ConfigError(
            f"broker.broker_ip1 = {host!r} must be an IP address: it becomes part of message ids"
        ) from None


def server_limits(config: BrokerConfig) -> ServerLimits:
    """Return the limits of the port for clients."""
    server = config.server
    return ServerLimits.of(
        server,
        BROKER_RESERVED,
        ConnectionLimits(
            max_frame_bytes=server.max_frame_bytes,
            max_in_flight=server.max_in_flight,
            max_in_flight_bytes=server.max_in_flight_bytes,
            max_write_buffer_bytes=server.max_write_buffer_bytes,
            write_buffer_bytes=min(
                DEFAULT_LIMITS.write_buffer_bytes, server.max_write_buffer_bytes
            ),
            idle_timeout_s=server.idle_timeout_s,
        ),
    )


def memory_budget(config: BrokerConfig, memory_bytes: int, peer_frames: FrameSpace) -> MemoryBudget:
    """Return the memory that connections may hold, those of other members included."""
    server = config.server
    return MemoryBudget(
        BudgetLimits(
            total_bytes=budget_bytes(server.memory_budget_bytes, memory_bytes),
            unfinished_bytes=server.max_unfinished_bytes,
            max_frame_bytes=server.max_frame_bytes,
        ),
        peer_frames=peer_frames,
    )


# ---------------------------------------------------------------------------------- the processors


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one pull may carry; at least one message always fits."""

    max_messages: int
    max_bytes: int


BULK_PULL: Final = ReadLimits(8192, 4 * MIB)
"""One pull of our own SDK: a quarter of the largest frame."""


@dataclass(slots=True)
class BrokerSettings:
    """Read for every request; a change while the broker runs is one of the tables."""

    address: str
    """Advertised ``ip:port`` of this node."""
    store_host: bytes
    """The same, packed: 8 bytes, 20 for IPv6."""
    broker: BrokerTable = field(default_factory=BrokerTable)
    store: StoreTable = field(default_factory=StoreTable)
    bulk_pull_limits: ReadLimits = BULK_PULL
    recent_bytes: int = 1024 * MIB
    """Data this near to the end of the log is taken to be in memory."""
    follower_id: int = 1
    """The broker id of this node while it does not lead."""
    follower_ids: Mapping[str, int] = field(default_factory=dict)
    """That of each member that this node's file names."""
    max_held_pulls: int = 100_000
    """Pulls waiting in long polling; one more is answered "nothing there" at once."""

    @classmethod
    def of(cls, config: BrokerConfig, store_host: bytes, memory_bytes: int) -> Self:
        """Return what *config* has of it."""
        recent = config.store.access_message_in_memory_max_ratio
        return cls(
            address=config.advertised_address,
            store_host=store_host,
            broker=config.broker,
            store=config.store,
            recent_bytes=memory_bytes * recent // 100,
            follower_id=config.self_number + 1,
            follower_ids={name: number + 1 for name, number in config.member_numbers.items()},
        )
