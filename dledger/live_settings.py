"""What each part of a broker gets of its configuration, at the start and when settings change.

A change is for this broker alone, until it stops: its files stay what they are. All keys of a
request take effect, or none. A change by which less is kept has to be confirmed; the refusal gives
what would go now. A setting that is not declared `is_live` needs a restart, and the refusal names
it; what names a file, an address to listen on or a member is none of them.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from msgspec import structs

from dledger.broker_errors import ConfirmationNeededError, SettingRefusedError
from dledger.broker_settings import LEADER_ID, BrokerSettings, StoreSettings
from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.errors import ConfigError, OffsetOutOfRangeError
from dledger.commitlog.queue_unit import UNIT_BYTES
from dledger.commitlog.record import pack_host
from dledger.commitlog.seams import Disk, UtcOffset, utc
from dledger.config import BrokerConfig
from dledger.group import Group
from dledger.group_api import BrokerGroup
from dledger.proposals import GroupSettings
from dledger.raft.identity import GroupSecret
from dledger.raft.settings import RaftSettings
from dledger.registration import Registration
from dledger.remoting.access.account_file import parse_credentials
from dledger.remoting.connection_limits import DEFAULT_LIMITS, ConnectionLimits
from dledger.remoting.memory_budget import BudgetLimits, FrameSpace, MemoryBudget, budget_bytes
from dledger.remoting.properties import format_properties
from dledger.remoting.protocol.bodies import DataVersion
from dledger.remoting.protocol.codes import BROKER_RESERVED
from dledger.remoting.protocol.own_fields import GivenUp, given_up
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.seams import Clock, ServerTls
from dledger.remoting.server import ServerLimits
from dledger.remoting.tcp import client_tls, server_tls
from dledger.services.limits import DiskSpace
from dledger.services.offset_commits import OffsetCommits
from dledger.services.pending_configs import TopicView
from dledger.services.retention import (
    Look,
    RetentionService,
    SegmentedLog,
    choose_floor,
    first_since,
    force_ratio,
    segment_starts,
)
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings_tables import ROCKETMQ_KEYS, SCHEMA, SETTINGS, StoreTable
from dledger.settings_text import IGNORED_KEYS, IN_SYNC_KEYS, MASTER_AND_SLAVE_KEYS, REFUSED_KEYS
from dledger.state.producer_sessions import SESSIONS_MAX, ProducerSessions
from dledger.state.state_record import AGE, FORCED, SIZE
from dledger.state.tables import QueueBounds, StateTables
from dledger.state.topics import (
    AUTO_CREATE_TOPIC_KEY_TOPIC,
    STATE_TOPIC,
    builtin_groups,
    builtin_topics,
)


def listener_tls(config: BrokerConfig) -> ServerTls:
    """Return the TLS of the client port.

    Raises ConfigError: a file is missing or not what it should be.
    """
    server = config.server
    return server_tls(
        server.tls_mode,
        cert_file=server.tls_cert_file or None,
        key_file=server.tls_key_file or None,
        client_ca_file=server.tls_ca_file or None,
    )


def peer_tls(config: BrokerConfig) -> tuple[ServerTls, ssl.SSLContext] | None:
    """Return the TLS between members, for listening and for dialling; None: plain.

    Raises ConfigError: a file is missing or not what it should be.
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

    Raises ConfigError: the file cannot be read, or holds too little.
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

    Raises ConfigError: the file cannot be read, or not as credentials.
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

    Raises ConfigError: a file is missing or not what it should be.
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

    Raises ConfigError: `broker.broker_ip1` is no IPv4 address.
    """
    host = LOCALHOST.get(config.broker.broker_ip1, config.broker.broker_ip1)
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(
            f"broker.broker_ip1 = {host!r} must be an IPv4 address: it becomes part of message ids"
        ) from None
    return pack_host(host, config.advertised_port)


def empty_tables(config: BrokerConfig, sessions_max: int = SESSIONS_MAX) -> StateTables:
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
        producers=ProducerSessions(sessions_max),
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
        follower_id=config.self_number + 1,
        follower_ids={name: number + 1 for name, number in config.member_numbers.items()},
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


def disk_bytes(config: BrokerConfig, disk: Disk) -> Callable[[], tuple[int, int]]:
    """Return a function for size and free bytes of the log's file system, as `df` counts."""
    root = config.store.path_root_dir
    return lambda: (disk.total_bytes(root), disk.free_bytes(root))


