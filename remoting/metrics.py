"""Metrics of a daemon: written by prometheus_client in Prometheus' text format 0.0.4, and served.

Everything that would hide a flood of connections or requests in a log line is here as a number
that can be alerted on.

The port answers ``GET /metrics``, ``/healthz``, ``/readyz`` and ``/leader`` and nothing else, one
answer per connection. It is no web server: no TLS, no accounts, no bodies. It is for a scraper
nearby.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import trio

from dledger.commitlog.errors import MQError
from dledger.remoting.addresses import join_address
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.seams import Network, Stream
from dledger.remoting.server import RemotingServer

if TYPE_CHECKING:
    from prometheus_client import Metric


# ---------------------------------------------------------------------------------- families


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"

MAX_LABEL_CHARS: Final = 255
"""Of a label's value; longer ones are cut. Names are no longer than that, and what clients call
themselves need not be."""

SERIES_PER_PIECE: Final = 250
"""Series written in one go, two milliseconds or so: others are served between two pieces."""

Sample = tuple[Mapping[str, str], float] | tuple[Mapping[str, str], float, str]
"""Labels and value of one series; of a histogram also what its name ends in."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its series have this name and differ in their labels.

    Attributes:
        name: With its unit last; that of a counter ends in ``_total``.
        about: One line for people.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str


def load_library() -> None:
    """Import the library that writes the page: before the first page is asked for."""
    import prometheus_client  # noqa: F401


def family_text(
    family: Family, samples: Iterable[Sample | None], common: Mapping[str, str]
) -> Iterator[str]:
    """Yield a family in pieces; nothing when it has no series.

    *samples*: None between them ends a piece, so that others are served meanwhile.
    """
    # Here, so that a daemon starts without the library.
    from prometheus_client import Metric

    metric = Metric(family.name.removesuffix("_total"), family.about, family.kind)
    is_begun = False
    for sample in samples:
        if sample is not None:
            labels = {**common, **sample[0]}
            shown = {name: _label(text) for name, text in labels.items()}
            suffix = sample[2] if len(sample) == 3 else ""
            metric.add_sample(family.name + suffix, shown, sample[1])
        if sample is None or len(metric.samples) >= SERIES_PER_PIECE:
            yield _text(metric, is_begun=is_begun)
            is_begun = is_begun or bool(metric.samples)
            metric.samples.clear()
    if metric.samples:
        yield _text(metric, is_begun=is_begun)


def _text(metric: Metric, *, is_begun: bool) -> str:
    """Return the series of *metric*; its help and type stand before the first of them only."""
    from prometheus_client import generate_latest

    if not metric.samples:
        return ""
    registry: Any = SimpleNamespace(collect=lambda: [metric])
    text = generate_latest(registry).decode()
    return text.split("\n", 2)[2] if is_begun else text


def _label(text: str) -> str:
    """Return the value of a label, no longer than shown and such that it can be encoded."""
    cut = text[:MAX_LABEL_CHARS]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------------------- histograms


class Histogram:
    """Counts values by size."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count each of *values*."""
        for value in values:
            self.observe(value)

    def samples(self, labels: Mapping[str, str]) -> Iterator[Sample]:
        """Yield its series: buckets that each hold those below, sum, count."""
        count = 0
        for bound, here in zip((*self._bounds, math.inf), self._counts, strict=True):
            count += here
            end = "+Inf" if bound == math.inf else f"{bound:.15g}"
            yield {**labels, "le": end}, count, "_bucket"
        yield labels, self.total, "_sum"
        yield labels, count, "_count"


LATENCY_BOUNDS_MS: Final = (1.0, 3.0, 5.0, 10.0, 100.0, 1_000.0, 3_000.0)
"""RocketMQ's."""

MAX_LATENCIES: Final = 300
"""Pairs of request and response code: codes are the peer's to choose, series are not. About 400 kB
of text."""


