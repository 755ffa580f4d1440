"""The port that answers GET /metrics, over connections in memory and on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from dledger.commitlog.errors import OffsetOutOfRangeError
from dledger.remoting.metrics import (
    ANSWER_TIMEOUT_S,
    MAX_REQUEST_BYTES,
    MAX_SCRAPES,
    MetricsServer,
    status_of,
)
from dledger.testing.doubles import MemoryNetwork, MemoryStream

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
