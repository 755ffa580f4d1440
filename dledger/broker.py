"""One broker daemon, put together: store, group, processors, server, registration.

Order of start: open and replay the store, join the group, serve clients, register. Order of a
clean stop: leave the NameServers, take nothing new, answer what is in flight, close the store.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog
import trio

from client.core.name_server import NameServers
from commitlog.consume_queue import MAX_OPEN_FILES, UNIT_BYTES
from commitlog.errors import ConfigError
from commitlog.record import pack_host
from commitlog.seams import Disk, UtcOffset, utc
from commitlog.store_paths import StorePaths
from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.broker_id import follower_id
from dledger.config import BrokerConfig
from dledger.doors import group_secret, listener_tls, namesrv_tls, own_credentials, peer_tls
from dledger.group import Group, GroupSettings
from dledger.live_settings import LiveSettings, Parts
from dledger.membership_changes import MembershipChanges
from dledger.metrics.broker_metrics import BrokerMetrics
from dledger.metrics.leader_changes import LeaderChanges
from dledger.metrics.traffic import Traffic
from dledger.processors.admin import AuthProcessor, BrokerConfigProcessor
from dledger.processors.broker_settings import BrokerSettings, ReadLimits
from dledger.processors.raft import RaftChangeProcessor
from dledger.processors.rights import topic_of_message_at
from dledger.processors.transactions import CheckBack
from dledger.processors.wiring import (
    LOCAL_ADMIN,
    BrokerProcessors,
    LogFolder,
    ProcessorSeams,
    TableSettings,
    broker_rules,
    register_processors,
)
from dledger.raft.clocks import VotersClock
from dledger.raft.identity import Identity, check_owner
from dledger.raft.node import RaftSettings
from dledger.registration import Registration, RegistrationSettings
from dledger.retention_settings import retention_settings
from dledger.services.fence import LeaderService
from dledger.services.local_hour import HOUR_MS
from dledger.services.retention import RetentionService
from dledger.services.schedule import ScheduleMessageService
from dledger.services.table_limits import TableLimits
from dledger.services.timer import TimerMessageService
from dledger.services.transaction_check import CheckSettings, TransactionCheckService
from dledger.state.names import builtin_groups, builtin_topics
from dledger.state.tables import StateTables
from dledger.store import ReplicaStore, StoreSettings
from remoting.access.account_store import AccountStore
from remoting.access.gate import AccessGate, guarded_table
from remoting.access.local_admin import LocalAdmin
from remoting.client import RemotingClient
from remoting.connection import DEFAULT_LIMITS, ConnectionLimits
from remoting.frame_room import FrameRoom
from remoting.memory_budget import BudgetLimits, MemoryBudget, budget_bytes
from remoting.metrics.http_server import MetricsServer
from remoting.metrics.server_metrics import Guard, ServerMetrics
from remoting.processor import ProcessorTable
from remoting.protocol.codes import RequestCode
from remoting.protocol.reserved_codes import BROKER_RESERVED
from remoting.seams import Clock, Executor, Network, Rng
from remoting.server import RemotingServer, ServerLimits

log = structlog.get_logger(__name__)

DEFAULT_MEMORY_BYTES: Final = 2_684_354_560
"""2.5 GiB, for who does not say how much the machine has: 40 % of it is 1 GiB."""

LOCALHOST: Final = {"localhost": "127.0.0.1"}

HAND_OVER_ELECTIONS: Final = 4
"""How many election timeouts a clean stop spends on giving the leadership away."""

HAND_OVER_LOOK_S: Final = 0.01

LINGER_S: Final = 0.3
"""How long a former leader goes on telling clients where to go before it closes connections."""


PULLS: Final = frozenset(
    {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.BULK_PULL}
)
"""What the VIP channel does not answer, as in RocketMQ."""

RESERVED_SHARE: Final = 4
"""At most one part in so many of the connections is reserved: clients are what a broker is for."""

FAST_SHARE: Final = 4
"""The VIP channel takes so much fewer connections: few clients are that old."""


@dataclass(frozen=True, slots=True)
class World:
    """The seams a broker lives on."""

    clock: Clock
    rng: Rng
    network: Network
    disk: Disk
    executor: Executor
    pid: int = 0
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    utc_offset: UtcOffset = utc
    queue_files_max: int = MAX_OPEN_FILES


@dataclass(slots=True)
class Broker:
    """A broker that runs."""

    live: LiveSettings
    group: Group
    server: RemotingServer
    fast_server: RemotingServer | None
    registration: Registration
    address: tuple[str, int]
    metrics_address: tuple[str, int] | None = None


async def serve_broker(
    config: BrokerConfig,
    *,
    clock: Clock,
    rng: Rng,
    network: Network,
    disk: Disk,
    executor: Executor,
    stop: trio.Event,
    pid: int = 0,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    measure_loop: bool = False,
    utc_offset: UtcOffset = utc,
    queue_files_max: int = MAX_OPEN_FILES,
    task_status: trio.TaskStatus[Broker] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a broker until *stop* is set, then end it cleanly.

    Args:
        memory_bytes: That the process may use; recent messages are taken to be in a part of it,
            and connections may hold another part.
        utc_offset: Local time, for hours of the day.
        queue_files_max: Consume queue files that may be open.
        measure_loop: The event loop is a real one: the length of its turns is shown.
    Raises:
        ConfigError, ForeignStoreError, StoreLockedError, OSError: It could not start; the data
            folder is as it was.
        CorruptStoreError: Damage that only peers can repair; the folder is as it was.
        FlushFailedError, InvariantBroken: It had to stop; the folder is as after a crash.
    Cancellation: Ends at once, as a crash does.
    """
    world = World(
        clock, rng, network, disk, executor, pid, memory_bytes, utc_offset, queue_files_max
    )
    store_host = _packed_address(config)
    # Before the store is opened: opening replays and marks the folder as in use.
    check_owner(
        disk,
        StorePaths(config.store.path_root_dir).identity,
        cluster=config.broker.cluster_name,
        group=config.raft.group,
        name=config.raft.self_id,
    )
    store = ReplicaStore(
        disk,
        _store_settings(config, pid, queue_files_max, utc_offset),
        partial(_empty_tables, config),
    )
    closed = False
    try:
        group = _make_group(config, store, world, store_host)
        async with (
            _measured(group, measure_loop),
            _run_parts(config, group, world, store_host) as broker,
        ):
            log.info(
                "broker_started",
                address=config.advertised_address,
                replayed=store.replayed,
                unclean=store.unclean,
            )
            task_status.started(broker)
            await stop.wait()
            await _leave(broker, broker.live.config, clock)
        await group.close()
        closed = True
    finally:
        if not closed:
            store.close(clean=False)


