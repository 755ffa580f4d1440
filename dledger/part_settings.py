"""What each part of a broker gets of its configuration, security included."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from typing import Final

from commitlog.consume_queue_store import MAX_OPEN_FILES
from commitlog.errors import ConfigError
from commitlog.queue_unit import UNIT_BYTES
from commitlog.record import pack_host
from commitlog.seams import Disk, UtcOffset, utc
from dledger.broker_id import follower_id
from dledger.broker_settings import BrokerSettings
from dledger.config import BrokerConfig
from dledger.proposals import GroupSettings
from dledger.raft.identity import GroupSecret
from dledger.raft.settings import RaftSettings
from dledger.state.names import builtin_groups, builtin_topics
from dledger.state.tables import StateTables
from dledger.store_settings import StoreSettings
from remoting.access.account_file import parse_credentials
from remoting.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from remoting.frame_room import FrameRoom
from remoting.memory_budget import BudgetLimits, MemoryBudget, budget_bytes
from remoting.protocol.not_supported import BROKER_RESERVED
from remoting.protocol.signature import Credentials
from remoting.seams import ServerTls
from remoting.server import ServerLimits
from remoting.tcp import client_tls, server_tls


def listener_tls(config: BrokerConfig) -> ServerTls:
    """Return the TLS of the client port.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    server = config.server
    return server_tls(
        server.tls_mode,
        cert_file=server.tls_cert_file or None,
        key_file=server.tls_key_file or None,
        client_ca_file=server.tls_ca_file or None,
    )


def namesrv_tls(config: BrokerConfig) -> ssl.SSLContext | None:
    """Return the TLS towards NameServers; None: plain.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    client = config.client
    if not client.tls_enable:
        return None
    return client_tls(
        ca_file=client.tls_ca_file or None,
        cert_file=client.tls_cert_file or None,
        key_file=client.tls_key_file or None,
    )


def peer_tls(config: BrokerConfig) -> tuple[ServerTls, ssl.SSLContext] | None:
    """Return the TLS between members, for listening and for dialling; None: plain.

    Both sides show a certificate of the same authorities.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    raft = config.raft
    if not raft.tls_cert_file:
        return None
    cert, key, authorities = raft.tls_cert_file, raft.tls_key_file, raft.tls_ca_file
    return (
        server_tls("enforcing", cert_file=cert, key_file=key, client_ca_file=authorities),
        client_tls(ca_file=authorities, cert_file=cert, key_file=key),
    )


def group_secret(config: BrokerConfig, disk: Disk) -> GroupSecret | None:
    """Return what the members share; None: nothing.

    Raises:
        ConfigError: The file cannot be read, or holds too little.
    """
    path = config.raft.secret_file
    if not path:
        return None
    try:
        return GroupSecret(_read(disk, path).strip())
    except ConfigError as error:
        raise ConfigError(f"raft.secret_file: {error}") from None


def own_credentials(config: BrokerConfig, disk: Disk) -> Credentials | None:
    """Return whom this broker calls itself to NameServers; None: it does not sign.

    Raises:
        ConfigError: The file cannot be read, or not as credentials.
    """
    path = config.client.credentials_file
    return parse_credentials(path, _read(disk, path)) if path else None


def _read(disk: Disk, path: str) -> bytes:
    try:
        return disk.read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


LOCALHOST: Final = {"localhost": "127.0.0.1"}

RESERVED_SHARE: Final = 4
"""At most one part in this number of the connections is reserved: clients are what a broker is
for."""


