"""Finds a NameServer that answers: random start, kept while it works, the next one on failure.

The addresses come from the caller or from an HTTP address server that is read again from time to
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import trio

from client.core.errors import NoNameServerError
from client.core.route import parse_address_list
from commitlog.errors import ConfigError
from remoting.client import RemotingClient
from remoting.errors import RemotingError
from remoting.log import get_logger
from remoting.protocol.command import RemotingCommand
from remoting.seams import Clock, Network, Rng

ADDRESS_SERVER_PERIOD_S: Final = 120.0
"""How often the HTTP address server is read again; RocketMQ's period."""
HTTP_TIMEOUT_S: Final = 3.0
"""For connecting and reading the whole answer of the address server."""
MAX_HTTP_ANSWER_BYTES: Final = 64 * 1024
"""A list of addresses is short; more is not one."""
RECEIVE_BYTES: Final = 16 * 1024

_log = get_logger(__name__)


class NameServerList:
    """The addresses and the one in use. Pure state."""

    def __init__(self, addresses: Sequence[str] = (), start: int = 0) -> None:
        """Start with the address at place *start* modulo their number."""
        self._addresses = list(addresses)
        self._current = start % len(self._addresses) if self._addresses else 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses."""
        return tuple(self._addresses)

    def in_turn(self) -> list[str]:
        """Return all addresses, the one in use first."""
        return self._addresses[self._current :] + self._addresses[: self._current]

    def failed(self, address: str) -> None:
        """Move on to the next one if *address* is the one in use."""
        if self._addresses and self._addresses[self._current] == address:
            self._current = (self._current + 1) % len(self._addresses)

    def answered(self, address: str) -> None:
        """Keep to *address* from now on."""
        if address in self._addresses:
            self._current = self._addresses.index(address)

    def replace(self, addresses: Sequence[str], start: int = 0) -> bool:
        """Take a new list, keeping the one in use if it is still in it; tell if it is new."""
        if list(addresses) == self._addresses:
            return False
        in_use = self._addresses[self._current] if self._addresses else None
        self._addresses = list(addresses)
        if in_use in self._addresses:
            self._current = self._addresses.index(in_use)
        else:
            self._current = start % len(self._addresses) if self._addresses else 0
        return True


class NameServers:
    """Asks one NameServer after the other until one answers."""

    def __init__(
        self,
        remoting: RemotingClient,
        network: Network,
        clock: Clock,
        rng: Rng,
        addresses: Sequence[str],
        *,
        address_server_url: str | None = None,
        timeout_s: float = 3.0,
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            remoting: Its connections are used.
            network: For the HTTP address server.
            clock: For its period.
            rng: Chooses the first NameServer.
            addresses: ``host:port`` each.
            address_server_url: ``http://host[:port]/path`` that answers with a list of addresses.
            timeout_s: For each NameServer asked.
        Raises:
            ConfigError: Neither addresses nor a URL, or a URL that is not plain http.
        """
        if not addresses and not address_server_url:
            raise ConfigError("no NameServer is named: give addresses or an address server")
        self._url = None if address_server_url is None else split_url(address_server_url)
        self._reading = trio.Lock()
        self._remoting = remoting
        self._network = network
        self._clock = clock
        self._rng = rng
        self._timeout_s = timeout_s
        self.list = NameServerList(addresses, rng.randrange(len(addresses)) if addresses else 0)

    async def invoke(self, command: RemotingCommand) -> RemotingCommand:
        """Return the first answer any NameServer gives, whatever its code.

        Raises:
            NoNameServerError: None answers; the message names each with its reason.
        """
        if not self.list.addresses and self._url is not None:
            async with self._reading:
                if not self.list.addresses:
                    await self.read_address_server()
        reasons: list[str] = []
        for address in self.list.in_turn():
            try:
                response = await self._remoting.invoke(address, command, self._timeout_s)
            except RemotingError as error:
                reasons.append(f"{address}: {error}")
                self.list.failed(address)
                continue
            self.list.answered(address)
            return response
        if not reasons:
            raise NoNameServerError("the address server names no NameServer")
        raise NoNameServerError("no NameServer answers: " + "; ".join(reasons))

    async def read_address_server(self) -> bool:
        """Read the list once; return whether it changed. A failure keeps the list as it is."""
        assert self._url is not None
        host, port, path = self._url
        try:
            text = await _http_get(self._network, host, port, path)
        except (OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            _log.warning("address_server_failed", host=host, port=port, error=str(error))
            return False
        addresses = parse_address_list(text)
        if not addresses:
            _log.warning("address_server_empty", host=host, port=port)
            return False
        return self.list.replace(addresses, self._rng.randrange(len(addresses)))

    async def keep_reading(self) -> None:
        """Read the address server for ever; returns at once if there is none."""
        if self._url is None:
            return
        async with self._reading:
            if not self.list.addresses:
                await self.read_address_server()
        while True:
            await self._clock.sleep(ADDRESS_SERVER_PERIOD_S)
            async with self._reading:
                await self.read_address_server()


def split_url(url: str) -> tuple[str, int, str]:
    """Return host, port and path of an http URL.

    Raises:
        ConfigError: It is none.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"the address server must be http://host[:port]/path, not {url!r}")
    path = parts.path or "/"
    return parts.hostname, parts.port or 80, f"{path}?{parts.query}" if parts.query else path


async def _http_get(network: Network, host: str, port: int, path: str) -> str:
    """Return the body of a 200 answer.

    Raises:
        OSError: No connection, or no whole answer in time.
        ValueError: Not such an answer.
    """
    answer = bytearray()
    ended = False
    with trio.move_on_after(HTTP_TIMEOUT_S):
        stream = await network.connect(host, port, timeout_s=HTTP_TIMEOUT_S)
        try:
            # 1.0: the answer ends with the connection and is never chunked.
            await stream.send_all(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            while data := bytes(await stream.receive_some(RECEIVE_BYTES)):
                answer += data
                if len(answer) > MAX_HTTP_ANSWER_BYTES:
                    raise ValueError(f"the answer has more than {MAX_HTTP_ANSWER_BYTES} bytes")
            ended = True
        finally:
            await stream.aclose()
    if not ended:
        raise TimeoutError(f"no whole answer within {HTTP_TIMEOUT_S} s")
    head, separator, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split()
    if not separator or len(status) < 2 or status[1] != b"200":
        raise ValueError(f"not a 200 answer: {head[:80]!r}")
    return body.decode("ascii", "replace")