@asynccontextmanager
async def _measured(group: Group, is_wanted: bool) -> AsyncIterator[None]:
    if not is_wanted:
        yield
        return
    with group.loop_stall.measuring():
        yield


async def _leave(broker: Broker, config: BrokerConfig, clock: Clock) -> None:
    timeout_s = config.server.shutdown_timeout_ms / 1000
    election_timeout_s = config.raft.election_timeout_ms / 1000
    handed_over = await _hand_over(broker.group, clock, election_timeout_s)
    with trio.move_on_after(timeout_s):
        await broker.registration.unregister()
    if handed_over:
        # Those who were sent to the new leader go; whoever still asks here is told where it is.
        await clock.sleep(min(LINGER_S, timeout_s))
    if not await broker.group.drain():
        log.warning("stopped_with_proposals_in_flight")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.server.drain, timeout_s)
        if broker.fast_server is not None:
            nursery.start_soon(broker.fast_server.drain, timeout_s)


async def _hand_over(group: Group, clock: Clock, election_timeout_s: float) -> bool:
    """Give the leadership away, so that nobody has to miss this node first; tell whether it did.

    Followers and single members have nothing to give.
    """
    deadline = clock.monotonic() + HAND_OVER_ELECTIONS * election_timeout_s
    while group.node.is_leader and clock.monotonic() < deadline:
        try:
            if await group.transfer_leadership():
                break
        except ChangePendingError:
            await clock.sleep(HAND_OVER_LOOK_S)
        except (ChangeRefusedError, NotLeaderError) as error:
            log.info("leadership_not_handed_over", reason=str(error))
            return False
    while not group.node.is_leader and group.node.leader_id is None:
        if clock.monotonic() >= deadline:
            return False
        await clock.sleep(HAND_OVER_LOOK_S)
    return not group.node.is_leader


