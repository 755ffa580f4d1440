"""What all producers, consumers and admins of one client share: connections, routes, heartbeats.

::

    producers, consumers, admin
          │ group names, topics in use
    ClientInstance ── routes ◄── NameServers (poll, and at once when a leader is lost)
          │         └ leaders ◄── "not leader" answers, routes, Raft status of the members
    one RemotingClient ── one connection and one heartbeat per broker
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import trio

from client.core.broker_requests import CheckBacks, ConsumerCalls, OpenRequests
from client.core.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    NoNameServerError,
    NoRouteError,
    RequestFailedError,
    RequestTimedOutError,
)
from client.core.heartbeats import UNREGISTER_TIMEOUT_S, Heartbeats
from client.core.leaders import LeaderSearch, LeaderTable
from client.core.links import GroupIdentities, Link, stated_identities, truth
from client.core.name_server import NameServers, split_url
from client.core.retry import (
    FailureKind,
    RetryPolicy,
    RetrySchedule,
    Where,
    retry_after_s,
)
from client.core.route import DEFAULT_TOPIC, LEADER_ID, RouteTable, TopicRoute
from commitlog.errors import ConfigError
from commitlog.seams import Disk
from remoting.client import RemotingClient
from remoting.connection import Connection
from remoting.errors import (
    ConnectFailedError,
    ConnectionLostError,
    RemotingError,
    TooManyInFlightError,
)
from remoting.errors import RequestTimedOutError as CallTimedOutError
from remoting.log import get_logger
from remoting.processor import Limiter, ProcessorTable
from remoting.protocol.bodies import (
    TopicRouteData,
)
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import ExtFields, RemotingCommand, request
from remoting.protocol.headers import (
    GROUP_IDENTITIES_FIELD,
    ConsumerGroupHeader,
    GetRouteInfoHeader,
)
from remoting.protocol.signature import Credentials
from remoting.seams import Clock, Executor, Network, Rng

HEARTBEAT_PERIOD_S: Final = 30.0
"""RocketMQ's; a broker drops a client after 120 s of silence."""
ROUTE_POLL_PERIOD_S: Final = 30.0
"""RocketMQ's; leaders are found sooner by hints, the poll finds new topics and queues."""
RPC_TIMEOUT_S: Final = 3.0
"""One attempt of a request."""
MAX_SERVER_REQUESTS: Final = 1024
"""Requests of brokers that are open at a time; they are told again what they could not tell."""
LATE_READ_RETRIES: Final = 1_000_000
"""Reads change nothing: they are repeated until the deadline, however often."""

_READ_POLICY: Final = RetryPolicy(max_retries=LATE_READ_RETRIES)
_log = get_logger(__name__)

NEW_TOPIC_WAIT_S: Final = 2.0
"""A broker registers a new topic at once; a send is acknowledged before NameServers have it."""
NEW_TOPIC_POLL_S: Final = 0.05
_live_client_ids: trio.lowlevel.RunVar[set[str]] = trio.lowlevel.RunVar("live_client_ids")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client instance.

    Attributes:
        name_servers: ``host:port`` each.
        address_server_url: HTTP address server, read every 120 s.
        client_ip: Address in client id and message ids, numeric.
        pid: Process id in client id and message ids.
        instance_name: Tells instances of one process apart; empty: made from *pid* and a random
            number.
        heartbeat_period_s: Between heartbeats to one broker.
        route_poll_period_s: Between polls of the routes in use.
        rpc_timeout_s: One attempt of a request.
        default_topic_queue_nums: Most queues a topic gets that is created by sending to it.
        tls: For connections to brokers and NameServers; None: plain.
        credentials: Every request is signed with them; None: none is.
    """

    name_servers: tuple[str, ...] = ()
    address_server_url: str | None = None
    client_ip: str = "127.0.0.1"
    pid: int = 0
    instance_name: str = ""
    heartbeat_period_s: float = HEARTBEAT_PERIOD_S
    route_poll_period_s: float = ROUTE_POLL_PERIOD_S
    rpc_timeout_s: float = RPC_TIMEOUT_S
    default_topic_queue_nums: int = 4
    tls: ssl.SSLContext | None = None
    credentials: Credentials | None = None


@dataclass(slots=True)
class ClientCounters:
    """What the instance has done so far; for tests and people.

    Attributes:
        route_refreshes: Routes asked of a NameServer.
        redirects_by_hint: Requests that followed the leader a "not leader" answer named.
        leader_searches: Rounds in which all members of a group were asked.
        leaders_found: Of these, those in which a member named another leader than before.
        heartbeats: Heartbeats answered.
    """

    route_refreshes: int = 0
    redirects_by_hint: int = 0
    leader_searches: int = 0
    leaders_found: int = 0
    heartbeats: int = 0


class ManagedScope:
    """Lets a class be written as one ``@asynccontextmanager`` method and used by ``async with``."""

    _manager: AbstractAsyncContextManager[None] | None = None

    def _scope(self) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        if self._manager is not None:
            raise ClientClosedError(f"a {type(self).__name__} is opened once")
        self._manager = self._scope()
        await self._manager.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._manager is not None
        if not isinstance(error, Exception):
            return await self._manager.__aexit__(kind, error, trace)
        # The nurseries inside would wrap the caller's error in groups; it is to come out as it is.
        try:
            await self._manager.__aexit__(_BodyFailed, _BodyFailed(), None)
        except _BodyFailed:
            return False
        except BaseExceptionGroup as group:
            rest = group.split(_BodyFailed)[1]
            if rest is not None:
                raise rest from error
        return False


class _BodyFailed(Exception):  # noqa: N818  # never seen outside
    """Stands for the error of the caller's block while a scope closes."""


