"""One broker daemon, put together: store, group, processors, ports, registration.

Order of start: open and replay the store, join the group, serve clients, register. Order of a
clean stop: give the leadership away, leave the NameServers, carry requests of clients that do not
know it yet to the new leader, take nothing new, answer what is in flight, close the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio

from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.client.core.routes import NameServers
from dledger.commitlog.consume_queue_store import MAX_OPEN_FILES
from dledger.commitlog.seams import Disk, UtcOffset, utc
from dledger.commitlog.store_paths import StorePaths
from dledger.forwarding import Forwarder
from dledger.group import Group
from dledger.group_api import LeaderService
from dledger.leader_address import LeaderAddress, RunCommand
from dledger.processors.access import AccessProcessor, BrokerAccounts
from dledger.processors.admin import BrokerConfigProcessor, LiveSettings
from dledger.processors.handles import topic_of_message_at
from dledger.processors.raft import MembershipChanges, RaftChangeProcessor
from dledger.processors.transactions import CheckBack
from dledger.processors.wiring import (
    LOCAL_ADMIN,
    REPEATABLE,
    BrokerProcessors,
    LogFolder,
    ProcessorSeams,
    broker_rules,
    register_processors,
)
from dledger.raft.identity import Identity, check_owner
from dledger.raft.settings import RaftSettings
from dledger.registration import Registration
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.gate import processor_table
from dledger.remoting.certificates import Certificates
from dledger.remoting.client import RemotingClient
from dledger.remoting.machine import GarbageCollection, run_command
from dledger.remoting.metrics import RpcLatency, ServerMetrics, load_library
from dledger.remoting.seams import Clock, Executor, Network, Rng
from dledger.remoting.server import RemotingServer
from dledger.services.retention import RetentionService
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import LOAD_UNITS, TimerMessageService
from dledger.services.transaction_check import TransactionCheckService
from dledger.settings.config import BrokerConfig
from dledger.settings.parts import (
    BrokerSettings,
    empty_tables,
    memory_budget,
    own_credentials,
    packed_address,
    raft_settings,
    server_limits,
)
from dledger.side_ports import serve_fast, serve_metrics
from dledger.state.producer_sessions import SESSIONS_MAX
from dledger.store import ReplicaStore

log = structlog.get_logger(__name__)


DEFAULT_MEMORY_BYTES: Final = 2_684_354_560
"""2.5 GiB, for a caller that does not know how much there is: 40 % of it is 1 GiB."""

HAND_OVER_ELECTIONS: Final = 4
"""How many election timeouts a clean stop spends on giving the leadership away."""

HAND_OVER_LOOK_S: Final = 0.01

DRAIN_LOOK_S: Final = 0.25

LINGER_S: Final = 0.3
"""How long a former leader goes on naming the new one to clients before it closes connections."""


@dataclass(frozen=True, slots=True)
class World:
    """The seams a broker runs on.

    Attributes:
        memory_bytes: That the process may use; recent messages are taken to be in a part of it, and
            connections may hold another part.
        queue_files_max: Consume queue files that may be open.
        timer_load_units: Units of the timer queue that are read in one go.
    """

    clock: Clock
    rng: Rng
    network: Network
    disk: Disk
    executor: Executor
    pid: int = 0
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    utc_offset: UtcOffset = utc
    queue_files_max: int = MAX_OPEN_FILES
    timer_load_units: int = LOAD_UNITS
    run_command: RunCommand = run_command


@dataclass(slots=True)
class Broker:
    """A broker that runs."""

    group: Group
    servers: list[RemotingServer]
    registration: Registration
    processors: BrokerProcessors


async def serve_broker(
    config: BrokerConfig,
    world: World,
    *,
    stop: trio.Event,
    measure_loop: bool = False,
    sessions_max: int = SESSIONS_MAX,
    garbage: GarbageCollection | None = None,
    task_status: trio.TaskStatus[Broker] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a broker until *stop* is set, then end it cleanly; *config* stays as it is.

    Args:
        sessions_max: Sessions of idempotent producers; equal on all members of the group.
        measure_loop: The event loop is a real one: the length of its turns is shown.
        garbage: Collects this process's; it asks how much memory the tables explain.
    Raises:
        ConfigError, ForeignStoreError, StoreLockedError, OSError: It could not start; the data
            folder is as it was.
        CorruptStoreError: Damage that only peers can repair; the folder is as it was.
        FlushFailedError, InvariantBroken: It had to stop; the folder is as after a crash.
    Cancellation: Ends at once, as a crash does.
    """
    config = config.copied()  # of this run: settings may change while it lasts
    store_host = packed_address(config)
    if config.metrics_address is not None:
        load_library()
    # Before the store is opened: opening replays and marks the folder as in use.
    check_owner(
        world.disk,
        StorePaths(config.store.path_root_dir).identity,
        cluster=config.broker.cluster_name,
        group=config.raft.group,
        name=config.raft.self_id,
    )
    store = ReplicaStore(
        world.disk,
        config.store,
        partial(empty_tables, config, sessions_max),
        pid=world.pid,
        queue_files_max=world.queue_files_max,
    )
    if garbage is not None:
        garbage.rows = lambda: store.tables.row_count
    closed = False
    try:
        certificates = Certificates(world.disk)
        raft = raft_settings(config, world.disk, certificates)
        group = _make_group(config, raft, store, world, store_host)
        async with (
            _measured(group, measure_loop),
            _run_parts(config, certificates, group, world, store_host) as broker,
        ):
            log.info(
                "broker_started",
                address=config.advertised_address,
                replayed=store.replayed,
                unclean=store.unclean,
            )
            task_status.started(broker)
            await stop.wait()
            await _leave(broker, config, world.clock)
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
        await _serve_others(broker, config.server.drain_timeout_ms / 1000, clock)
        await _hand_over(broker.group, clock, election_timeout_s)
        # Clients that were sent to the new leader leave; the others still get its address here.
        await clock.sleep(min(LINGER_S, timeout_s))
    broker.processors.pull.answer_all()
    if not await broker.group.drain(timeout_s):
        log.warning("stopped_with_proposals_in_flight")
    async with trio.open_nursery() as nursery:
        for server in broker.servers:
            nursery.start_soon(server.drain, timeout_s)


