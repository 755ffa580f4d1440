"""One NameServer, running: the listener, the requests, and the search for silent brokers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import structlog
import trio

from dledger.commitlog.seams import Disk
from dledger.namesrv.config import NamesrvConfig, NamesrvTable, ServerTable
from dledger.namesrv.name_server import NameServer
from dledger.namesrv.processor import SERVED, NameServerProcessor, subject_of
from dledger.namesrv.route_table import RouteInfoManager
from dledger.remoting.access.account_file import AccountStore
from dledger.remoting.access.audit import audited
from dledger.remoting.access.gate import processor_table
from dledger.remoting.certificates import Certificates
from dledger.remoting.connection_limits import ConnectionLimits
from dledger.remoting.handling import Limiter
from dledger.remoting.memory_budget import BudgetLimits, MemoryBudget, budget_bytes
from dledger.remoting.metrics import (
    Family,
    MetricsServer,
    RpcLatency,
    Sample,
    ServerMetrics,
    family_text,
    load_library,
)
from dledger.remoting.protocol.codes import NAMESRV_RESERVED
from dledger.remoting.seams import Clock, Executor, Network, Rng
from dledger.remoting.server import RemotingServer, ServerLimits

MAX_OPEN_REQUESTS: Final = 1024
"""Requests open at a time. Handlers answer before they return, so one is the most there can be;
the limit is for those that will not."""

DEFAULT_MEMORY_BYTES: Final = 1 << 30
"""For a caller that does not know how much memory there is: a quarter of it is 256 MiB."""

NAMESRV_RULES: Final = {int(code): served.rule for code, served in SERVED.items()}
"""What each request must be allowed to do."""

LOCAL_ADMIN: Final = frozenset(code for code, served in SERVED.items() if served.is_act)
"""The administrative acts."""

_log = structlog.get_logger()


async def serve_namesrv(
    config: NamesrvConfig,
    *,
    clock: Clock,
    rng: Rng,
    network: Network,
    disk: Disk,
    executor: Executor | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    name_server: NameServer | None = None,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a NameServer until cancelled. `nursery.start` gets the address it listens on.

    Args:
        memory_bytes: That the process may use; connections may hold a part of it.
        name_server: The tables to serve, made from *config*; None: they are made here.
        executor: Reads the files of accounts and certificates again; without one they count as they
            were at the start.
    Raises:
        ConfigError: The key-value file is damaged, or the account file or a certificate cannot be
            used; nothing was started.
        OSError: The address cannot be bound; nothing was started.
    Cancellation: Every connection is closed at once. Nothing is lost: key-values are on disk when
        they are acknowledged, and brokers register with a NameServer again when it is back.
    """
    if config.server.metrics_listen_port:
        load_library()
    if name_server is None:
        name_server = NameServer(config, disk)
    processor = NameServerProcessor(name_server, clock)
    accounts = AccountStore(disk, config.server.acl_file) if config.server.acl_enable else None
    processors, guard = processor_table(
        accounts, NAMESRV_RULES, LOCAL_ADMIN, clock, rng, open_admin=config.server.open_admin
    )
    limiter = Limiter("namesrv", MAX_OPEN_REQUESTS)
    for code, handler in processor.handlers().items():
        is_act = code in LOCAL_ADMIN
        processors.register(
            code, audited(code, handler, subject_of) if is_act else handler, limiter
        )
    latency = RpcLatency() if config.server.metrics_listen_port else None
    certificates = Certificates(disk)
    tls = certificates.of_server(config.server.tls_mode, config.server)
    server = RemotingServer(
        network,
        processors,
        limits=ServerLimits.of(
            config.server,
            NAMESRV_RESERVED,
            ConnectionLimits(idle_timeout_s=config.server.idle_timeout_s),
        ),
        tls=tls,
        budget=MemoryBudget(
            BudgetLimits(
                total_bytes=budget_bytes(config.server.memory_budget_bytes, memory_bytes),
                unfinished_bytes=config.server.max_unfinished_bytes,
            )
        ),
        on_answer=None if latency is None else latency.answered,
    )
    not_bound: OSError | None = None
    async with trio.open_nursery() as nursery:
        try:
            address: tuple[str, int] = await nursery.start(
                server.serve, config.server.listen_host, config.server.listen_port
            )
        except OSError as error:
            not_bound = error
        else:
            nursery.start_soon(_scan_forever, config.namesrv, clock, processor)
            ports = ServerMetrics([server], guard, latency)
            node_id = f"{address[0]}:{address[1]}"
            metrics = NamesrvMetrics(name_server.routes, ports, node_id)
            await _serve_metrics(config.server, metrics, network, nursery)
            if accounts is not None and executor is not None:
                nursery.start_soon(accounts.keep_reading, clock, executor)
            if certificates and executor is not None:
                nursery.start_soon(certificates.keep_reading, clock, executor)
            _log.info("namesrv_started", host=address[0], port=address[1])
            task_status.started(address)
    if not_bound is not None:  # out here it is not wrapped in a group
        raise OSError(not_bound.strerror or str(not_bound)) from not_bound


async def _serve_metrics(
    settings: ServerTable, metrics: NamesrvMetrics, network: Network, nursery: trio.Nursery
) -> None:
    """Serve the page for Prometheus, if it is wanted and its port is free."""
    if settings.metrics_listen_port:
        server = MetricsServer(network, metrics.pieces)
        where = (settings.metrics_listen_host, settings.metrics_listen_port)
        await server.serve_if_free(nursery, *where, "server.metrics_listen_port")


class NamesrvMetrics:
    """The metrics of one NameServer; *node_id*: its address, as it listens."""

    def __init__(self, routes: RouteInfoManager, ports: ServerMetrics, node_id: str) -> None:
        self._routes = routes
        self._ports = ports
        self._labels = {"node_type": "namesrv", "node_id": node_id}

    def pieces(self) -> Iterator[str]:
        """Yield the page, piece by piece; tables may change between two of them."""
        for family, samples in chain(self._route_families(), self._ports.families()):
            yield from family_text(family, samples, self._labels)

    def _route_families(self) -> Iterator[tuple[Family, Iterable[Sample | None]]]:
        routes = self._routes
        for name, about, value in (
            (
                "dledger_namesrv_brokers",
                "Brokers that are registered.",
                len(routes.broker_live_table),
            ),
            ("dledger_namesrv_topics", "Topics of all brokers.", len(routes.topic_queue_table)),
            (
                "dledger_registrations_refused",
                "Addresses whose registration was refused in the last two minutes.",
                len(routes.refused),
            ),
        ):
            yield Family(name, "gauge", about), [({}, value)]
        yield (
            Family(
                "dledger_registrations_refused_total",
                "counter",
                "Registrations refused: another group has the name, or the proof is wrong.",
            ),
            [({}, routes.refused.total)],
        )


async def _scan_forever(
    settings: NamesrvTable, clock: Clock, processor: NameServerProcessor
) -> None:
    await clock.sleep(settings.first_scan_delay_ms / 1000)
    while True:
        processor.scan()
        await clock.sleep(settings.scan_interval_ms / 1000)
