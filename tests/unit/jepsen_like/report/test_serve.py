"""The list of runs, and that nothing but the store is served."""

import json
from pathlib import Path

import pytest
import trio

from dledger.jepsen_like.report.serve import listen, runs_of

pytestmark = pytest.mark.real_time


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


async def ask(store: Path, target: str, host: str = "localhost") -> tuple[int, str, bytes]:
    """Ask a server of its own for *target*; return status, content type and body."""
    with listen(store) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, server.handle_request)
            stream = await trio.open_tcp_stream("127.0.0.1", server.server_port)
            async with stream:
                await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                answered = b"".join([chunk async for chunk in stream])
    head, _, body = answered.partition(b"\r\n\r\n")
    assert b"Content-Security-Policy: default-src 'none'" in head
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers.get("content-type", ""), body


async def test_the_list_has_verdict_time_and_counts_the_newest_first(store: Path) -> None:
    newest, older = runs_of(store)
    assert (newest.name, newest.verdict, newest.begin) == ("one", "invalid", "2032")
    assert (newest.ok, newest.info, newest.fail, newest.faults) == (1234, 3, 4, 5)
    assert newest.link == "/one/report.html"
    assert (older.name, older.verdict, older.link) == ("soak/a b", "valid", "")
    status, content_type, body = await ask(store, "/")
    assert (status, content_type) == (200, "text/html; charset=utf-8")
    html = body.decode()
    assert '<a href="/one/report.html">one</a>' in html
    assert "1,234" in html
    assert html.index("invalid</td>") < html.index("soak/a b (no report yet)")


async def test_reports_and_files_beside_them_are_served(store: Path) -> None:
    page = await ask(store, "/one/report.html?again=1")
    assert page == (200, "text/html; charset=utf-8", b"<p>the report</p>")
    assert await ask(store, "/one/n1.log") == (200, "text/plain; charset=utf-8", b"<b>")


async def test_what_browsers_ask_for_by_themselves_is_no_error(store: Path) -> None:
    assert await ask(store, "/favicon.ico") == (204, "", b"")


@pytest.mark.parametrize(
    "target",
    [
        *("/../secret", "/one/../../secret", "/%2e%2e/secret", "/one/%2e%2e%2f%2e%2e%2fsecret"),
        *("/../store-two/secret", "//etc/passwd", "/%2fetc/passwd", "/etc/passwd", "/one/%00"),
        *("/one", "/one/", "/link/secret", "/file", "/round", "/nothing"),
    ],
)
async def test_what_is_not_below_the_store_is_not_found(store: Path, target: str) -> None:
    (store / "link").symlink_to(store.parent)
    (store / "file").symlink_to(store.parent / "secret")
    (store / "round").symlink_to(store / "round")
    status, _, body = await ask(store, target)
    assert status == 404
    assert b"secret" not in body


async def test_a_name_that_was_made_to_point_here_gets_nothing(store: Path) -> None:
    status, _, body = await ask(store, "/one/report.html", host="evil.example")
    assert status == 421
    assert b"report</p>" not in body
