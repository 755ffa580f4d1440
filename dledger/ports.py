"""The ports of a broker beside the one for clients, and what guards its requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import structlog
import trio

from dledger.broker_metrics import BrokerMetrics, LeaderChanges
from dledger.broker_settings import BrokerSettings
from dledger.config import BrokerConfig
from dledger.group import Group
from dledger.metrics.traffic import Traffic
from dledger.part_settings import listener_tls, server_limits
from dledger.processors.handles import codes_of
from dledger.processors.pull import PullProcessor
from dledger.processors.rights import topic_of_message_at
from dledger.processors.wiring import LOCAL_ADMIN, BrokerProcessors, broker_rules
from dledger.services.retention import RetentionService
from remoting.access.account_store import AccountStore
from remoting.access.gate import AccessGate, guarded_table
from remoting.access.local_admin import LocalAdmin
from remoting.memory_budget import MemoryBudget
from remoting.metrics.http_server import MetricsServer
from remoting.metrics.server_metrics import Guard, ServerMetrics
from remoting.processor_table import ProcessorTable
from remoting.seams import Clock, Network, Rng
from remoting.server import RemotingServer

log = structlog.get_logger(__name__)

PULLS: Final = codes_of(PullProcessor)
"""What the VIP channel does not answer, as in RocketMQ."""

FAST_SHARE: Final = 4
"""Share of the connections that the VIP channel gets: few clients are that old."""


def processor_table(
    group: Group,
    accounts: AccountStore | None,
    cluster: str,
    *,
    clock: Clock,
    rng: Rng,
    open_admin: bool,
) -> tuple[ProcessorTable, Guard | None]:
    """Return an empty table that is guarded as the settings ask for, and its guard."""
    if accounts is not None:
        rules = broker_rules(topic_of_message_at(group), cluster)
        gate = AccessGate(accounts, rules, clock, rng)
        return guarded_table(gate), gate
    if open_admin:
        return ProcessorTable(None), None
    local = LocalAdmin(LOCAL_ADMIN)
    return ProcessorTable(local.guard), local


async def serve_fast(
    config: BrokerConfig,
    group: Group,
    network: Network,
    table: ProcessorTable,
    budget: MemoryBudget,
    nursery: trio.Nursery,
) -> RemotingServer | None:
    """Serve the VIP channel of old clients, if its port is free; they use the other one, too."""
    port = config.fast_listen_port
    if not port:
        return None
    limits = server_limits(config)
    server = RemotingServer(
        network,
        table.without(PULLS),
        limits=replace(
            limits,
            max_connections=max(limits.max_connections // FAST_SHARE, 1),
            reserved_connections=limits.reserved_connections // FAST_SHARE,
        ),
        tls=listener_tls(config),
        after_batch=group.kick,
        turn=group.loop_stall,
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


async def serve_metrics(
    config: BrokerConfig,
    group: Group,
    processors: BrokerProcessors,
    settings: BrokerSettings,
    retention: RetentionService,
    ports: ServerMetrics,
    network: Network,
    clock: Clock,
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
        clock=clock,
    )
    server = MetricsServer(network, metrics.pieces)
    try:
        address: tuple[str, int] = await nursery.start(server.serve, *wanted)
    except OSError as error:
        # Without the page a broker is less watched; it serves its clients all the same.
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
