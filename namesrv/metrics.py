"""What a NameServer shows of itself in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from namesrv.route_table import RouteInfoManager
from remoting.metrics.server_metrics import ServerMetrics
from remoting.metrics.text_format import Family, Sample, family_text


class NamesrvMetrics:
    """The metrics of one NameServer.

    Args:
        node_id: Its address, as it listens.
    """

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
