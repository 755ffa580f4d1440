"""Ports of a broker beside the one that serves its clients: the VIP channel, and the metrics.

A broker does without each of them: a port that is taken is left out, with a warning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import structlog
import trio

from dledger.broker_metrics import BrokerMetrics, LeaderChanges, Readiness
from dledger.group import Group
from dledger.processors.handles import codes_of
from dledger.processors.pull import PullProcessor
from dledger.processors.wiring import BrokerProcessors
from dledger.remoting.handling import OnAnswer
from dledger.remoting.memory_budget import MemoryBudget
from dledger.remoting.metrics import MetricsServer, ServerMetrics
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.seams import Clock, Network, ServerTls
from dledger.remoting.server import RemotingServer
from dledger.services.retention import RetentionService
from dledger.services.throughput import Traffic
from dledger.settings.config import BrokerConfig
from dledger.settings.parts import BrokerSettings, server_limits

log = structlog.get_logger(__name__)

PULLS: Final = codes_of([PullProcessor])
"""What the VIP channel does not answer, as in RocketMQ."""

FAST_SHARE: Final = 4
"""Share of the connections that the VIP channel gets: few clients are that old."""


async def serve_fast(
    config: BrokerConfig,
    group: Group,
    network: Network,
    table: ProcessorTable,
    tls: ServerTls,
    budget: MemoryBudget,
    nursery: trio.Nursery,
    on_answer: OnAnswer | None,
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
        tls=tls,
        after_batch=group.kick,
        turn=group.loop_stall,
        budget=budget,
        on_answer=on_answer,
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
) -> None:
    """Serve the page for Prometheus, if it is wanted and its port is free."""
    wanted = config.metrics_address
    if wanted is None:
        return
    traffic = Traffic(lambda: group.leadership is not None)
    leaders = LeaderChanges(group)
    metrics = BrokerMetrics(
        group,
        processors,
        settings,
        traffic,
        leaders,
        retention.given_up_bytes,
        config.raft.self_id,
        clock,
        ports,
    )
    server = MetricsServer(
        network, metrics.pieces, Readiness(group).not_ready, lambda: group.leadership is not None
    )
    if not await server.serve_if_free(nursery, *wanted, "metrics.listen_port"):
        return
    processors.throughput.traffic = traffic
    group.on_units.append(traffic.on_units)
    group.on_role_change.append(leaders.role_changed)
    leaders.role_changed()
