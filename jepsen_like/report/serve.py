"""A store of runs over HTTP on loopback: the list, the reports, and the files beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import HTTPServer, SimpleHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote, urlsplit

from dledger.jepsen_like.report.run_folder import PLAN_FILE, RESULT_FILE, Result, decode_result
from dledger.jepsen_like.report.run_report import REPORT_FILE, environment

RUNS_TEMPLATE: Final = "runs.html.j2"

RUNS_MAX: Final = 500
"""Runs listed, the newest; older ones are still there under their address."""

DEPTH_MAX: Final = 3
"""Folders below the store in which a run may lie, e.g. one per suite and one per day."""

SILENCE_MAX_S: Final = 2.0
"""A browser opens connections it does not use; one of them must not keep the next request out."""

ICON: Final = "/favicon.ico"
"""Every browser asks for it by itself; not found would stand in its console as an error."""

_NOTHING_FROM_OUTSIDE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'"
_LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class RunLine:
    """One line of the list.

    Attributes:
        name: Path of the run's folder below the store.
        link: To its report; empty when there is none.
        begin: When it began, as its result has it; empty when it has none.
    """

    name: str
    link: str
    verdict: str
    begin: str
    ok: int
    info: int
    fail: int
    faults: int


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


class _Handler(SimpleHTTPRequestHandler):
    """Serves the files below a store, and the list of its runs in place of a list of files."""

    timeout = SILENCE_MAX_S
    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".html": "text/html; charset=utf-8",
        **dict.fromkeys((".log", ".txt", ".json", ".md"), "text/plain; charset=utf-8"),
    }

    def send_head(self) -> BytesIO | BinaryIO | None:
        path = self.path.partition("?")[0]
        store = Path(self.directory)
        # A page from elsewhere may have made its own name point here.
        if _name_of(self.headers.get("Host", "")) not in _LOOPBACK_NAMES:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif path == "/":
            return self._send_list(store)
        elif path == ICON:
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()
        elif not _is_below(store, self.translate_path(path)):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return super().send_head()
        return None

    def _send_list(self, store: Path) -> BytesIO:
        html = environment().get_template(RUNS_TEMPLATE).render(runs=runs_of(store)).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(html)))
        self.end_headers()
        return BytesIO(html)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _NOTHING_FROM_OUTSIDE)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing: what a person opens is not an event of the run."""


def _is_below(store: Path, path: str) -> bool:
    """Return whether a file is in the store, and not behind a link that leads out of it."""
    try:
        file = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return False
    return file.is_relative_to(store.resolve()) and file.is_file()


def _name_of(host_header: str) -> str:
    try:
        return urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return ""


def listen(store: Path, port: int = 0) -> HTTPServer:
    """Return a server that listens on loopback; its owner serves with it and closes it.

    Raises OSError: the port is taken.
    """
    return HTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(store)))