def disk_ratio(config: BrokerConfig, disk: Disk) -> Callable[[], float]:
    """Return a function for the used part of what is used and available, as `df` counts it."""
    root = config.store.path_root_dir
    return lambda: 1.0 - disk.free_bytes(root) / disk.total_bytes(root)


SOURCE: Final = "changed while it runs"

READ_BY_TOOLS: Final = {"filterServerNums": "0", "traceOn": "true"}
"""What `mqadmin exportConfigs` cannot be without: there are no filter servers, and clients' traces
are taken."""

NEVER_TAKEN: Final = frozenset({"rocketmqHome", "brokerConfigPath", "filterServerNums"})
"""Keys by which a RocketMQ broker was made to run commands or to write files: refused, not just
ignored, so that an attempt is seen."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a running broker that settings change."""

    group: Group
    settings: BrokerSettings
    topics: TopicView
    offsets: OffsetCommits
    space: DiskSpace
    retention: RetentionService
    checks: TransactionCheckService
    registration: Registration


class LiveSettings:
    """The settings of a running broker."""

    def __init__(self, config: BrokerConfig, parts: Parts, clock: Clock) -> None:
        self.config = config
        self.version = DataVersion(timestamp=clock.wall_ms())
        self._parts = parts
        self._clock = clock

    def text(self) -> str:
        """Return every setting as properties, under RocketMQ's name where it has one.

        With what RocketMQ's tools read besides and is no setting here.
        """
        found = {
            setting.keys[0] if setting.keys else path: self.config.shown(path)
            for path, setting in SETTINGS.items()
        }
        leads = self._parts.group.leadership is not None
        broker_id = LEADER_ID if leads else self._parts.registration.broker.follower_id
        return format_properties(
            {
                **found,
                **READ_BY_TOOLS,
                "brokerId": str(broker_id),
                "useTLS": "false" if self.config.server.tls_mode == "disabled" else "true",
            }
        )

    def update(
        self, changes: Mapping[str, str], *, asked_by: str = "", is_confirmed: bool = False
    ) -> list[str]:
        """Let settings have other values from now on; all of them or none.

        Returns a sentence for each key that is accepted and changes nothing, as in a file.

        Args:
            changes: RocketMQ's key, or ``table.name``, to text.
            is_confirmed: Messages that are kept now may go because of it.
        Raises:
            SettingRefusedError: Names the key that cannot be changed, or not to that value.
            ConfirmationNeededError: Less would be kept, and that is not confirmed.
        """
        ignored = IGNORED_KEYS.keys() - NEVER_TAKEN
        notes = [
            f"{key} is accepted and changes nothing: {IGNORED_KEYS[key]}"
            for key in changes
            if key in ignored
        ]
        rest = {key: text for key, text in changes.items() if key not in ignored}
        try:
            values = self.config.changes(rest, path_of=path_of, daemon="broker")
            config = self.config.with_values(values, SOURCE)
        except ConfigError as error:
            raise SettingRefusedError(str(error)) from None
        self._refuse_what_needs_a_start(values)
        lost = self._given_up(config, values)
        if lost is not None:
            if not is_confirmed:
                raise ConfirmationNeededError(lost, _command_for(values))
            _log.warning("retention_shortened", asked_by=asked_by, **structs.asdict(lost))
        before, self.config = self.config, config
        _apply(config, self._parts)
        for path in values:
            if path in CAUSED_BY:
                self._parts.retention.asked_by[CAUSED_BY[path]] = asked_by
            _log.info(
                "setting_changed",
                setting=path,
                value=config.shown(path),
                before=before.shown(path),
                asked_by=asked_by,
            )
        if values:
            self.version = DataVersion(
                timestamp=self._clock.wall_ms(), counter=self.version.counter + 1
            )
        for note in notes:
            _log.warning("setting_changes_nothing", text=note, asked_by=asked_by)
        return notes

    def _given_up(self, config: BrokerConfig, values: Mapping[str, Any]) -> GivenUp | None:
        """Return what goes because of the change; None when no less is kept after it."""
        retention, after = self._parts.retention, config.store
        if not keeps_less(retention.settings, after):
            return None
        change = ", ".join(
            f"{path} = {config.shown(path)} (now {self.config.shown(path)})"
            for path in values
            if path in CAUSED_BY
        )
        group = self._parts.group
        return lost_to_settings(group, group.log, after, retention.look(0), change)

    def _refuse_what_needs_a_start(self, values: Mapping[str, Any]) -> None:
        if (
            values.get("broker.auto_create_topic_enable")
            and AUTO_CREATE_TOPIC_KEY_TOPIC not in self._parts.group.state.builtin_topics
        ):
            raise SettingRefusedError(
                f"autoCreateTopicEnable: this broker was started without"
                f" {AUTO_CREATE_TOPIC_KEY_TOPIC}, which clients ask for; it needs a restart"
            )


