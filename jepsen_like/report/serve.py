"""A store of runs over HTTP on loopback: the list, the reports, and the files beside them.

What is answered is decided in `answer`, a plain function of the store and a path. The edge serves
one request at a time: its users are one person and a browser.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from dledger.jepsen_like.report.page import environment
from dledger.jepsen_like.report.run_folder import PLAN_FILE, RESULT_FILE, Result, decode_result
from dledger.jepsen_like.report.run_report import REPORT_FILE

RUNS_TEMPLATE: Final = "runs.html.j2"

RUNS_MAX: Final = 500
"""Runs listed, the newest; older ones are still there under their address."""

DEPTH_MAX: Final = 3
"""Folders below the store in which a run may lie, e.g. one per suite and one per day."""

SILENCE_MAX_S: Final = 2.0
"""A browser opens connections it does not use; one of them must not keep the next request out."""

ICON: Final = "/favicon.ico"
"""Every browser asks for it by itself; not found would stand in its console as an error."""

_TEXT_SUFFIXES: Final = frozenset({".log", ".txt", ".json", ".md"})
_NOTHING_FROM_OUTSIDE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'"
_LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class RunLine:
    """One line of the list.

    Attributes:
        name: Path of the run's folder below the store.
        link: To its report; empty when there is none.
        verdict: ``valid``, ``invalid`` or ``unknown``.
        begin: When it began, as its result has it; empty when it has none.
        ok: Operations that were acknowledged.
        info: Operations of unknown outcome.
        fail: Operations that certainly failed.
        faults: Faults that were done.
    """

    name: str
    link: str
    verdict: str
    begin: str
    ok: int
    info: int
    fail: int
    faults: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with."""

    status: HTTPStatus
    content_type: str
    body: bytes


def runs_of(store: Path) -> list[RunLine]:
    """Return the runs below *store*, the newest first; those that do not say when come last."""
    folders = sorted(_run_folders(store, DEPTH_MAX), key=lambda folder: folder.as_posix())
    lines = [_line(store, folder) for folder in folders]
    return sorted(lines, key=lambda line: (line.begin, line.name), reverse=True)[:RUNS_MAX]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.is_dir() or path.is_symlink():
            continue
        if any((path / name).is_file() for name in (RESULT_FILE, PLAN_FILE, REPORT_FILE)):
            yield path
        elif depth > 1:
            yield from _run_folders(path, depth - 1)


def _line(store: Path, folder: Path) -> RunLine:
    try:
        result, _ = decode_result((folder / RESULT_FILE).read_bytes())
    except OSError:
        result = Result()
    name = folder.relative_to(store).as_posix()
    link = quote(f"/{name}/{REPORT_FILE}") if (folder / REPORT_FILE).is_file() else ""
    counts = {
        outcome: sum(by_outcome.get(outcome, 0) for by_outcome in result.counts.values())
        for outcome in ("ok", "info", "fail")
    }
    return RunLine(
        name, link, result.verdict, result.begin, faults=sum(result.faults.values()), **counts
    )


def answer(store: Path, target: str) -> Answer:
    """Return what *target*, the path of a request, is answered with.

    ``/`` is the list; everything else is a file below *store*, or not found. A path that leads
    out of the store, through ``..`` or through a link, is not found either.
    """
    path = unquote(urlsplit(target).path)
    if path == "/":
        html = environment().get_template(RUNS_TEMPLATE).render(runs=runs_of(store))
        return Answer(HTTPStatus.OK, "text/html; charset=utf-8", html.encode())
    if path == ICON:
        return Answer(HTTPStatus.NO_CONTENT, "image/x-icon", b"")
    file = _file_below(store, path)
    if file is None:
        return Answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"There is no such file.")
    try:
        return Answer(HTTPStatus.OK, _content_type(file), file.read_bytes())
    except OSError:
        text = b"This file cannot be read."
        return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text)


def _file_below(store: Path, path: str) -> Path | None:
    if "\0" in path or ".." in path.split("/"):
        return None
    try:
        root = store.resolve(strict=True)
        file = (root / path.lstrip("/")).resolve(strict=True)
    except (OSError, RuntimeError):
        return None  # it is not there, or its links go round in a circle
    return file if file.is_relative_to(root) and file.is_file() else None


def _content_type(file: Path) -> str:
    if file.suffix in _TEXT_SUFFIXES:
        return "text/plain; charset=utf-8"
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _name_of(host_header: str) -> str:
    try:
        return urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return ""


def listen(store: Path, host: str = "127.0.0.1", port: int = 0) -> HTTPServer:
    """Return a server that listens; its owner serves with it and closes it.

    Args:
        port: 0 for any; `server_port` has the number.
    Raises:
        OSError: The port is taken, or the host is none of this machine's.
    """
    is_private = host in _LOOPBACK_NAMES

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENCE_MAX_S

        def do_GET(self) -> None:  # http.server calls it so
            # A page from elsewhere may have made its own name point here.
            if not is_private or _name_of(self.headers.get("Host", host)) in _LOOPBACK_NAMES:
                self._send(answer(store, self.path))
            else:
                text = b"Ask for this machine by its own name."
                self._send(Answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", text))

        def _send(self, answered: Answer) -> None:
            self.send_response(answered.status)
            self.send_header("Content-Type", answered.content_type)
            self.send_header("Content-Length", str(len(answered.body)))
            self.send_header("Content-Security-Policy", _NOTHING_FROM_OUTSIDE)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(answered.body)

        def log_message(self, *_: object) -> None:
            """Print nothing: what a person opens is not an event of the run."""

    return HTTPServer((host, port), Handler)


def serve(
    store: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_listening: Callable[[str], object] = lambda address: None,
) -> None:
    """Serve *store* until interrupted; for the command line, it blocks.

    Args:
        host: A host that reaches it can read the store: loopback unless another is given.
        port: 0 for any.
        on_listening: Is called with the address once requests are answered.
    Raises:
        OSError: The port is taken, or the host is none of this machine's.
    """
    with listen(store, host, port) as server:
        on_listening(f"http://{host}:{server.server_port}/")
        server.serve_forever()