def request_code_name(code: int) -> str:
    """Return the name of a request code of the remoting protocol; its number where it has none."""
    return _code_name(RequestCode, code)


def response_code_name(code: int) -> str:
    """Return the name of a response code of the remoting protocol, likewise."""
    return _code_name(ResponseCode, code)


def _code_name(codes: type[RequestCode] | type[ResponseCode], code: int) -> str:
    try:
        return codes(code).name.lower()
    except ValueError:
        return str(code)


class RpcLatency:
    """How long answers took, by request and response code."""

    def __init__(
        self,
        protocol_type: str = "remoting",
        request_name: Callable[[int], str] = request_code_name,
        response_name: Callable[[int], str] = response_code_name,
    ) -> None:
        """Count from nothing; the functions return what a code is called on the page."""
        self._protocol_type = protocol_type
        self._request_name = request_name
        self._response_name = response_name
        self.left_out = 0
        self._histograms: dict[tuple[int, int], Histogram] = {}

    def answered(self, request_code: int, response_code: int, seconds: float) -> None:
        """Count one answer; the `on_answer` of a server."""
        found = self._histograms.get((request_code, response_code))
        if found is None:
            if len(self._histograms) >= MAX_LATENCIES:
                self.left_out += 1
                return
            found = self._histograms[request_code, response_code] = Histogram(LATENCY_BOUNDS_MS)
        found.observe(seconds * 1000)

    def family(self) -> tuple[Family, Iterable[Sample | None]]:
        """Return the metric with its series."""
        return (
            Family(
                "rocketmq_rpc_latency",
                "histogram",
                "Milliseconds from a request to its answer; a pull that waits does so in them.",
            ),
            self._samples(),
        )

    def _samples(self) -> Iterator[Sample | None]:
        for (asked, answered), histogram in list(self._histograms.items()):
            yield from histogram.samples(
                {
                    "protocol_type": self._protocol_type,
                    "request_code": self._request_name(asked),
                    "response_code": self._response_name(answered),
                }
            )


# ---------------------------------------------------------------------------- what every port shows