def path_of(key: str) -> str:
    """Return the path of a setting from RocketMQ's key or from itself.

    Raises SettingRefusedError: there is no such setting, or it changes nothing here.
    """
    path = ROCKETMQ_KEYS.get(key, key)
    if path in SETTINGS:
        return path
    if key in IGNORED_KEYS:
        raise SettingRefusedError(f"{key} changes nothing here: {IGNORED_KEYS[key]}")
    if key in REFUSED_KEYS:
        raise SettingRefusedError(f"{key}: {REFUSED_KEYS[key]}")
    if key in IN_SYNC_KEYS or key in MASTER_AND_SLAVE_KEYS:
        raise SettingRefusedError(f"{key}: the members of the group decide; see dledger raft")
    raise SettingRefusedError(f"there is no setting {key}")


def _command_for(values: Mapping[str, Any]) -> str:
    """Return the sentence that explains how to do it all the same."""
    assignments = " ".join(f"{path}={SCHEMA.show(path, value)}" for path, value in values.items())
    return f"`dledger config set {assignments}` shows what would go, and does it with --yes"


def _apply(config: BrokerConfig, parts: Parts) -> None:
    """Give each part its settings; those that did not change stay as they are."""
    broker, store = config.broker, config.store
    parts.settings.broker, parts.settings.store = broker, store
    parts.topics.auto_create_topic_enable = broker.auto_create_topic_enable
    parts.topics.auto_create_group_enable = broker.auto_create_subscription_group
    parts.offsets.interval_s = broker.flush_consumer_offset_interval_ms / 1000
    parts.space.warning_ratio = store.disk_space_warning_level_ratio / 100
    parts.retention.settings = store
    parts.checks.settings, parts.checks.store = broker, store
    parts.registration.settings = config.client
    entry_bytes_max = parts.group.settings.entry_bytes_max  # what the log can hold at most
    parts.group.settings = replace(group_settings(config), entry_bytes_max=entry_bytes_max)


CAUSED_BY: Final[Mapping[str, str]] = {
    "store.keep_bytes": SIZE,
    "store.file_reserved_time": AGE,
    "store.clean_file_forcibly_enable": FORCED,
    "store.disk_space_clean_forcibly_ratio": FORCED,
}
"""Path of a setting that decides what is kept → the cause of moves of the floor that follow."""


