"""Metrics as a scraper reads them.

What a port shows of the connections it ended and the requests it refused.

The port that answers GET /metrics, over connections in memory and on virtual time.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import structlog.testing
import trio

from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.remoting.connection_limits import LINES_PER_WINDOW, WINDOW_S, ConnectionEnds
from dledger.remoting.metrics import (
    ANSWER_TIMEOUT_S,
    LATENCY_BOUNDS_MS,
    MAX_LABEL_CHARS,
    MAX_LATENCIES,
    MAX_REQUEST_BYTES,
    MAX_SCRAPES,
    SERIES_PER_PIECE,
    Family,
    Histogram,
    MetricsServer,
    RpcLatency,
    ServerMetrics,
    family_text,
    status_of,
)
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.server import RemotingServer
from dledger.testing.doubles import MemoryNetwork, MemoryStream
from tests.harness.metrics_page import MetricsPage

LAG = Family("lag_messages", "gauge", "Behind.")


def line_of(value: float = 1, **labels: str) -> str:
    """Return the line of a single series, without its name."""
    (text,) = family_text(LAG, [(labels, value)], {})
    return text.splitlines()[2].removeprefix("lag_messages")


def test_family_text_has_help_type_and_a_line_per_series() -> None:
    samples = [({"topic": "A"}, 3), ({"topic": "B"}, 0.5)]
    assert "".join(family_text(LAG, samples, {"cluster": "c"})) == (
        "# HELP lag_messages Behind.\n"
        "# TYPE lag_messages gauge\n"
        'lag_messages{cluster="c",topic="A"} 3.0\n'
        'lag_messages{cluster="c",topic="B"} 0.5\n'
    )


def test_family_text_keeps_the_name_of_a_counter() -> None:
    sent = Family("sent_total", "counter", "Sent.")
    assert "".join(family_text(sent, [({}, 1)], {})) == (
        "# HELP sent_total Sent.\n# TYPE sent_total counter\nsent_total 1.0\n"
    )


def test_a_series_without_labels_has_no_braces() -> None:
    assert line_of(7) == " 7.0"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain", "plain"),
        ('say "no"', r"say \"no\""),
        ("C:\\n", r"C:\\n"),
        ("two\nlines", r"two\nlines"),
        ('\\"\n', r"\\\"\n"),
        ("grün {}=,", "grün {}=,"),
        ("a \ud800", "a ?"),
    ],
)
def test_the_value_of_a_label_is_escaped(text: str, escaped: str) -> None:
    assert line_of(x=text) == f'{{x="{escaped}"}} 1.0'


def test_a_long_value_of_a_label_is_cut_before_it_is_escaped() -> None:
    assert line_of(x="\n" * 1000) == '{x="' + r"\n" * MAX_LABEL_CHARS + '"} 1.0'


def test_help_is_escaped() -> None:
    family = Family("x_total", "counter", 'a\\b\n"c"')
    assert next(iter(family_text(family, [({}, 1)], {}))).startswith(
        '# HELP x_total a\\\\b\\n"c"\n'
    )


@pytest.mark.parametrize("value", [2**63, -1, 0.25, 1e-9, math.inf, -math.inf])
def test_numbers_are_read_back_as_they_were(value: float) -> None:
    assert float(line_of(value)) == value


def test_what_is_no_number_is_read_back_as_such() -> None:
    assert math.isnan(float(line_of(math.nan)))


def test_a_family_without_series_is_not_there() -> None:
    assert "".join(family_text(LAG, [], {})) == ""
    assert "".join(family_text(LAG, [None, None], {})) == ""


def test_a_long_family_comes_in_pieces_and_has_its_name_once() -> None:
    samples = [({"n": str(number)}, number) for number in range(3 * SERIES_PER_PIECE)]
    pieces = list(family_text(LAG, [None, *samples[:2], None, *samples[2:]], {}))
    assert [piece.count("\n") for piece in pieces] == [
        0,
        4,
        SERIES_PER_PIECE,
        SERIES_PER_PIECE,
        SERIES_PER_PIECE - 2,
    ]
    assert "".join(pieces).count("# TYPE") == 1


@dataclass
class Refusing:
    """A guard with a given count of refused requests."""

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


def test_histogram_buckets_hold_those_below() -> None:
    histogram = Histogram((1.0, 5.0))
    histogram.observe_all([0.5, 1.0, 3.0, 9.0])
    assert list(histogram.samples({"a": "b"})) == [
        ({"a": "b", "le": "1"}, 2, "_bucket"),
        ({"a": "b", "le": "5"}, 3, "_bucket"),
        ({"a": "b", "le": "+Inf"}, 4, "_bucket"),
        ({"a": "b"}, 13.5, "_sum"),
        ({"a": "b"}, 4, "_count"),
    ]


def test_latencies_are_named_by_their_codes() -> None:
    latency = RpcLatency()
    latency.answered(RequestCode.SEND_MESSAGE_V2, ResponseCode.SUCCESS, 0.004)
    latency.answered(31_337, 31_338, 4.0)
    page = MetricsPage.read("".join(family_text(*latency.family(), {})))
    assert page.kinds == {"rocketmq_rpc_latency": "histogram"}
    assert page.of("rocketmq_rpc_latency_sum", "request_code", "response_code") == {
        ("send_message_v2", "success"): 4,
        ("31337", "31338"): 4_000,
    }
    buckets = page.of("rocketmq_rpc_latency_bucket", "request_code", "le")
    assert (buckets["send_message_v2", "3"], buckets["send_message_v2", "5"]) == (0, 1)
    assert (buckets["31337", "3000"], buckets["31337", "+Inf"]) == (0, 1)


def test_latencies_of_too_many_codes_are_left_out() -> None:
    latency = RpcLatency()
    for code in range(MAX_LATENCIES + 3):
        latency.answered(code, 0, 0.0)
    assert latency.left_out == 3
    assert len(list(latency.family()[1])) == MAX_LATENCIES * (len(LATENCY_BOUNDS_MS) + 3)


ADDRESS = ("127.0.0.1", 5557)
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def serving(
    pieces: Callable[[], Iterable[str]],
    not_ready: Callable[[], Sequence[str]] = tuple,
    leads: Callable[[], bool] = lambda: False,
) -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork()
    server = MetricsServer(network, pieces, not_ready, leads)
    async with trio.open_nursery() as nursery:
        assert await nursery.start(server.serve, *ADDRESS) == ADDRESS
        yield network
        nursery.cancel_scope.cancel()
    assert network.listeners == {}


async def all_of(stream: MemoryStream) -> bytes:
    received = bytearray()
    while part := bytes(await stream.receive_some(65_536)):
        received += part
    return bytes(received)


async def answer_to(network: MemoryNetwork, *parts: bytes) -> bytes:
    stream = await network.connect(*ADDRESS, timeout_s=1)
    for part in parts:
        await stream.send_all(part)
    return await all_of(stream)


def page() -> Iterable[str]:
    yield "a 1\n"
    yield 'b{l="grün"} 2\n'


async def test_http_server_answers_a_get_and_closes() -> None:
    async with serving(page) as network:
        head, _, body = (await answer_to(network, GET[:7], GET[7:])).partition(b"\r\n\r\n")
    assert body.decode() == 'a 1\nb{l="grün"} 2\n'
    assert head.decode().split("\r\n") == [
        "HTTP/1.1 200 OK",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics?name[]=x HTTP/1.1\r\nAccept: */*\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /readyz?verbose HTTP/1.1\r\n\r\n", 200),
        (b"GET /leader HTTP/1.1\r\n\r\n", 200),
        (b"GET /readyz/x HTTP/1.1\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metricsx HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n", 431),
    ],
)
def test_what_else_is_asked_gets_a_status_of_its_own(head: bytes, status: int) -> None:
    assert status_of(head) == status


async def test_readyz_is_503_with_each_reason_until_there_is_none() -> None:
    reasons = ["no leader is known", "7 committed entries are not applied yet"]
    ask = b"GET /readyz HTTP/1.1\r\n\r\n"
    async with serving(page, lambda: reasons) as network:
        answer = await answer_to(network, ask)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain;")
        assert answer.partition(b"\r\n\r\n")[2].decode().splitlines() == reasons
        assert (await answer_to(network, ask.replace(b"ready", b"health"))).endswith(
            b"\n\r\nalive\n"
        )
        reasons = []
        answer = await answer_to(network, ask)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nready\n")


async def test_leader_path_is_200_at_the_leader_alone() -> None:
    role = {"leads": False}
    ask = b"GET /leader HTTP/1.1\r\n\r\n"
    async with serving(page, leads=lambda: role["leads"]) as network:
        assert (await answer_to(network, ask)).startswith(b"HTTP/1.1 503 ")
        role["leads"] = True
        assert (await answer_to(network, ask)).startswith(b"HTTP/1.1 200 ")
    async with serving(page) as network:
        assert (await answer_to(network, ask)).startswith(b"HTTP/1.1 503 ")


async def test_http_server_names_the_method_it_has() -> None:
    async with serving(page) as network:
        answer = await answer_to(network, b"PUT /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET\r\n" in answer
    assert answer.endswith(
        b"\r\n\r\nMethod Not Allowed: GET /metrics, /healthz, /readyz or /leader\n"
    )


async def test_a_request_that_does_not_end_is_refused_at_the_limit() -> None:
    async with serving(page) as network:
        answer = await answer_to(network, b"GET /metrics HTTP/1.1\r\nX: ", b"x" * MAX_REQUEST_BYTES)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_http_server_closes_a_silent_connection() -> None:
    async with serving(page) as network:
        began = trio.current_time()
        assert await answer_to(network, GET[:9]) == b""
        assert trio.current_time() - began == pytest.approx(ANSWER_TIMEOUT_S, abs=0.1)


async def test_http_server_closes_one_connection_too_many() -> None:
    async with serving(page) as network:
        silent = [await network.connect(*ADDRESS, timeout_s=1) for _ in range(MAX_SCRAPES)]
        await trio.testing.wait_all_tasks_blocked()
        assert await answer_to(network) == b""
        await silent[0].aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (await answer_to(network, GET)).startswith(b"HTTP/1.1 200 ")


async def test_http_server_survives_a_client_that_leaves() -> None:
    async with serving(page) as network:
        stream = await network.connect(*ADDRESS, timeout_s=1)
        await stream.send_all(GET)
        await stream.aclose()
        assert (await answer_to(network, GET)).startswith(b"HTTP/1.1 200 ")


async def test_http_server_reports_a_failing_page_and_goes_on() -> None:
    pages = iter([False, True])

    def sometimes() -> Iterable[str]:
        if not next(pages):
            raise OffsetOutOfRangeError("entry 7 is lost")
        yield "a 1\n"

    async with serving(sometimes) as network:
        first = await answer_to(network, GET)
        assert first.startswith(b"HTTP/1.1 500 ")
        assert first.endswith(b"entry 7 is lost\n")
        assert (await answer_to(network, GET)).endswith(b"\r\n\r\na 1\n")


async def test_text_that_cannot_be_encoded_does_not_stop_the_page() -> None:
    async with serving(lambda: ["a \ud800\n"]) as network:
        assert (await answer_to(network, GET)).endswith(b"\r\n\r\na ?\n")