class Guard(Protocol):
    """What refuses requests before their handlers see them."""

    refused: int


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Reads the counters of a daemon's ports.

    Args:
        servers: They share one budget of memory.
        guard: Access control, or the check that stands in for it; None: everybody may do all.
        latency: What the servers' answers took, where it is counted.
    """

    servers: Sequence[RemotingServer]
    guard: Guard | None
    latency: RpcLatency | None = None

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
        if self.latency is not None:
            yield self.latency.family()
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


# --------------------------------------------------------------------------- the port for a scraper


MAX_REQUEST_BYTES: Final = 8_192
"""Of a request's head; Prometheus' are below 1 KiB."""

RECEIVE_BYTES: Final = 4_096

ANSWER_TIMEOUT_S: Final = 10.0
"""For one connection from its first byte to its last: what Prometheus waits for at most."""

MAX_SCRAPES: Final = 8
"""Connections at a time, each with a page of some MB at most; one more is closed at once."""

PATH: Final = "/metrics"
ALIVE_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"
LEADER_PATH: Final = "/leader"
"""For load balancers, which send clients to the member that answers 200."""
_PATHS: Final = frozenset(path.encode() for path in (PATH, ALIVE_PATH, READY_PATH, LEADER_PATH))

END_OF_HEAD: Final = b"\r\n\r\n"

_log = get_logger(__name__)

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def status_of(head: bytes) -> int:
    """Return the status that a request is answered with."""
    if END_OF_HEAD not in head:
        return 431
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return 400
    method, target, _ = words
    if method != b"GET":
        return 405
    return 200 if target.split(b"?", 1)[0] in _PATHS else 404


def path_of(head: bytes) -> str:
    """Return what a request that is answered with 200 asks for."""
    return head.split(b" ", 2)[1].split(b"?", 1)[0].decode()


def answer_bytes(status: int, text: str, content_type: str = TEXT_TYPE) -> bytes:
    """Return a whole answer; the connection is closed after it."""
    # What clients call themselves need not be text that can be encoded.
    body = text.encode("utf-8", "replace")
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status == 405:
        lines.append("Allow: GET")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class MetricsServer:
    """Serves the page, and whether the daemon runs and is ready.

    Args:
        pieces: The page, piece by piece; others are served between two of them.
        not_ready: Returns why the daemon cannot serve what it should; nothing when it can.
        leads: Returns whether it leads its group.
    """

    def __init__(
        self,
        network: Network,
        pieces: Callable[[], Iterable[str]],
        not_ready: Callable[[], Sequence[str]] = tuple,
        leads: Callable[[], bool] = lambda: False,
    ) -> None:
        self._network = network
        self._leads = leads
        self._pieces = pieces
        self._not_ready = not_ready
        self._open = 0

    async def serve(
        self,
        host: str,
        port: int,
        *,
        task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen and answer until cancelled.

        Raises:
            OSError: The address cannot be bound.
        Cancellation: Closes the port and what is connected.
        """
        listener = await self._network.listen(host, port)
        try:
            task_status.started(listener.address)
            async with trio.open_nursery() as nursery:
                while True:
                    stream = await listener.accept()
                    if self._open >= MAX_SCRAPES:
                        await stream.aclose()
                        continue
                    self._open += 1
                    nursery.start_soon(self._serve_one, stream)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def serve_if_free(
        self, nursery: trio.Nursery, host: str, port: int, setting: str
    ) -> bool:
        """Serve in *nursery*; return False, with a warning, where the port is taken.

        Without the page a daemon is less watched; it serves its clients all the same.
        """
        try:
            address: tuple[str, int] = await nursery.start(self.serve, host, port)
        except OSError as error:
            _log.warning(
                "metrics_port_left_out",
                address=join_address(host, port),
                error=str(error),
                next_step=f"set {setting} to a free port, or to 0",
            )
            return False
        _log.info("metrics_served", address=join_address(*address))
        return True

    async def _serve_one(self, stream: Stream) -> None:
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                await self._answer(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            # It went away: there is no reader any more.
            pass
        finally:
            self._open -= 1
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _answer(self, stream: Stream) -> None:
        head = await _read_head(stream)
        if head is None:
            return
        status = status_of(head)
        text, kind = (
            f"{_REASONS.get(status)}: GET {PATH}, {ALIVE_PATH}, {READY_PATH} or {LEADER_PATH}\n",
            TEXT_TYPE,
        )
        path = path_of(head) if status == 200 else ""
        if path == ALIVE_PATH:
            text = "alive\n"
        elif path == READY_PATH:
            reasons = self._not_ready()
            status = 503 if reasons else 200
            text = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        elif path == LEADER_PATH:
            status, text = (200, "leads\n") if self._leads() else (503, "does not lead\n")
        elif path == PATH:
            try:
                text, kind = await self._page(), CONTENT_TYPE
            except MQError as error:
                _log.warning("metrics_not_collected", error=str(error))
                status, text = 500, f"{error}\n"
        await stream.send_all(answer_bytes(status, text, kind))

    async def _page(self) -> str:
        parts: list[str] = []
        for piece in self._pieces():
            parts.append(piece)
            await trio.lowlevel.checkpoint()
        return "".join(parts)


async def _read_head(stream: Stream) -> bytes | None:
    """Return what came up to the empty line, or too much without one; None when it ended."""
    received = bytearray()
    while END_OF_HEAD not in received and len(received) <= MAX_REQUEST_BYTES:
        part = await stream.receive_some(RECEIVE_BYTES)
        if not len(memoryview(part)):
            return None
        received += part
    head, end, _ = bytes(received).partition(END_OF_HEAD)
    return head + end if len(head) <= MAX_REQUEST_BYTES else head