@asynccontextmanager
async def _run_parts(
    config: BrokerConfig, group: Group, world: World, store_host: bytes
) -> AsyncIterator[Broker]:
    settings = _broker_settings(config, store_host, world.memory_bytes)
    dates = VotersClock(world.clock, group.node.clocks)
    retention = RetentionService(
        group,
        lambda: group.store.log,
        retention_settings(config),
        clock=dates,
        levels=len(config.delay_levels_ms),
        saved_index=lambda: group.store.saved_index,
        disk_ratio=_disk_ratio(config, world.disk),
        utc_offset=world.utc_offset,
    )
    processors = BrokerProcessors.build(
        group,
        settings,
        ProcessorSeams(dates, world.rng, world.executor, world.pid),
        _table_settings(config),
        LogFolder(
            _disk_ratio(config, world.disk),
            _disk_bytes(config, world.disk),
            retention.expire_soon,
        ),
    )
    retention.is_deleting = processors.topics.is_deleting
    schedule = ScheduleMessageService(
        group,
        dates,
        config.delay_levels_ms,
        is_deleting=processors.topics.is_deleting,
        entry_bytes_max=group.settings.entry_bytes_max,
    )
    timer = TimerMessageService(
        group,
        dates,
        processors.timer_claims,
        is_deleting=processors.topics.is_deleting,
        entry_bytes_max=group.settings.entry_bytes_max,
        roll_window_ms=config.store.timer_roll_window_slot * 1000,
    )
    checks = TransactionCheckService(
        group,
        processors.topics,
        processors.transactions,
        CheckBack(processors.clients, settings),
        CheckSettings(
            timeout_ms=config.broker.transaction_timeout_ms,
            interval_ms=config.broker.transaction_check_interval_ms,
            checks_max=config.broker.transaction_check_max,
            reserved_ms=config.store.file_reserved_time * HOUR_MS,
        ),
        clock=dates,
        floor_wanted=lambda: retention.wanted_position,
    )
    group.services += [
        LeaderService(schedule.name, schedule.run),
        LeaderService(timer.name, timer.run),
        LeaderService(checks.name, checks.run),
        LeaderService("consumer_offsets", processors.offsets.run),
        LeaderService(retention.name, retention.run),
    ]
    accounts = None
    if config.server.acl_enable:
        accounts = AccountStore(world.disk, config.server.acl_file)
    table, guard = _processor_table(
        group,
        accounts,
        world,
        config.broker.cluster_name,
        open_admin=config.server.open_admin,
    )
    group.on_role_change.append(processors.role_changed)
    processors.register(table)
    changes = RaftChangeProcessor(MembershipChanges(group, world.clock))
    register_processors(table, group, changes)
    server = RemotingServer(
        world.network,
        table,
        limits=_server_limits(config),
        tls=listener_tls(config),
        after_batch=group.kick,
        budget=_memory_budget(config, world.memory_bytes, group.peer_frames),
    )
    async with trio.open_nursery() as nursery:
        remoting = RemotingClient(
            nursery,
            world.network,
            connect_timeout_s=config.client.connect_timeout_ms / 1000,
            tls=namesrv_tls(config),
            credentials=own_credentials(config, world.disk),
        )
        registration = _make_registration(config, group, remoting, world, nursery)
        parts = Parts(
            group,
            settings,
            processors.topics,
            processors.offsets,
            processors.space,
            retention,
            checks,
            registration,
        )
        live = LiveSettings(config, parts, world.clock)
        register_processors(table, group, BrokerConfigProcessor(live), AuthProcessor())
        await nursery.start(group.run)
        address: tuple[str, int] = await nursery.start(
            server.serve, config.server.listen_host, config.server.listen_port
        )
        fast_server = await _serve_fast(config, group, world, table, server.budget, nursery)
        servers = [server] if fast_server is None else [server, fast_server]
        metrics_address = await _serve_metrics(
            config,
            group,
            processors,
            settings,
            retention,
            ServerMetrics(servers, guard),
            world,
            nursery,
        )
        if accounts is not None:
            nursery.start_soon(accounts.keep_reading, world.clock, world.executor)
        nursery.start_soon(processors.run)
        nursery.start_soon(registration.run)
        yield Broker(live, group, server, fast_server, registration, address, metrics_address)
        nursery.cancel_scope.cancel()


def _processor_table(
    group: Group, accounts: AccountStore | None, world: World, cluster: str, *, open_admin: bool
) -> tuple[ProcessorTable, Guard | None]:
    if accounts is not None:
        rules = broker_rules(topic_of_message_at(group), cluster)
        gate = AccessGate(accounts, rules, world.clock, world.rng)
        return guarded_table(gate), gate
    if open_admin:
        return ProcessorTable(None), None
    local = LocalAdmin(LOCAL_ADMIN)
    return ProcessorTable(local.guard), local