def raft_settings(config: BrokerConfig, disk: Disk) -> RaftSettings:
    """Return the settings of the Raft member; secrets and certificates are read from their files.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    raft, tls = config.raft, peer_tls(config)
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
        sync_flush=config.sync_flush,
        flush_interval_s=config.store.flush_interval_ms / 1000,
        secret=group_secret(config, disk),
        listen_tls=tls[0] if tls is not None else None,
        dial_tls=tls[1] if tls is not None else None,
    )


def group_settings(config: BrokerConfig) -> GroupSettings:
    """Return the limits of the group."""
    raft = config.raft
    return GroupSettings(
        pending_bytes_max=raft.max_pending_bytes,
        entry_bytes_max=raft.max_entry_bytes,
        quorum_timeout_s=raft.propose_timeout_ms / 1000,
        drain_timeout_s=config.server.shutdown_timeout_ms / 1000,
        checkpoint_interval_s=raft.checkpoint_interval_ms / 1000,
        sync_replication=config.sync_replication,
        scrub_bytes_per_s=config.store.scrub_bytes_per_s,
    )


def packed_address(config: BrokerConfig) -> bytes:
    """Return the advertised address as it stands in message ids.

    Raises:
        ConfigError: `broker.broker_ip1` is no IPv4 address.
    """
    host = LOCALHOST.get(config.broker.broker_ip1, config.broker.broker_ip1)
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(
            f"broker.broker_ip1 = {host!r} must be an IPv4 address: it becomes part of message ids"
        ) from None
    return pack_host(host, config.advertised_port)


def empty_tables(config: BrokerConfig) -> StateTables:
    """Return tables with the built-in topics and groups."""
    return StateTables(
        builtin_topics=builtin_topics(
            config.broker.cluster_name,
            config.broker.broker_name,
            default_topic_queue_nums=config.broker.default_topic_queue_nums,
            delay_levels=len(config.delay_levels_ms),
            auto_create_topic_enable=config.broker.auto_create_topic_enable,
            trace_topic=(
                config.broker.msg_trace_topic_name if config.broker.trace_topic_enable else ""
            ),
        ),
        builtin_groups=builtin_groups(),
    )


def store_settings(
    config: BrokerConfig,
    pid: int,
    queue_files_max: int = MAX_OPEN_FILES,
    utc_offset: UtcOffset = utc,
) -> StoreSettings:
    """Return sizes and places of the files."""
    store = config.store
    return StoreSettings(
        root=store.path_root_dir,
        segment_bytes=store.mapped_file_size_commit_log,
        queue_file_units=store.mapped_file_size_consume_queue // UNIT_BYTES,
        index_slots=store.max_hash_slot_num,
        index_entries_max=store.max_index_num,
        delay_levels_ms=config.delay_levels_ms,
        pid=pid,
        sync_flush=config.sync_flush,
        queue_files_max=queue_files_max,
        utc_offset=utc_offset,
    )


def broker_settings(config: BrokerConfig, store_host: bytes, memory_bytes: int) -> BrokerSettings:
    """Return what processors need."""
    recent = config.store.access_message_in_memory_max_ratio
    return BrokerSettings(
        address=config.advertised_address,
        store_host=store_host,
        broker=config.broker,
        store=config.store,
        delay_levels_ms=config.delay_levels_ms,
        recent_bytes=memory_bytes * recent // 100,
        follower_id=follower_id(f"n{config.self_number}"),
    )


def server_limits(config: BrokerConfig) -> ServerLimits:
    """Return the limits of the port for clients."""
    server = config.server
    return ServerLimits(
        max_connections=server.max_connections,
        reserved_connections=min(
            server.reserved_connections, server.max_connections // RESERVED_SHARE
        ),
        reserved_codes=BROKER_RESERVED,
        connection=ConnectionLimits(
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


def memory_budget(config: BrokerConfig, memory_bytes: int, peer_frames: FrameRoom) -> MemoryBudget:
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


def disk_bytes(config: BrokerConfig, disk: Disk) -> Callable[[], tuple[int, int]]:
    """Return a function for size and free bytes of the log's file system, as `df` counts."""
    root = config.store.path_root_dir
    return lambda: (disk.total_bytes(root), disk.free_bytes(root))


def disk_ratio(config: BrokerConfig, disk: Disk) -> Callable[[], float]:
    """Return a function for the used part of what is used and available, as `df` counts it."""
    root = config.store.path_root_dir
    return lambda: 1.0 - disk.free_bytes(root) / disk.total_bytes(root)
