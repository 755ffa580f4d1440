"""The list of runs, and that nothing but the store is served."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

import pytest
import trio

from dledger.jepsen_like.report.serve import answer, listen, runs_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    for name, verdict, begin in (("soak/a b", "valid", "2031-05-04"), ("one", "invalid", "2032")):
        run = store / name
        run.mkdir(parents=True)
        counts = {"send": {"ok": 1200, "info": 3, "fail": 4}, "pull": {"ok": 34}}
        reported = {"verdict": verdict, "begin": begin, "counts": counts, "faults": {"kill": 5}}
        (run / "result.json").write_text(json.dumps(reported))
    (store / "one" / "report.html").write_text("<p>the report</p>")
    (store / "one" / "n1.log").write_text("<b>")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store-two").mkdir()
    (tmp_path / "store-two" / "secret").write_text("secret")
    return store


def test_the_list_has_verdict_time_and_counts_the_newest_first(store: Path) -> None:
    newest, older = runs_of(store)
    assert (newest.name, newest.verdict, newest.begin) == ("one", "invalid", "2032")
    assert (newest.ok, newest.info, newest.fail, newest.faults) == (1234, 3, 4, 5)
    assert newest.link == "/one/report.html"
    assert (older.name, older.verdict, older.link) == ("soak/a b", "valid", "")
    page = answer(store, "/")
    assert (page.status, page.content_type) == (HTTPStatus.OK, "text/html; charset=utf-8")
    html = page.body.decode()
    assert '<a href="/one/report.html">one</a>' in html
    assert "1,234" in html
    assert html.index("invalid</td>") < html.index("soak/a b (no report yet)")


def test_reports_and_files_beside_them_are_served(store: Path) -> None:
    page = answer(store, "/one/report.html?again=1")
    assert (page.status, page.body) == (HTTPStatus.OK, b"<p>the report</p>")
    assert page.content_type == "text/html; charset=utf-8"
    log = answer(store, "/one/n1.log")
    assert (log.content_type, log.body) == ("text/plain; charset=utf-8", b"<b>")


def test_what_browsers_ask_for_by_themselves_is_no_error(store: Path) -> None:
    answered = answer(store, "/favicon.ico")
    assert (answered.status, answered.body) == (HTTPStatus.NO_CONTENT, b"")


@pytest.mark.parametrize(
    "target",
    [
        "/../secret",
        "/one/../../secret",
        "/%2e%2e/secret",
        "/one/%2e%2e%2f%2e%2e%2fsecret",
        "/../store-two/secret",
        "//etc/passwd",
        "/%2fetc/passwd",
        "/etc/passwd",
        "/one\0",
        "/one/%00",
        "/one",
        "/link/secret",
        "/file",
        "/round",
        "/nothing",
        "",
    ],
)
def test_what_is_not_below_the_store_is_not_found(store: Path, target: str) -> None:
    (store / "link").symlink_to(store.parent)
    (store / "file").symlink_to(store.parent / "secret")
    (store / "round").symlink_to(store / "round")
    answered = answer(store, target)
    assert answered.status == HTTPStatus.NOT_FOUND
    assert b"secret" not in answered.body


async def ask(store: Path, request: bytes) -> bytes:
    """Send *request* to a server of its own and return all it answers."""
    with listen(store) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, server.handle_request)
            stream = await trio.open_tcp_stream("127.0.0.1", server.server_port)
            async with stream:
                await stream.send_all(request)
                answered = b"".join([chunk async for chunk in stream])
    return answered


async def test_over_http_on_loopback(store: Path) -> None:
    answered = await ask(store, b"GET /one/report.html HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, body = answered.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK")
    assert b"Content-Security-Policy: default-src 'none'" in head
    assert body == b"<p>the report</p>"


async def test_a_climbing_path_is_refused_over_http(store: Path) -> None:
    answered = await ask(store, b"GET /../secret HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answered.startswith(b"HTTP/1.0 404 ")
    assert b"secret" not in answered


async def test_a_name_that_was_made_to_point_here_gets_nothing(store: Path) -> None:
    answered = await ask(store, b"GET /one/report.html HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert answered.startswith(b"HTTP/1.0 421 ")
    assert b"report</p>" not in answered
