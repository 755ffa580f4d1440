"""What a port shows of the connections it ended and the requests it refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import structlog.testing
import trio

from dledger.testing.memory_network import MemoryNetwork
from remoting.connection_ends import LINES_PER_WINDOW, WINDOW_S, ConnectionEnds
from remoting.metrics.families import family_text
from remoting.metrics.server_metrics import ServerMetrics
from remoting.processor_table import ProcessorTable
from remoting.server import RemotingServer
from tests.harness.metrics_page import MetricsPage


@dataclass
class Refusing:
    """A guard that refused so many requests."""

    refused: int


def page_of(metrics: ServerMetrics) -> MetricsPage:
    common: Mapping[str, str] = {"node_type": "namesrv", "node_id": "n"}
    families = metrics.families()
    return MetricsPage.read(
        "".join(
            part for family, samples in families for part in family_text(family, samples, common)
        )
    )


def servers(count: int) -> list[RemotingServer]:
    first = RemotingServer(MemoryNetwork(), ProcessorTable())
    return [first] + [
        RemotingServer(MemoryNetwork(), ProcessorTable(), budget=first.budget)
        for _ in range(count - 1)
    ]


def test_both_ports_are_one_sum_and_their_budget_counts_once() -> None:
    ports = servers(2)
    for port, given_way in zip(ports, (3, 4), strict=True):
        port.places.given_way = given_way
        port.places.refused = 10 * given_way
        port.ends.note("h:1", "idle", 0.0)
    ports[1].ends.note("h:1", "half a frame and then silence", 0.0)
    budget = ports[0].budget
    budget.given_way, budget.frames.given_way, budget.refused = 5, 6, 7
    page = page_of(ServerMetrics(ports, Refusing(9)))
    assert page.of("dledger_connections_gave_way_total", "cause") == {
        ("idle",): 7,
        ("unread_answers",): 5,
        ("unfinished_frame",): 6,
    }
    assert page.of("dledger_connections_ended_total", "reason") == {
        ("idle",): 2,
        ("half_a_frame_and_then_silence",): 1,
    }
    assert page.value("dledger_connections_refused_total") == 70
    assert page.value("dledger_requests_refused_memory_total") == 7
    assert page.value("dledger_access_refused_total") == 9
    assert page.value("dledger_connections") == 0


def test_server_metrics_without_a_guard_have_no_access() -> None:
    assert "dledger_access_refused_total" not in page_of(ServerMetrics(servers(1), None)).kinds


async def test_a_broken_frame_is_counted_by_its_server() -> None:
    here = MemoryNetwork()
    server = RemotingServer(here, ProcessorTable())
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(server.serve, "10.0.0.1", 9876)
        stream = await here.connect(host, port, timeout_s=1.0)
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        assert not memoryview(await stream.receive_some(1)).nbytes
        await stream.aclose()
        nursery.cancel_scope.cancel()
    assert server.ends.counts == {"protocol error": 1}


def warnings_of(ends: ConnectionEnds, reason: str, count: int, now_s: float) -> list[object]:
    with structlog.testing.capture_logs() as lines:
        for number in range(count):
            ends.note(f"h:{number}", reason, now_s)
    return [line.get("left_out") for line in lines if line["log_level"] == "warning"]


def test_server_metrics_limit_warnings_and_count_the_rest() -> None:
    ends = ConnectionEnds()
    said = warnings_of(ends, "protocol error: length 7", 1_000, 5.0)
    assert said == [None] * LINES_PER_WINDOW
    assert warnings_of(ends, "protocol error: length 8", 3, 6.0) == []
    assert warnings_of(ends, "the peer does not read", 1, 6.0) == [None], "another kind"
    later = 5.0 + WINDOW_S
    left_out = 1_003 - LINES_PER_WINDOW
    assert warnings_of(ends, "protocol error: length 9", 2, later) == [left_out, None]
    assert ends.counts == {"protocol error": 1_005, "the peer does not read": 1}


@pytest.mark.parametrize("reason", ["ended by the peer", "idle", "broken: [Errno 104] reset"])
def test_what_happens_to_every_client_is_no_warning(reason: str) -> None:
    ends = ConnectionEnds()
    assert warnings_of(ends, reason, 2, 1.0) == []
    assert sum(ends.counts.values()) == 2