class ClientInstance(ManagedScope):
    """One per process and client id; open it with ``async with`` and share it.

    Attributes:
        client_id: ``ip@instance``.
        routes: Last known routes; kept when NameServers fail.
        leaders: Who leads which group.
        identities: Which group a broker name belongs to.
        counters: See `ClientCounters`.
        server_requests: What brokers may ask of this client; to be registered before it is opened.
        executor: Runs listeners that block; None: there are none.
        disk: Where broadcasting consumers keep their offsets; None: they cannot.
        check_backs: Who answers their questions about transactions.
        consumer_calls: Who answers their questions about consumers.
        requests: Requests of its producers that wait for their replies.
        route_version: Grows with every change of a route or of a leader named by one.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        clock: Clock,
        network: Network,
        rng: Rng,
        executor: Executor | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Prepare; nothing is connected before ``async with``.

        Raises:
            ConfigError: No NameServer is named, or the address server is no http URL.
        """
        self.config = config
        self.clock = clock
        self.rng = rng
        self.network = network
        self.executor = executor
        self.disk = disk
        self.server_requests = ProcessorTable()
        self.server_requests.register(
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            self._consumer_ids_changed,
            Limiter("consumer ids changed", MAX_SERVER_REQUESTS),
        )
        self.check_backs = CheckBacks(self.server_requests)
        self.consumer_calls = ConsumerCalls(self.server_requests)
        self.requests = OpenRequests(self.server_requests, clock, rng)
        self.heartbeats = Heartbeats(self)
        instance_name = config.instance_name or f"{config.pid}#{rng.randrange(1 << 48)}"
        self.client_id = f"{config.client_ip}@{instance_name}"
        self.routes = RouteTable()
        self.leaders = LeaderTable()
        self.identities = GroupIdentities()
        self.leader_search = LeaderSearch(self)
        self.counters = ClientCounters()
        self.route_version = 0
        self._borrowed: dict[str, TopicRoute] = {}
        self._topics_in_use: dict[str, None] = {}
        self._members: dict[str, dict[int, str]] = {}
        self.links: dict[str, Link] = {}
        self._opening: dict[str, trio.Lock] = {}
        self._fetching: dict[str, trio.Lock] = {}
        self._closed = True
        self._remoting: RemotingClient | None = None
        self._nursery: trio.Nursery | None = None
        self._name_servers: NameServers | None = None
        if not config.name_servers and not config.address_server_url:
            raise ConfigError("no NameServer is named: give name_servers or address_server_url")
        if config.address_server_url:
            split_url(config.address_server_url)

    # ------------------------------------------------------------------------------ life

    @asynccontextmanager
    async def _scope(self) -> AsyncIterator[None]:
        try:
            live = _live_client_ids.get()
        except LookupError:
            live = set()
            _live_client_ids.set(live)
        if self.client_id in live:
            raise ConfigError(
                f"client id {self.client_id} is in use in this process: share its instance"
            )
        live.add(self.client_id)
        try:
            async with trio.open_nursery() as connections:
                self._remoting = RemotingClient(
                    connections,
                    self.network,
                    self.server_requests,
                    tls=self.config.tls,
                    credentials=self.config.credentials,
                )
                self._name_servers = NameServers(
                    self._remoting,
                    self.network,
                    self.clock,
                    self.rng,
                    self.config.name_servers,
                    address_server_url=self.config.address_server_url,
                    timeout_s=self.config.rpc_timeout_s,
                )
                self._closed = False
                try:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(self._name_servers.keep_reading)
                        nursery.start_soon(self._poll_routes)
                        nursery.start_soon(self.heartbeats.run)
                        try:
                            yield
                        finally:
                            nursery.cancel_scope.cancel()
                finally:
                    self._closed = True
                    with trio.move_on_after(UNREGISTER_TIMEOUT_S, shield=True):
                        await self.heartbeats.remove_all()
                    self._remoting.close()
                    connections.cancel_scope.cancel()
        finally:
            live.discard(self.client_id)

    def abandon(self) -> None:
        """Break every connection at once and send nothing more, as when the process is killed.

        What still uses the instance ends with `ClientClosedError`; it is to be left all the same.
        """
        self._closed = True
        if self._remoting is not None:
            self._remoting.close()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more, not even a good-bye."""
        return self._closed

    @property
    def nursery(self) -> trio.Nursery:
        """Runs the background work of producers and consumers.

        Raises:
            ClientClosedError: The instance is not open.
        """
        if self._nursery is None or self._closed:
            raise ClientClosedError(f"client {self.client_id} is not open; use 'async with'")
        return self._nursery

    @property
    def name_servers(self) -> NameServers:
        """The NameServers.

        Raises:
            ClientClosedError: The instance is not open.
        """
        if self._name_servers is None or self._closed:
            raise ClientClosedError(f"client {self.client_id} is not open; use 'async with'")
        return self._name_servers

    # ------------------------------------------------------------------------------ routes

    async def route(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """Return the route of *topic*, from the cache unless *fresh*.

        When every NameServer is down a cached route is as good as it gets, fresh or not.

        Raises:
            NoRouteError: The NameServers do not know the topic.
            NoNameServerError: None answers and nothing is cached.
        """
        self._topics_in_use[topic] = None
        known = self.routes.get(topic)
        if known is not None and not fresh:
            return known
        # Many senders begin at once; one question answers them all.
        async with self._fetching.setdefault(topic, trio.Lock()):
            newer = self.routes.get(topic)
            if newer is not None and (newer is not known or not fresh):
                return newer
            try:
                return await self.refresh_route(topic)
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
        until = self.clock.monotonic() + NEW_TOPIC_WAIT_S
        while True:
            await self.clock.sleep(NEW_TOPIC_POLL_S)
            try:
                return await self.refresh_route(topic)
            except NoRouteError:
                if self.clock.monotonic() >= until:
                    raise

    async def publish_route(self, topic: str) -> TopicRoute:
        """Return where messages of *topic* can go.

        For a topic nobody created that is where the brokers would create it.

        Raises:
            NoRouteError: No broker can take it.
            NoNameServerError: None answers and nothing is cached.
        """
        try:
            route = await self.route(topic)
        except NoRouteError:
            borrowed = self._borrowed.get(topic)
            if borrowed is not None:
                return borrowed
            default = await self.route(DEFAULT_TOPIC)
            route = default.borrowed(topic, self.config.default_topic_queue_nums)
            if route.publish_queues:
                self._borrowed[topic] = route
        return route

    def known_publish_route(self, topic: str) -> TopicRoute | None:
        """Return the cached route, also of a topic that does not exist yet; asks nobody."""
        return self.routes.get(topic) or self._borrowed.get(topic)

    async def refresh_route(self, topic: str) -> TopicRoute:
        """Ask a NameServer for the route of *topic* now.

        Raises:
            NoRouteError: The NameServers do not know the topic; a cached route is kept.
            NoNameServerError: None answers.
            RequestFailedError: An answer that makes no sense.
        """
        self.counters.route_refreshes += 1
        header = GetRouteInfoHeader(topic, accept_standard_json_only=True, group_identities=True)
        response = await self.name_servers.invoke(
            request(RequestCode.GET_ROUTEINFO_BY_TOPIC, dict(header.encode()))
        )
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRouteError(response.remark or f"no NameServer knows topic {topic}")
        if response.code != ResponseCode.SUCCESS:
            raise RequestFailedError(
                f"route of {topic}: code {response.code} {response.remark or ''}",
                code=response.code,
                remark=response.remark or "",
            )
        route = TopicRoute.from_data(topic, TopicRouteData.decode(response.body))
        stated = stated_identities(response.ext.get(GROUP_IDENTITIES_FIELD))
        self.identities.take(stated, route.addresses, self.clock.monotonic())
        self._borrowed.pop(topic, None)
        if self.routes.put(route):
            self.route_version += 1
            self.heartbeats.routes_changed()
        for name in route.addresses:
            self.leaders.take_route(name, route.leader_address(name))
        return route

    async def ask_name_server_at(self, address: str, command: RemotingCommand) -> RemotingCommand:
        """Ask one certain NameServer and return its answer, whatever its code.

        Raises:
            NoNameServerError: It does not answer.
        """
        if self._remoting is None or self._closed:
            raise ClientClosedError(f"client {self.client_id} is not open; use 'async with'")
        try:
            return await self._remoting.invoke(address, command, self.config.rpc_timeout_s)
        except RemotingError as error:
            raise NoNameServerError(f"NameServer {address}: {error}") from error

    def add_members(self, broker_name: str, addresses: dict[int, str]) -> None:
        """Take in the members of a group as a NameServer lists them, without a topic's route."""
        self._members[broker_name] = addresses
        self.leaders.take_route(broker_name, addresses.get(LEADER_ID))

    def member_addresses(self, broker_name: str) -> list[str]:
        """Return every known address of a group."""
        found = dict.fromkeys(self.routes.addresses(broker_name))
        found.update(dict.fromkeys(self._members.get(broker_name, {}).values()))
        return list(found)

    async def _poll_routes(self) -> None:
        while True:
            await self.clock.sleep(self.config.route_poll_period_s)
            for topic in list(self._topics_in_use):
                try:
                    await self.refresh_route(topic)
                except NoRouteError:
                    continue
                except (NoNameServerError, RequestFailedError) as error:
                    _log.warning("route_poll_failed", topic=topic, error=str(error))
                    break

    # ------------------------------------------------------------------------------ brokers

    def _consumer_ids_changed(self, _connection: Connection, command: RemotingCommand) -> None:
        """A broker says that a consumer has come or gone (code 40); it wants no answer."""
        self.heartbeats.group_changed(ConsumerGroupHeader.decode(command.ext).consumer_group)

    def _link_ended(self) -> None:
        if not self._closed:
            self.heartbeats.connection_ended()

    async def link(self, address: str, timeout_s: float, *, group: str = "") -> Link:
        """Return a live connection to a broker, with what it understands.

        The first use of a connection asks for the broker's capabilities.

        Args:
            group: Broker name that it is used for; empty: whatever broker is there.

        Raises:
            BrokerUnreachableError: Not within *timeout_s*, or the broker there belongs to another
                group; nothing was sent but the question.
            ClientClosedError: The instance is closed.
        """
        link = await self._open_link(address, timeout_s)
        refusal = self.identities.refusal(group, address, link.identity) if group else ""
        if refusal:
            # Asked again at the next use: it may be another process by then.
            if self.links.get(address) is link:
                del self.links[address]
            link.connection.close("the broker belongs to another group")
            raise BrokerUnreachableError(f"broker {address}: {refusal}")
        return link

    async def _open_link(self, address: str, timeout_s: float) -> Link:
        link = self.links.get(address)
        if link is not None and not link.connection.is_closed:
            return link
        if self._remoting is None or self._closed:
            raise ClientClosedError(f"client {self.client_id} is closed; nothing was sent")
        lock = self._opening.setdefault(address, trio.Lock())
        with trio.move_on_after(timeout_s):
            async with lock:
                link = self.links.get(address)
                if link is not None and not link.connection.is_closed:
                    return link
                try:
                    connection = await self._remoting.connection(address, timeout_s)
                    answer = await connection.invoke(request(RequestCode.CAPABILITIES), timeout_s)
                except RemotingError as error:
                    raise BrokerUnreachableError(f"broker {address}: {error}") from error
                ours = answer.code == ResponseCode.SUCCESS
                link = self.links[address] = Link(
                    address,
                    connection,
                    cbor=ours and truth(answer.ext.get("cbor")),
                    records=ours and truth(answer.ext.get("records")),
                    bulk_pull=ours,
                    idempotent=ours and truth(answer.ext.get("idempotent")),
                    identity=str(answer.ext.get("groupIdentity") or "") if ours else "",
                )
                connection.on_close.append(lambda _ended: self._link_ended())
                self.heartbeats.look()
                return link
        raise BrokerUnreachableError(f"broker {address} does not answer within {timeout_s} s")

    async def ask(
        self,
        address: str,
        code: int,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        group: str = "",
    ) -> RemotingCommand:
        """Ask one broker once and return its answer, whatever its code.

        Args:
            group: Broker name that it is asked for; empty: whatever broker is there.
        Raises:
            BrokerUnreachableError: Nothing was sent.
            RequestTimedOutError: Sent, but no answer; what was asked for may have been done.
        """
        timeout_s = self.config.rpc_timeout_s if timeout_s is None else timeout_s
        link = await self.link(address, timeout_s, group=group)
        try:
            return await link.connection.invoke(
                request(code, ext, body, serialize=link.serialize), timeout_s
            )
        except (CallTimedOutError, ConnectionLostError) as error:
            if error.outcome == "not_stored":
                raise BrokerUnreachableError(f"broker {address}: {error}") from error
            raise RequestTimedOutError(f"broker {address}: {error}") from error
        except (TooManyInFlightError, ConnectFailedError) as error:
            raise BrokerUnreachableError(f"broker {address}: {error}") from error

    async def ask_leader(
        self,
        broker_name: str,
        code: int,
        ext: ExtFields | None = None,
        body: bytes = b"",
        *,
        topic: str,
        timeout_s: float = 10.0,
        attempt_timeout_s: float | None = None,
        adapt: Callable[[Link], int] | None = None,
    ) -> RemotingCommand:
        """Ask whoever leads a group, following hints and fail-overs, until *timeout_s* is over.

        Only for requests that may be repeated.

        Args:
            broker_name: The group.
            code: Request code; *adapt* may give another one for the link found.
            ext: Header fields; copied for every attempt.
            body: Request body.
            topic: Whose route is refreshed when the leader is lost.
            timeout_s: Budget over all attempts.
            attempt_timeout_s: One attempt; default: the configured RPC time-out.
            adapt: Chooses the code by what the broker understands.
        Returns:
            The answer of a node that did not say "not leader" or "busy".
        Raises:
            BrokerUnreachableError: Nobody could be asked.
            RequestTimedOutError: Asked, but no answer came.
            RequestFailedError: Refused to the end; its code and remark are carried.
        """
        deadline = self.clock.monotonic() + timeout_s
        attempt_s = self.config.rpc_timeout_s if attempt_timeout_s is None else attempt_timeout_s
        schedule = RetrySchedule(_READ_POLICY, deadline)
        error: ClientError | None = None
        unknown: RequestTimedOutError | None = None
        pause_s = 0.0
        while True:
            address = self.leaders.address(broker_name)
            kind = FailureKind.NOT_LEADER
            term = self.leaders.term(broker_name)
            if address is None:
                error = BrokerUnreachableError(f"nobody is known to lead {broker_name}")
            else:
                left_s = max(deadline - self.clock.monotonic(), 0.001)
                try:
                    opening_s = min(self.config.rpc_timeout_s, left_s)
                    link = await self.link(address, opening_s, group=broker_name)
                    answer = await self.ask(
                        address,
                        code if adapt is None else adapt(link),
                        None if ext is None else dict(ext),
                        body,
                        timeout_s=min(attempt_s, left_s),
                        group=broker_name,
                    )
                except RequestTimedOutError as failed:
                    error = unknown = failed
                    kind = FailureKind.UNKNOWN
                except BrokerUnreachableError as failed:
                    error, kind = failed, FailureKind.UNREACHABLE
                else:
                    if answer.code not in (
                        ResponseCode.SERVICE_NOT_AVAILABLE,
                        ResponseCode.SYSTEM_BUSY,
                    ):
                        return answer
                    kind = self.leader_search.note_refusal(broker_name, address, answer)
                    pause_s = retry_after_s(answer)
                    error = RequestFailedError(
                        f"{address}: code {answer.code} {answer.remark or ''}",
                        code=answer.code,
                        remark=answer.remark or "",
                    )
            step = schedule.next(kind, self.clock.monotonic())
            if step is None:
                # What an earlier attempt may have done, a later refusal does not undo.
                raise error if unknown is None else unknown
            if isinstance(error, RequestFailedError) and error.code == ResponseCode.SYSTEM_BUSY:
                await self.clock.sleep(max(step.delay_s, pause_s))
            elif step.where is not Where.NAMED_LEADER:
                await self.leader_search.pause(
                    broker_name, step.delay_s, topic=topic, failed=address, failed_term=term
                )