async def _serve_fast(
    config: BrokerConfig,
    group: Group,
    world: World,
    table: ProcessorTable,
    budget: MemoryBudget,
    nursery: trio.Nursery,
) -> RemotingServer | None:
    """Serve the VIP channel of old clients, if its port is free; they find the other one, too."""
    port = config.fast_listen_port
    if not port:
        return None
    limits = _server_limits(config)
    server = RemotingServer(
        world.network,
        table.without(PULLS),
        limits=replace(
            limits,
            max_connections=max(limits.max_connections // FAST_SHARE, 1),
            reserved_connections=limits.reserved_connections // FAST_SHARE,
        ),
        tls=listener_tls(config),
        after_batch=group.kick,
        budget=budget,
    )
    try:
        await nursery.start(server.serve, config.server.listen_host, port)
    except OSError as error:
        log.warning(
            "fast_port_left_out",
            port=port,
            error=str(error),
            next_step="set server.fast_listen_port to a free port, or to 0",
        )
        return None
    return server


async def _serve_metrics(
    config: BrokerConfig,
    group: Group,
    processors: BrokerProcessors,
    settings: BrokerSettings,
    retention: RetentionService,
    ports: ServerMetrics,
    world: World,
    nursery: trio.Nursery,
) -> tuple[str, int] | None:
    """Serve the page for Prometheus, if it is wanted and its port is free."""
    wanted = config.metrics_address
    if wanted is None:
        return None
    traffic = Traffic(lambda: group.leadership is not None)
    leaders = LeaderChanges(group)
    metrics = BrokerMetrics(
        group,
        processors,
        settings,
        traffic,
        leaders,
        ports=ports,
        given_up_bytes=retention.given_up_bytes,
        member=config.raft.self_id,
        clock=world.clock,
    )
    server = MetricsServer(world.network, metrics.pieces)
    try:
        address: tuple[str, int] = await nursery.start(server.serve, *wanted)
    except OSError as error:
        # Who watches a broker misses the page; who uses it must not miss the broker.
        log.warning(
            "metrics_port_left_out",
            address=f"{wanted[0]}:{wanted[1]}",
            error=str(error),
            next_step="set metrics.listen_port to a free port, or to 0",
        )
        return None
    processors.throughput.traffic = traffic
    group.on_units.append(traffic.on_units)
    group.on_role_change.append(leaders.role_changed)
    leaders.role_changed()
    log.info("metrics_served", address=f"{address[0]}:{address[1]}")
    return address


def _make_registration(
    config: BrokerConfig,
    group: Group,
    remoting: RemotingClient,
    world: World,
    nursery: trio.Nursery,
) -> Registration:
    names = NameServers(
        remoting,
        world.network,
        world.clock,
        world.rng,
        config.broker.namesrv_addr,
        address_server_url=config.client.address_server or None,
    )
    nursery.start_soon(names.keep_reading)
    registration = Registration(
        group,
        remoting,
        RegistrationSettings(
            cluster_name=config.broker.cluster_name,
            broker_name=config.broker.broker_name,
            address=config.advertised_address,
            self_id=f"n{config.self_number}",
            interval_s=config.client.register_interval_ms / 1000,
            timeout_s=config.client.register_timeout_ms / 1000,
        ),
        lambda: names.list.addresses,
        clock=world.clock,
    )
    group.on_role_change.append(registration.role_changed)
    group.status_parts.append(registration.status)
    group.on_applied.append(registration.on_applied)
    return registration


def _make_group(
    config: BrokerConfig, store: ReplicaStore, world: World, store_host: bytes
) -> Group:
    raft = config.raft
    tls = peer_tls(config)
    identity = Identity(
        world.disk,
        store.paths.identity,
        cluster=config.broker.cluster_name,
        group=raft.group,
        name=raft.self_id,
        rng=world.rng,
    )
    return Group(
        store,
        identity,
        RaftSettings(
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
            secret=group_secret(config, world.disk),
            listen_tls=tls[0] if tls is not None else None,
            dial_tls=tls[1] if tls is not None else None,
        ),
        GroupSettings(
            pending_bytes_max=raft.max_pending_bytes,
            entry_bytes_max=raft.max_entry_bytes,
            quorum_timeout_s=raft.propose_timeout_ms / 1000,
            drain_timeout_s=config.server.shutdown_timeout_ms / 1000,
            checkpoint_interval_s=raft.checkpoint_interval_ms / 1000,
            sync_replication=config.sync_replication,
            scrub_bytes_per_s=config.store.scrub_bytes_per_s,
        ),
        store_host=store_host,
        clock=world.clock,
        rng=world.rng,
        network=world.network,
        executor=world.executor,
    )


def open_replica(config: BrokerConfig, disk: Disk, *, pid: int = 0) -> ReplicaStore:
    """Open the files of a broker as it would itself; for tools, while no broker runs on them.

    Raises: As `ReplicaStore`.
    """
    return ReplicaStore(disk, _store_settings(config, pid), lambda: _empty_tables(config))


def _packed_address(config: BrokerConfig) -> bytes:
    host = LOCALHOST.get(config.broker.broker_ip1, config.broker.broker_ip1)
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(
            f"broker.broker_ip1 = {host!r} must be an IPv4 address: it becomes part of message ids"
        ) from None
    return pack_host(host, config.advertised_port)


def _empty_tables(config: BrokerConfig) -> StateTables:
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


def _store_settings(
    config: BrokerConfig,
    pid: int,
    queue_files_max: int = MAX_OPEN_FILES,
    utc_offset: UtcOffset = utc,
) -> StoreSettings:
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


def _broker_settings(config: BrokerConfig, store_host: bytes, memory_bytes: int) -> BrokerSettings:
    store = config.store
    return BrokerSettings(
        cluster_name=config.broker.cluster_name,
        broker_name=config.broker.broker_name,
        address=config.advertised_address,
        store_host=store_host,
        broker_permission=config.broker.broker_permission,
        max_message_bytes=store.max_message_size,
        delay_levels_ms=config.delay_levels_ms,
        timer_wheel_enable=config.store.timer_wheel_enable,
        timer_max_delay_s=config.store.timer_max_delay_sec,
        timer_pending_max=config.store.timer_pending_max,
        disk_warning_ratio=config.store.disk_space_warning_level_ratio / 100,
        slave_read_enable=config.broker.slave_read_enable,
        long_polling_enable=config.broker.long_polling_enable,
        short_polling_time_ms=config.broker.short_polling_time_ms,
        enable_property_filter=config.broker.enable_property_filter,
        filter_support_retry=config.broker.filter_support_retry,
        reject_transaction_message=config.broker.reject_transaction_message,
        store_reply_message_enable=config.broker.store_reply_message_enable,
        pull_limits=ReadLimits(
            store.max_transfer_count_in_memory, store.max_transfer_bytes_in_memory
        ),
        cold_pull_limits=ReadLimits(
            store.max_transfer_count_in_disk, store.max_transfer_bytes_in_disk
        ),
        recent_bytes=memory_bytes * store.access_message_in_memory_max_ratio // 100,
        follower_id=follower_id(f"n{config.self_number}"),
    )


def _server_limits(config: BrokerConfig) -> ServerLimits:
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


def _table_settings(config: BrokerConfig) -> TableSettings:
    broker = config.broker
    limits = TableLimits(
        topics=broker.max_topics,
        groups=broker.max_groups,
        group_topics=broker.max_group_topics,
        topics_per_group=broker.max_topics_per_group,
        clients=broker.max_clients,
        clients_per_group=broker.max_clients_per_group,
        topics_per_account=broker.max_topics_per_account,
        groups_per_account=broker.max_groups_per_account,
        group_topics_per_account=broker.max_group_topics_per_account,
        clients_per_account=broker.max_clients_per_account,
    )
    return TableSettings(
        auto_create_topic_enable=broker.auto_create_topic_enable,
        auto_create_subscription_group=broker.auto_create_subscription_group,
        offset_interval_s=broker.flush_consumer_offset_interval_ms / 1000,
        lock_lease_s=broker.lock_lease_ms / 1000,
        limits=limits,
    )


def _memory_budget(config: BrokerConfig, memory_bytes: int, peer_frames: FrameRoom) -> MemoryBudget:
    server = config.server
    return MemoryBudget(
        BudgetLimits(
            total_bytes=budget_bytes(server.memory_budget_bytes, memory_bytes),
            unfinished_bytes=server.max_unfinished_bytes,
            max_frame_bytes=server.max_frame_bytes,
        ),
        peer_frames=peer_frames,
    )


def _disk_bytes(config: BrokerConfig, disk: Disk) -> Callable[[], tuple[int, int]]:
    """Return what tells the size of the log's file system, as `df` counts it, and what is left."""
    root = config.store.path_root_dir
    return lambda: (disk.total_bytes(root), disk.free_bytes(root))


def _disk_ratio(config: BrokerConfig, disk: Disk) -> Callable[[], float]:
    """Return what tells the used part of what is used and available, as `df` counts it."""
    root = config.store.path_root_dir
    return lambda: 1.0 - disk.free_bytes(root) / disk.total_bytes(root)
