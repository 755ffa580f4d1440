"""The routes of a client, and the NameServers it reads them from.

A NameServer is chosen at random, kept while it answers, and followed by the next one when it fails.
The addresses come from the caller or from an HTTP address server that is read again from time to
time.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import trio

from dledger.client.core.client_state import Announcements, ClientCounters
from dledger.client.core.errors import (
    ClientClosedError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
    refusal,
)
from dledger.client.core.links import GroupIdentities, stated_identities
from dledger.client.core.route import (
    DEFAULT_TOPIC,
    LEADER_ID,
    LeaderTable,
    RouteTable,
    TopicRoute,
    parse_address_list,
)
from dledger.commitlog.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from dledger.remoting.addresses import bracketed, found_address
from dledger.remoting.client import RemotingClient
from dledger.remoting.errors import RemotingError
from dledger.remoting.log import get_logger
from dledger.remoting.protocol.bodies import TopicRouteData
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import GROUP_IDENTITIES_FIELD, GetRouteInfoHeader
from dledger.remoting.seams import Clock, Network, Rng

ADDRESS_SERVER_PERIOD_S: Final = 120.0
"""How often the HTTP address server is read again; RocketMQ's period."""
HTTP_TIMEOUT_S: Final = 3.0
"""For connecting and reading the whole answer of the address server."""
MAX_HTTP_ANSWER_BYTES: Final = 64 * 1024
"""A list of addresses is short; more is not one."""
RECEIVE_BYTES: Final = 16 * 1024

NEW_TOPIC_WAIT_S: Final = 2.0
"""A broker registers a new topic at once; a send is acknowledged before NameServers have it."""
NEW_TOPIC_POLL_S: Final = 0.05

BORROWED_MAX: Final = 10_000
"""Routes kept of topics that no NameServer lists yet, about 1 KiB each; of more the oldest goes,
and is made again by the next send."""

