"""What the port of a daemon did to connections and requests, as metrics.

Everything else that would hide a flood in a log line is here as a number that can be alerted on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from remoting.metrics.families import Family, Sample
from remoting.server import RemotingServer


class Guard(Protocol):
    """What refuses requests before their handlers see them."""

    refused: int


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Reads the counters of a daemon's ports.

    Args:
        servers: They share one budget of memory.
        guard: Access control, or the check that stands in for it; None: everybody may do all.
    """

    servers: Sequence[RemotingServer]
    guard: Guard | None

    def families(self) -> Iterator[tuple[Family, Iterable[Sample | None]]]:
        """Yield each metric with its series."""
        places = [server.places for server in self.servers]
        budget = self.servers[0].budget
        yield (
            Family("dledger_connections", "gauge", "Open connections of clients and brokers."),
            [({}, sum(place.count for place in places))],
        )
        yield (
            Family(
                "dledger_connections_gave_way_total",
                "counter",
                "Connections closed because others needed what they held, by cause.",
            ),
            [
                ({"cause": "idle"}, sum(place.given_way for place in places)),
                ({"cause": "unread_answers"}, budget.given_way),
                ({"cause": "unfinished_frame"}, budget.frames.given_way),
            ],
        )
        yield (
            Family(
                "dledger_connections_refused_total",
                "counter",
                "Connections closed at once: all places were in use.",
            ),
            [({}, sum(place.refused for place in places))],
        )
        ends: Counter[str] = Counter()
        for server in self.servers:
            ends += server.ends.counts
        yield (
            Family(
                "dledger_connections_ended_total",
                "counter",
                "Connections that ended by themselves, by reason.",
            ),
            [({"reason": why.replace(" ", "_")}, ends[why]) for why in sorted(ends)],
        )
        yield (
            Family(
                "dledger_requests_refused_memory_total",
                "counter",
                "Requests refused as busy because the memory of all connections was used up.",
            ),
            [({}, budget.refused)],
        )
        for name, about, held in (
            (
                "dledger_request_memory_bytes",
                "Requests in work and unsent answers.",
                budget.used_bytes,
            ),
            (
                "dledger_unfinished_frame_bytes",
                "Frames of which a part has come.",
                budget.frames.used_bytes,
            ),
        ):
            yield Family(name, "gauge", about), [({}, held)]
        if self.guard is not None:
            yield (
                Family(
                    "dledger_access_refused_total",
                    "counter",
                    "Requests refused because of their sender: no account, a wrong signature, no"
                    " right, or another machine.",
                ),
                [({}, self.guard.refused)],
            )