# --------------------------------------------------------------------------- what a change gives up


QUEUES_COUNTED: Final = 1024
"""Queues looked at for one answer: each takes some reads, and everything waits meanwhile."""


def keeps_less(before: StoreTable, after: StoreTable) -> bool:
    """Tell whether messages may go under *after* that *before* keeps. Pure."""
    no_limit = float("inf")
    return (
        (after.keep_bytes or no_limit) < (before.keep_bytes or no_limit)
        or after.file_reserved_time < before.file_reserved_time
        or force_ratio(after) < force_ratio(before)
    )


def lost_to_settings(
    group: BrokerGroup,
    entry_log: SegmentedLog,
    after: StoreTable,
    look: Look,
    change: str,
) -> GivenUp:
    """Return what goes under the settings *after*, all passes of retention together."""
    look = replace(look, is_hour=True, limit_position=entry_log.end_position)
    chosen = choose_floor(entry_log, after, look, segments_max=None)
    if chosen is None:
        return GivenUp(change=change)
    floor, _ = chosen
    counts, uncounted = _messages_before(group, floor.position)
    starts = segment_starts(entry_log, after.mapped_file_size_commit_log)
    gone = (index for index in starts if index <= floor.first_index)
    return given_up(
        change,
        counts,
        uncounted_queues=uncounted,
        segments=sum(1 for _ in gone),
        size_bytes=floor.position - entry_log.first_position,
        newest_ms=floor.prev_store_time_ms,
    )


def lost_to_topic(
    group: BrokerGroup, topic: str, keeps_ms: int, now_ms: int, change: str
) -> GivenUp:
    """Return what goes when *topic* keeps its messages for *keeps_ms* only."""
    queues = [(name, queue_id) for name, queue_id in group.state.queues if name == topic]
    gone = 0
    for name, queue_id in queues[:QUEUES_COUNTED]:
        first = first_since(group, name, queue_id, now_ms - keeps_ms)
        gone += first - group.state.min_offset(name, queue_id)
    return given_up(
        change,
        {topic: gone} if gone else {},
        uncounted_queues=max(0, len(queues) - QUEUES_COUNTED),
        newest_ms=now_ms - keeps_ms if gone else 0,
    )


def has_messages(group: BrokerGroup, topic: str, queue_nums: int) -> bool:
    """Tell whether *topic* holds any message now."""
    state = group.state
    return any(
        state.max_offset(topic, queue_id) > state.min_offset(topic, queue_id)
        for queue_id in range(queue_nums)
    )


def _messages_before(group: BrokerGroup, position: int) -> tuple[dict[str, int], int]:
    """Return how many messages of each topic stand before *position*, and queues not counted."""
    counts: dict[str, int] = {}
    queues = [
        (key, bounds)
        for key, bounds in group.state.queues.items()
        if key[0] != STATE_TOPIC and bounds.max_offset > bounds.min_offset
    ]
    uncounted = max(0, len(queues) - QUEUES_COUNTED)
    for (topic, queue_id), bounds in queues[:QUEUES_COUNTED]:
        try:
            first = _first_at(group, topic, queue_id, bounds, position)
        except OffsetOutOfRangeError:
            uncounted += 1  # a snapshot is being refilled here
            continue
        if first > bounds.min_offset:
            counts[topic] = counts.get(topic, 0) + first - bounds.min_offset
    return counts, uncounted


def _first_at(
    group: BrokerGroup, topic: str, queue_id: int, bounds: QueueBounds, position: int
) -> int:
    """Return the first offset of a queue whose message stands at or after *position*."""
    queue = group.queues.queue(topic, queue_id)
    low, high = bounds.min_offset, bounds.max_offset
    while low < high:
        middle = (low + high) // 2
        if int(queue.read(middle, 1)[0]["phy_offset"]) < position:
            low = middle + 1
        else:
            high = middle
    return low