BORROWED_S: Final = 120.0
"""For how long such a route is kept by an instance that others name topics to: four polls, and a
topic that was made is listed after one."""

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

        Raises NoNameServerError: none answers; the message names each with its reason.
        """
        if not self.list.addresses and self._url is not None:
            async with self._reading:
                if not self.list.addresses:
                    await self.read_address_server()
        reasons: list[str] = []
        for address in self.list.in_turn():
            try:
                response = await self._remoting.invoke(address, command, self._timeout_s)
            except (RemotingError, LocalProtocolError) as error:
                reasons.append(f"{address}: {error}")
                self.list.failed(address)
                continue
            self.list.answered(address)
            return response
        if not reasons:
            raise NoNameServerError("the address server names no NameServer")
        raise NoNameServerError("no NameServer answers: " + "; ".join(reasons))

    async def ask_at(self, address: str, command: RemotingCommand) -> RemotingCommand:
        """Ask one certain NameServer and return its answer, whatever its code.

        Raises NoNameServerError: it does not answer.
        """
        try:
            return await self._remoting.invoke(address, command, self._timeout_s)
        except (RemotingError, LocalProtocolError) as error:
            raise NoNameServerError(f"NameServer {address}: {error}") from error

    async def read_address_server(self) -> bool:
        """Read the list once; return whether it changed. A failure keeps the list as it is."""
        assert self._url is not None
        host, port, path = self._url
        try:
            text = await _http_get(self._network, host, port, path)
        except (OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            _log.warning("address_server_failed", host=host, port=port, error=str(error))
            return False
        # It may answer with anything, as with a page that reports an error.
        addresses = [address for address in parse_address_list(text) if found_address(address)]
        if not addresses:
            _log.warning("address_server_empty", host=host, port=port)
            return False
        return self.list.replace(addresses, self._rng.randrange(len(addresses)))

    async def keep_reading(self) -> None:
        """Read the address server until cancelled; returns at once if there is none."""
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
    """Return host, port and path of an http URL. Raises ConfigError: it is none."""
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
            await stream.send_all(
                f"GET {path} HTTP/1.0\r\nHost: {bracketed(host)}\r\n\r\n".encode()
            )
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


@dataclass(eq=False, repr=False)
class Routes:
    """The routes of one client: cached, refreshed, and polled while they are in use.

    *table*: last known routes; kept when NameServers fail.
    """

    _clock: Clock
    _leaders: LeaderTable
    _identities: GroupIdentities
    _announcements: Announcements
    _counters: ClientCounters
    _default_queue_nums: int
    _poll_period_s: float
    table: RouteTable = field(default_factory=RouteTable)
    version: int = 0
    _servers: NameServers | None = None
    # In the order of their ages.
    _borrowed: dict[str, TopicRoute] = field(default_factory=dict)
    _borrowed_at_s: dict[str, float] = field(default_factory=dict)
    _topics_in_use: dict[str, None] = field(default_factory=dict)
    _members: dict[str, dict[int, str]] = field(default_factory=dict)
    _fetching: dict[str, trio.Lock] = field(default_factory=dict)

    def open(self, servers: NameServers) -> None:
        """Ask *servers* from now on."""
        self._servers = servers

    def close(self) -> None:
        """Ask no NameServer any more."""
        self._servers = None

    @property
    def name_servers(self) -> NameServers:
        """The NameServers. Raises ClientClosedError: the client is not open."""
        if self._servers is None:
            raise ClientClosedError("the client is not open; use 'async with'")
        return self._servers

    async def find(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """Return the route of *topic*, from the cache unless *fresh*.

        When every NameServer is down a cached route is as good as it gets, fresh or not.

        Raises:
            NoRouteError: The NameServers do not know the topic.
            NoNameServerError: None answers and nothing is cached.
        """
        self._topics_in_use[topic] = None
        known = self.table.get(topic)
        if known is not None and not fresh:
            return known
        # Many senders begin at once; one question answers them all.
        async with self._fetching.setdefault(topic, trio.Lock()):
            newer = self.table.get(topic)
            if newer is not None and (newer is not known or not fresh):
                return newer
            try:
                return await self.refresh(topic)
            except NoNameServerError:
                if known is None:
                    raise
                return known
            except NoRouteError:
                if not fresh or topic not in self._borrowed:
                    raise
            return await self._route_of_new_topic(topic)

    async def _route_of_new_topic(self, topic: str) -> TopicRoute:
        """Ask until a NameServer lists a topic that sends of this client make.

        Raises:
            NoRouteError: Not within `NEW_TOPIC_WAIT_S`.
            NoNameServerError: None answers.
        """
        until = self._clock.monotonic() + NEW_TOPIC_WAIT_S
        while True:
            await self._clock.sleep(NEW_TOPIC_POLL_S)
            try:
                return await self.refresh(topic)
            except NoRouteError:
                if self._clock.monotonic() >= until:
                    raise

    async def publish(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """Return where messages of *topic* can go, from the cache unless *fresh*.

        For a topic that does not exist that is where the brokers would create it. While no group
        has a leader the route has no queues.

        Raises:
            NoRouteError: No broker can take it.
            NoNameServerError: None answers and nothing is cached.
        """
        try:
            route = await self.find(topic, fresh=fresh)
        except NoRouteError:
            borrowed = self._borrowed.get(topic)
            if borrowed is not None:
                return borrowed
            default = await self.find(DEFAULT_TOPIC, fresh=fresh)
            route = default.borrowed(topic, self._default_queue_nums)
            if route.publish_queues:
                self._borrow(topic, route)
        return route

    def _borrow(self, topic: str, route: TopicRoute) -> None:
        self._give_back(topic)
        if len(self._borrowed) >= BORROWED_MAX:
            oldest = next(iter(self._borrowed))
            self._give_back(oldest)
            self._topics_in_use.pop(oldest, None)
            self.version += 1
        self._borrowed[topic] = route
        self._borrowed_at_s[topic] = self._clock.monotonic()

    def _give_back(self, topic: str) -> None:
        self._borrowed.pop(topic, None)
        self._borrowed_at_s.pop(topic, None)

    def known_publish(self, topic: str) -> TopicRoute | None:
        """Return the cached route, also of a topic that does not exist yet; sends no request."""
        return self.table.get(topic) or self._borrowed.get(topic)

    async def refresh(self, topic: str) -> TopicRoute:
        """Ask a NameServer for the route of *topic* now.

        Raises:
            NoRouteError: The NameServers do not know the topic; a cached route is kept.
            NoNameServerError: None answers.
            RequestFailedError: An answer that makes no sense.
        """
        self._counters.route_refreshes += 1
        header = GetRouteInfoHeader(topic, accept_standard_json_only=True, group_identities=True)
        response = await self.name_servers.invoke(
            request(RequestCode.GET_ROUTEINFO_BY_TOPIC, dict(header.encode()))
        )
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRouteError(response.remark or f"no NameServer knows topic {topic}")
        if response.code != ResponseCode.SUCCESS:
            raise refusal(f"route of {topic}", response)
        try:
            route = TopicRoute.from_data(topic, TopicRouteData.decode(response.body))
        except RemoteProtocolError as error:
            raise RequestFailedError(f"route of {topic}: {error}") from error
        stated = stated_identities(response.ext.get(GROUP_IDENTITIES_FIELD))
        self._identities.take(stated, route.addresses, self._clock.monotonic())
        self._give_back(topic)
        if self.table.put(route):
            self.version += 1
            self._announcements.routes_changed()
        for name in route.addresses:
            self._leaders.take_route(name, route.leader_address(name))
        return route

    def forget_unknown(self, kept: Container[str]) -> None:
        """Ask no more for topics that no NameServer knows, but for *kept*."""
        until_s = self._clock.monotonic() - BORROWED_S
        for topic in [name for name, at_s in self._borrowed_at_s.items() if at_s <= until_s]:
            if topic not in kept:
                self._give_back(topic)
                self.version += 1
        for topic in list(self._topics_in_use):
            lock = self._fetching.get(topic)
            is_known = self.table.get(topic) is not None or topic in self._borrowed
            if not is_known and topic not in kept and not (lock is not None and lock.locked()):
                del self._topics_in_use[topic]
                self._fetching.pop(topic, None)

    def add_members(self, broker_name: str, addresses: dict[int, str]) -> None:
        """Take in the members of a group as a NameServer lists them, without a topic's route."""
        self._members[broker_name] = addresses
        self._leaders.take_route(broker_name, addresses.get(LEADER_ID))

    def member_addresses(self, broker_name: str) -> list[str]:
        """Return every known address of a group."""
        found = dict.fromkeys(self.table.addresses(broker_name))
        found.update(dict.fromkeys(self._members.get(broker_name, {}).values()))
        return list(found)

    async def keep_polling(self) -> None:
        """Refresh the routes in use every period, until cancelled or closed."""
        while True:
            await self._clock.sleep(self._poll_period_s)
            for topic in list(self._topics_in_use):
                try:
                    await self.refresh(topic)
                except NoRouteError:
                    continue
                except ClientClosedError:
                    return  # it is abandoned, and its block goes on until it is left
                except RequestFailedError as error:
                    # Of this topic alone, as where the account has no right to it.
                    _log.warning("route_poll_refused", topic=topic, error=str(error))
                except NoNameServerError as error:
                    _log.warning("route_poll_failed", topic=topic, error=str(error))
                    break
