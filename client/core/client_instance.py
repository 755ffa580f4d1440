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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from dledger.client.core.broker_requests import CheckBacks, ConsumerCalls, OpenRequests
from dledger.client.core.client_state import (
    Announcements,
    ClientCounters,
    ManagedScope,
    part_of,
)
from dledger.client.core.errors import (
    ClientClosedError,
)
from dledger.client.core.heartbeats import UNREGISTER_TIMEOUT_S, Heartbeats
from dledger.client.core.leaders import LeaderCalls, LeaderSearch
from dledger.client.core.links import GroupIdentities, Links
from dledger.client.core.route import LeaderTable
from dledger.client.core.routes import NameServers, Routes, split_url
from dledger.commitlog.errors import ConfigError
from dledger.commitlog.seams import Disk
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from dledger.remoting.protocol.headers import (
    ConsumerGroupHeader,
)
from dledger.remoting.protocol.signature import Credentials
from dledger.remoting.seams import Clock, Executor, Network, Rng

HEARTBEAT_PERIOD_S: Final = 30.0
"""RocketMQ's; a broker drops a client after 120 s of silence."""
ROUTE_POLL_PERIOD_S: Final = 30.0
"""RocketMQ's; leaders are found sooner by hints, the poll finds new topics and queues."""
RPC_TIMEOUT_S: Final = 3.0
"""One attempt of a request."""
MAX_SERVER_REQUESTS: Final = 1024
"""Requests of brokers that are open at a time; they ask again what they could not ask."""
_live_client_ids: trio.lowlevel.RunVar[set[str]] = trio.lowlevel.RunVar("live_client_ids")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client instance.

    Attributes:
        name_servers: ``host:port`` each.
        address_server_url: HTTP address server, read every 120 s.
        client_ip: Address in client id and message ids, numeric.
        pid: Process id in client id and message ids.
        instance_name: Distinguishes instances of one process; empty: made from *pid* and a random
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


class ClientInstance(ManagedScope):
    """One per process and client id; open it with ``async with`` and share it.

    Attributes:
        client_id: ``ip@instance``.
        routes: Of the topics in use.
        leaders: The leader of each group, as far as it is known.
        links: Connections to brokers.
        leader_search: Finds the leader of a group that has another one.
        heartbeats: What brokers know of this client.
        counters: See `ClientCounters`.
        server_requests: What brokers may ask of this client; to be registered before it is opened.
        executor: Runs listeners that block; None: there are none.
        disk: Where broadcasting consumers keep their offsets; None: they cannot.
        check_backs: The producers that answer for transactions.
        consumer_calls: The consumers that answer for their group.
        requests: Requests of its producers that wait for their replies.
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
        instance_name = config.instance_name or f"{config.pid}#{rng.randrange(1 << 48)}"
        self.client_id = f"{config.client_ip}@{instance_name}"
        rpc_timeout_s = config.rpc_timeout_s
        self.counters = counters = ClientCounters()
        self._announcements = announcements = Announcements(self.check_backs, self.requests)
        identities = GroupIdentities()
        self.links = Links(self.client_id, identities, announcements, rpc_timeout_s)
        self.leaders = LeaderTable(self.links.end_silent)
        self.routes = Routes(
            clock,
            self.leaders,
            identities,
            announcements,
            counters,
            config.default_topic_queue_nums,
            config.route_poll_period_s,
        )
        self.leader_search = LeaderSearch(
            self.leaders, self.links, self.routes, announcements, counters, clock
        )
        self._calls = LeaderCalls(
            self.leaders, self.leader_search, self.links, clock, rpc_timeout_s
        )
        self.heartbeats = Heartbeats(
            self.client_id,
            clock,
            self.links,
            self.routes,
            self.leaders,
            announcements,
            counters,
            config.heartbeat_period_s,
            rpc_timeout_s,
        )
        self._nursery: trio.Nursery | None = None
        if not config.name_servers and not config.address_server_url:
            raise ConfigError("no NameServer is named: give name_servers or address_server_url")
        if config.address_server_url:
            split_url(config.address_server_url)

    # ------------------------------------------------------------------------------ open and close

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
                remoting = RemotingClient(
                    connections,
                    self.network,
                    self.server_requests,
                    tls=self.config.tls,
                    credentials=self.config.credentials,
                )
                servers = NameServers(
                    remoting,
                    self.network,
                    self.clock,
                    self.rng,
                    self.config.name_servers,
                    address_server_url=self.config.address_server_url,
                    timeout_s=self.config.rpc_timeout_s,
                )
                self.links.use(remoting)
                self.routes.open(servers)
                try:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(servers.keep_reading)
                        nursery.start_soon(self.routes.keep_polling)
                        nursery.start_soon(self.heartbeats.run)
                        try:
                            yield
                        finally:
                            nursery.cancel_scope.cancel()
                finally:
                    self.links.stop()
                    self.routes.close()
                    with trio.move_on_after(UNREGISTER_TIMEOUT_S, shield=True):
                        await self.heartbeats.remove_all()
                    self.links.close()
                    connections.cancel_scope.cancel()
        finally:
            live.discard(self.client_id)

    def abandon(self) -> None:
        """Break every connection at once and send nothing more, as when the process is killed.

        What still uses the instance ends with `ClientClosedError`; it is to be left all the same.
        """
        self.routes.close()
        self.links.close()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.links.is_closed

    @property
    def nursery(self) -> trio.Nursery:
        """Runs the background work of producers and consumers.

        Raises:
            ClientClosedError: The instance is not open.
        """
        if self._nursery is None or self.is_closed:
            raise ClientClosedError(f"client {self.client_id} is not open; use 'async with'")
        return self._nursery

    @property
    def name_servers(self) -> NameServers:
        """The NameServers.

        Raises:
            ClientClosedError: The instance is not open.
        """
        return self.routes.name_servers

    # ------------------------------------------------------------------------------ brokers

    def _consumer_ids_changed(self, _connection: Connection, command: RemotingCommand) -> None:
        """A broker reports that a consumer has come or left (code 40); it wants no answer."""
        self._announcements.group_changed(ConsumerGroupHeader.decode(command.ext).consumer_group)

    route = part_of("routes", Routes.find)
    link = part_of("links", Links.open)
    ask = part_of("links", Links.ask)
    ask_leader = part_of("_calls", LeaderCalls.ask)
