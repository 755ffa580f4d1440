"""One broker daemon, put together: store, group, processors, server, registration.

Order of start: open and replay the store, join the group, serve clients, register. Order of a
clean stop: leave the NameServers, take nothing new, answer what is in flight, close the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio

from client.core.routes import NameServers
from commitlog.consume_queue_store import MAX_OPEN_FILES
from commitlog.seams import Disk, UtcOffset, utc
from commitlog.store_paths import StorePaths
from dledger.broker_errors import ChangePendingError, ChangeRefusedError, NotLeaderError
from dledger.config import BrokerConfig
from dledger.fence import LeaderService
from dledger.group import Group
from dledger.live_settings import LiveSettings, Parts
from dledger.membership_changes import MembershipChanges
from dledger.part_settings import (
    broker_settings,
    disk_bytes,
    disk_ratio,
    empty_tables,
    group_settings,
    listener_tls,
    memory_budget,
    namesrv_tls,
    own_credentials,
    packed_address,
    raft_settings,
    server_limits,
    store_settings,
)
from dledger.ports import processor_table, serve_fast, serve_metrics
from dledger.processors.admin import AuthProcessor, BrokerConfigProcessor
from dledger.processors.raft import RaftChangeProcessor
from dledger.processors.transactions import CheckBack
from dledger.processors.wiring import (
    BrokerProcessors,
    LogFolder,
    ProcessorSeams,
    register_processors,
)
from dledger.raft.clocks import VotersClock
from dledger.raft.identity import Identity, check_owner
from dledger.registration import RegisteredBroker, Registration
from dledger.services.retention import RetentionService
from dledger.services.schedule import ScheduleMessageService
from dledger.services.timer import TimerMessageService
from dledger.services.transaction_check import TransactionCheckService
from dledger.store import ReplicaStore
from remoting.access.account_store import AccountStore
from remoting.client import RemotingClient
from remoting.metrics.families import load_library
from remoting.metrics.server_metrics import ServerMetrics
from remoting.process import GarbageCollection
from remoting.seams import Clock, Executor, Network, Rng
from remoting.server import RemotingServer

log = structlog.get_logger(__name__)

DEFAULT_MEMORY_BYTES: Final = 2_684_354_560
"""2.5 GiB, for a caller that does not know how much there is: 40 % of it is 1 GiB."""

HAND_OVER_ELECTIONS: Final = 4
"""How many election timeouts a clean stop spends on giving the leadership away."""

HAND_OVER_LOOK_S: Final = 0.01

LINGER_S: Final = 0.3
"""How long a former leader goes on naming the new one to clients before it closes connections."""


@dataclass(frozen=True, slots=True)
class World:
    """The seams a broker runs on."""

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
    garbage: GarbageCollection | None = None,
    task_status: trio.TaskStatus[Broker] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a broker until *stop* is set, then end it cleanly.

    Args:
        memory_bytes: That the process may use; recent messages are taken to be in a part of it,
            and connections may hold another part.
        utc_offset: Local time, for hours of the day.
        queue_files_max: Consume queue files that may be open.
        measure_loop: The event loop is a real one: the length of its turns is shown.
        garbage: Collects this process's; it asks how much memory the tables explain.
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
    store_host = packed_address(config)
    if config.metrics_address is not None:
        load_library()
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
        store_settings(config, pid, queue_files_max, utc_offset),
        partial(empty_tables, config),
    )
    if garbage is not None:
        garbage.rows = lambda: store.tables.row_count
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
        # Clients that were sent to the new leader leave; the others still get its address here.
        await clock.sleep(min(LINGER_S, timeout_s))
    if not await broker.group.drain():
        log.warning("stopped_with_proposals_in_flight")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.server.drain, timeout_s)
        if broker.fast_server is not None:
            nursery.start_soon(broker.fast_server.drain, timeout_s)


async def _hand_over(group: Group, clock: Clock, election_timeout_s: float) -> bool:
    """Give the leadership away, so that no election timeout has to pass; return whether it did.

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
    settings = broker_settings(config, store_host, world.memory_bytes)
    dates = VotersClock(world.clock, group.node.clocks)
    retention = RetentionService(
        group,
        lambda: group.store.log,
        config.store,
        clock=dates,
        levels=len(config.delay_levels_ms),
        saved_index=lambda: group.store.saved_index,
        disk_ratio=disk_ratio(config, world.disk),
        utc_offset=world.utc_offset,
    )
    processors = BrokerProcessors.build(
        group,
        settings,
        ProcessorSeams(dates, world.rng, world.executor, world.pid),
        config.broker,
        LogFolder(
            disk_ratio(config, world.disk),
            disk_bytes(config, world.disk),
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
        config.broker,
        config.store,
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
        group,
        accounts,
        config.broker.cluster_name,
        clock=world.clock,
        rng=world.rng,
        open_admin=config.server.open_admin,
    )
    group.on_role_change.append(processors.role_changed)
    processors.register(table)
    changes = RaftChangeProcessor(MembershipChanges(group, world.clock))
    register_processors(table, group, changes)
    server = RemotingServer(
        world.network,
        table,
        limits=server_limits(config),
        tls=listener_tls(config),
        after_batch=group.kick,
        turn=group.loop_stall,
        budget=memory_budget(config, world.memory_bytes, group.peer_frames),
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
        fast_server = await serve_fast(config, group, world.network, table, server.budget, nursery)
        servers = [server] if fast_server is None else [server, fast_server]
        metrics_address = await serve_metrics(
            config,
            group,
            processors,
            settings,
            retention,
            ServerMetrics(servers, guard),
            world.network,
            world.clock,
            nursery,
        )
        if accounts is not None:
            nursery.start_soon(accounts.keep_reading, world.clock, world.executor)
        nursery.start_soon(processors.run)
        nursery.start_soon(registration.run)
        yield Broker(live, group, server, fast_server, registration, address, metrics_address)
        nursery.cancel_scope.cancel()


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
        RegisteredBroker(
            cluster_name=config.broker.cluster_name,
            broker_name=config.broker.broker_name,
            address=config.advertised_address,
            self_id=f"n{config.self_number}",
        ),
        config.client,
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
        raft_settings(config, world.disk),
        group_settings(config),
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
    return ReplicaStore(disk, store_settings(config, pid), lambda: empty_tables(config))
