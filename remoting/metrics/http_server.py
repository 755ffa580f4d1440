"""A port that answers ``GET /metrics``, and nothing else; one answer per connection.

Not a web server: no TLS, no accounts, no bodies. It is for a scraper nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from commitlog.errors import MQError
from remoting.log import get_logger
from remoting.metrics.families import CONTENT_TYPE
from remoting.seams import Network, Stream

MAX_REQUEST_BYTES: Final = 8_192
"""Of a request's head; Prometheus' are below 1 KiB."""

RECEIVE_BYTES: Final = 4_096

ANSWER_TIMEOUT_S: Final = 10.0
"""For one connection from its first byte to its last: what Prometheus waits for at most."""

MAX_SCRAPES: Final = 8
"""Connections at a time, each with a page of some MB at most; one more is closed at once."""

PATH: Final = "/metrics"

END_OF_HEAD: Final = b"\r\n\r\n"

_log = get_logger(__name__)

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def status_of(head: bytes) -> int:
    """Return the status that a request is answered with.

    Args:
        head: What came, up to the empty line; without one it was too long.
    """
    if END_OF_HEAD not in head:
        return 431
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return 400
    method, target, _ = words
    if method != b"GET":
        return 405
    return 200 if target.split(b"?", 1)[0] == PATH.encode() else 404


def answer_bytes(status: int, text: str) -> bytes:
    """Return a whole answer; the connection is closed after it."""
    # What clients call themselves need not be text that can be encoded.
    body = text.encode("utf-8", "replace")
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {CONTENT_TYPE if status == 200 else 'text/plain; charset=utf-8'}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status == 405:
        lines.append("Allow: GET")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class MetricsServer:
    """Serves a page.

    Args:
        pieces: The page, piece by piece; others are served between two of them.
    """

    def __init__(self, network: Network, pieces: Callable[[], Iterable[str]]) -> None:
        self._network = network
        self._pieces = pieces
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
        text = f"{_REASONS.get(status)}: GET {PATH}\n"
        if status == 200:
            try:
                text = await self._page()
            except MQError as error:
                _log.warning("metrics_not_collected", error=str(error))
                status, text = 500, f"{error}\n"
        await stream.send_all(answer_bytes(status, text))

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
