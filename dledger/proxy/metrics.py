"""Metrics of a proxy: how long its calls took, and which clients it has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.service import MessagingService
from dledger.remoting.log import get_logger
from dledger.remoting.metrics import (
    Family,
    MetricsServer,
    RpcLatency,
    Sample,
    family_text,
    load_library,
)
from dledger.remoting.seams import Clock, Network

METHODS: Final = [
    method.name for method in pb.DESCRIPTOR.services_by_name["MessagingService"].methods
]

GIVEN_UP: Final = -1
"""In place of a code: the client gave the call up, or its connection ended."""

STOPS: Final = "the proxy stops"

_log = get_logger(__name__)


@dataclass(slots=True)
class OpenCall:
    """A call that goes on; ``code`` is what it is answered with."""

    code: int = GIVEN_UP

    def answered(self, *answers: Any) -> None:
        """Take the status that stands in one of *answers*."""
        for answer in answers:
            if answer.HasField("status"):
                self.code = answer.status.code
                return


class CallMetrics:
    """Counts the calls of one proxy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.open_calls = 0
        self.latency = RpcLatency("grpc", _call_name, _code_name)

    @contextmanager
    def counted(self, name: str) -> Iterator[OpenCall]:
        """Count one call: the block is what it takes."""
        call, began_s = OpenCall(), self._clock.monotonic()
        self.open_calls += 1
        try:
            yield call
        finally:
            self.open_calls -= 1
            took_s = self._clock.monotonic() - began_s
            self.latency.answered(METHODS.index(name), call.code, took_s)


def _call_name(number: int) -> str:
    """Return ``send_message`` for the number of ``SendMessage``: in the form of request codes."""
    name = METHODS[number]
    parts = (f"_{char.lower()}" if char.isupper() else char for char in name)
    return "".join(parts).removeprefix("_")


def _code_name(code: int) -> str:
    if code == GIVEN_UP:
        return "given_up"
    return pb.Code.Name(code).lower() if code in pb.Code.values() else str(code)


class ProxyMetrics:
    """The page of one proxy, and whether it is ready."""

    def __init__(self, service: MessagingService, calls: CallMetrics, node_id: str) -> None:
        self._service = service
        self._calls = calls
        self._labels = {"node_type": "proxy", "node_id": node_id}
        self.is_stopping = False

    def not_ready(self) -> list[str]:
        """Return why calls should go to another proxy; nothing while this one serves."""
        return [STOPS] if self.is_stopping else []

    def pieces(self) -> Iterator[str]:
        """Yield the page, piece by piece; tables may change between two of them."""
        for family, samples in self._families():
            yield from family_text(family, samples, self._labels)

    def _families(self) -> Iterator[tuple[Family, Iterable[Sample | None]]]:
        clients = self._service.clients
        for name, about, value in (
            ("rocketmq_proxy_up", "1 while the proxy serves, 0 while it stops.", self._is_up()),
            ("dledger_proxy_clients", "Clients that are known.", len(clients)),
            ("dledger_proxy_streams", "Open streams of telemetry.", clients.open_streams),
            ("dledger_proxy_open_calls", "Calls without an answer.", self._calls.open_calls),
            (
                "dledger_proxy_renewed_messages",
                "Messages of push consumers whose invisible time the proxy renews.",
                self._service.renewed_messages,
            ),
        ):
            yield Family(name, "gauge", about), [({}, value)]
        yield self._calls.latency.family()

    def _is_up(self) -> int:
        return 0 if self.is_stopping else 1


@asynccontextmanager
async def served_page(
    metrics: ProxyMetrics, network: Network, address: tuple[str, int]
) -> AsyncIterator[None]:
    """Serve the page while the block runs; where the port is taken, log it and serve none."""
    load_library()
    server = MetricsServer(network, metrics.pieces, metrics.not_ready)
    async with trio.open_nursery() as nursery:
        await server.serve_if_free(nursery, *address, "metrics.listen_port")
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