async def _serve_others(broker: Broker, timeout_s: float, clock: Clock) -> None:
    """Go on for clients whose route names this member, until they have left or read another."""
    deadline = clock.monotonic() + timeout_s
    while broker.processors.clients.has_others and clock.monotonic() < deadline:
        await clock.sleep(DRAIN_LOOK_S)


async def _hand_over(group: Group, clock: Clock, election_timeout_s: float) -> bool:
    """Give the leadership away, so that no election timeout has to pass; return whether it did."""
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
    config: BrokerConfig,
    certificates: Certificates,
    group: Group,
    world: World,
    store_host: bytes,
) -> AsyncIterator[Broker]:
    settings = BrokerSettings.of(config, store_host, world.memory_bytes)
    dates, store, disk = group.dates, config.store, world.disk
    root = store.path_root_dir

    def disk_ratio() -> float:
        """Return the used part of what is used and available, as `df` counts it."""
        return 1.0 - disk.free_bytes(root) / disk.total_bytes(root)

    def lacks_segment() -> bool:
        # A file system that takes space for itself has less than it states.
        return group.store.lacks_space or not group.store.fits_segment

    retention = RetentionService(
        group,
        lambda: group.store.log,
        store,
        clock=dates,
        saved_index=lambda: group.store.saved_index,
        disk_ratio=disk_ratio,
        utc_offset=world.utc_offset,
    )
    processors = BrokerProcessors(
        group,
        settings,
        ProcessorSeams(dates, world.rng, world.executor, world.pid),
        LogFolder(
            disk_ratio,
            lambda: (disk.total_bytes(root), disk.free_bytes(root)),
            retention.expire_soon,
            lacks_segment,
        ),
    )
    group.status_parts.append(processors.space.status)
    retention.is_deleting = processors.topics.is_deleting
    schedule = ScheduleMessageService(
        group,
        dates,
        levels=len(store.delay_levels_ms),
        is_deleting=processors.topics.is_ending,
        real_queue=processors.topics.real_queue,
        entry_bytes_max=group.entry_bytes_max,
    )
    timer = TimerMessageService(
        group,
        dates,
        claims=processors.timer_claims,
        is_deleting=processors.topics.is_ending,
        real_queue=processors.topics.real_queue,
        entry_bytes_max=group.entry_bytes_max,
        roll_window_ms=store.timer_roll_window_slot * 1000,
        load_units=world.timer_load_units,
    )
    checks = TransactionCheckService(
        group,
        processors.topics,
        processors.transactions,
        CheckBack(processors.clients, settings),
        config.broker,
        store,
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
    table, guard = processor_table(
        None if accounts is None else BrokerAccounts(accounts, lambda: group.state),
        broker_rules(topic_of_message_at(group), config.broker.cluster_name),
        LOCAL_ADMIN,
        world.clock,
        world.rng,
        open_admin=config.server.open_admin,
    )
    group.on_role_change.append(processors.role_changed)
    processors.register(table)
    changes = RaftChangeProcessor(MembershipChanges(group, world.clock))
    register_processors(table, group, changes)
    latency = None if config.metrics_address is None else RpcLatency()
    on_answer = None if latency is None else latency.answered
    tls = certificates.of_server(config.server.tls_mode, config.server)
    names_tls = certificates.of_client(config.client) if config.client.tls_enable else None
    server = RemotingServer(
        world.network,
        table,
        limits=server_limits(config),
        tls=tls,
        after_batch=group.kick,
        turn=group.loop_stall,
        budget=memory_budget(config, world.memory_bytes, group.peer_frames),
        on_answer=on_answer,
    )
    async with trio.open_nursery() as nursery:
        client = partial(
            RemotingClient,
            nursery,
            world.network,
            connect_timeout_s=config.client.connect_timeout_ms / 1000,
            tls=names_tls,
        )
        remoting = client(credentials=own_credentials(config, world.disk))
        registration = _make_registration(config, group, remoting, world, settings, nursery)
        access = AccessProcessor(
            group,
            settings,
            lambda name: accounts is not None and accounts.get(name) is not None,
            client().invoke,  # it signs none: clients have signed them
        )
        processors.topics.when_known = registration.when_known
        live = LiveSettings(config, group, retention, world.clock)
        register_processors(table, group, BrokerConfigProcessor(live), access)
        forwarder = Forwarder(
            group, client(), world.clock, world.rng, REPEATABLE, stamps=accounts is None
        )
        group.on_role_change.append(forwarder.role_changed)
        server.carry = forwarder.take
        servers = [server]
        leader_address = LeaderAddress(
            group, config.broker, servers, world.clock, world.run_command
        )
        group.on_role_change.append(leader_address.role_changed)
        await nursery.start(leader_address.run)
        await nursery.start(group.run)
        await nursery.start(server.serve, config.server.listen_host, config.server.listen_port)
        fast_server = await serve_fast(
            config, group, world.network, table, tls, server.budget, nursery, on_answer
        )
        if fast_server is not None:
            fast_server.carry = forwarder.take
            servers.append(fast_server)
        await serve_metrics(
            config,
            group,
            processors,
            settings,
            retention,
            ServerMetrics(servers, guard, latency),
            world.network,
            world.clock,
            nursery,
        )
        if accounts is not None:
            nursery.start_soon(accounts.keep_reading, world.clock, world.executor)
        if certificates:
            nursery.start_soon(certificates.keep_reading, world.clock, world.executor)
        nursery.start_soon(forwarder.run)
        nursery.start_soon(processors.run)
        nursery.start_soon(registration.run)
        yield Broker(group, servers, registration, processors)
        nursery.cancel_scope.cancel()


def _make_registration(
    config: BrokerConfig,
    group: Group,
    remoting: RemotingClient,
    world: World,
    settings: BrokerSettings,
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
        settings,
        config.client,
        lambda: names.list.addresses,
        world.clock,
    )
    group.on_role_change.append(registration.role_changed)
    group.status_parts.append(registration.status)
    group.on_applied.append(registration.on_applied)
    return registration


def _make_group(
    config: BrokerConfig, raft: RaftSettings, store: ReplicaStore, world: World, store_host: bytes
) -> Group:
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
        raft,
        config.raft,
        store_host=store_host,
        clock=world.clock,
        rng=world.rng,
        network=world.network,
        executor=world.executor,
        sync_replication=config.sync_replication,
    )
