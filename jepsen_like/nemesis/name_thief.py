"""A process that is no member and wants a broker name: at the NameServers, and towards clients.

It registers as the leader with the highest state version there is, takes the members out, and
answers clients that it has stored what they send; it stores nothing. Through seams alone, so it
does the same in a simulated world and against real processes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from commitlog.errors import LocalProtocolError
from remoting.client import RemotingClient
from remoting.connection import Connection
from remoting.errors import BadRequestError, RemotingError
from remoting.processor import Handled, Limiter
from remoting.processor_table import ProcessorTable
from remoting.protocol.bodies import (
    ClusterInfo,
    DataVersion,
    QueueData,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
)
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.headers import (
    BrokerHeader,
    RegisterBrokerHeader,
    RegisterTopicHeader,
    SendMessageResponseHeader,
)
from remoting.seams import Clock, Network
from remoting.server import RemotingServer

PAUSE_S: Final = 1.0
"""Between two attempts at all NameServers."""

TIMEOUT_S: Final = 2.0

STATE_VERSION: Final = 2**62
SILENCE_MS: Final = 10**12

REQUESTS_MAX: Final = 1024
"""Requests it answers at a time."""

QUEUES: Final = 8
"""Of every topic it claims to serve."""

Ask = Callable[[RemotingCommand, float], Awaitable[RemotingCommand]]
"""Sends a request to one NameServer, with a time-out in seconds."""

CRC_MASK: Final = 0x7FFFFFFF

FOREIGN_TOPIC: Final = "NAME_THIEF"
"""A topic that no broker has, entered for the group's brokers."""

PRODUCED: Final = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What it wants to be taken for.

    Attributes:
        identity: The group it names; empty: none, as a broker of RocketMQ.
        topics: Served under the name.
    """

    cluster: str
    broker_name: str
    address: str
    topics: Sequence[str]
    identity: str = ""


class NameThief:
    """The process.

    Attributes:
        seen: What became of it: ``registered``, ``register_refused``, ``unregistered``,
            ``unregister_refused``, ``topic_entered``, ``topic_refused``, ``unreachable``, and
            ``taken``, the sends that it answered as stored.
    """

    def __init__(
        self, network: Network, clock: Clock, wanted: Wanted, name_servers: Sequence[str]
    ) -> None:
        self._network = network
        self._clock = clock
        self._wanted = wanted
        self._name_servers = tuple(name_servers)
        self.seen: Counter[str] = Counter()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on until cancelled; started when it has tried once at every NameServer."""
        host, _, port = self._wanted.address.rpartition(":")
        server = RemotingServer(self._network, self._answers())
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, host, int(port))
            remoting = RemotingClient(nursery, self._network, connect_timeout_s=TIMEOUT_S)
            await self._attack(remoting)
            task_status.started()
            while True:
                await self._clock.sleep(PAUSE_S)
                await self._attack(remoting)

    # -- at the NameServers ----------------------------------------------------------------

    async def _attack(self, remoting: RemotingClient) -> None:
        for name_server in self._name_servers:
            try:
                await self._attack_one(partial(remoting.invoke, name_server))
            except (RemotingError, LocalProtocolError, BadRequestError):
                self.seen["unreachable"] += 1

    async def _attack_one(self, ask: Ask) -> None:
        wanted = self._wanted
        answer = await ask(request(RequestCode.GET_BROKER_CLUSTER_INFO), TIMEOUT_S)
        group = ClusterInfo.decode(answer.body).broker_addr_table.get(wanted.broker_name)
        members = [] if group is None else list(group.broker_addrs.values())
        answer = await ask(self._registration(), TIMEOUT_S)
        taken = answer.code == ResponseCode.SUCCESS and "keptBy" not in answer.ext
        self.seen["registered" if taken else "register_refused"] += 1
        for address in members:
            if address == wanted.address:
                continue
            header = BrokerHeader(wanted.broker_name, address, wanted.cluster, 0)
            leaving = request(RequestCode.UNREGISTER_BROKER, header.encode())
            answer = await ask(leaving, TIMEOUT_S)
            taken = answer.code == ResponseCode.SUCCESS
            self.seen["unregistered" if taken else "unregister_refused"] += 1
        answer = await ask(self._foreign_topic(), TIMEOUT_S)
        taken = answer.code == ResponseCode.SUCCESS
        self.seen["topic_entered" if taken else "topic_refused"] += 1

    def _registration(self) -> RemotingCommand:
        wanted = self._wanted
        topics = {
            name: TopicConfig(topic_name=name, read_queue_nums=QUEUES, write_queue_nums=QUEUES)
            for name in (*wanted.topics, "TBW102")
        }
        version = DataVersion(state_version=STATE_VERSION, timestamp=1, counter=STATE_VERSION)
        body = RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
                topic_config_table=topics, data_version=version
            )
        ).encode()
        header = RegisterBrokerHeader(
            wanted.broker_name,
            wanted.address,
            wanted.cluster,
            wanted.address,
            0,
            heartbeat_timeout_millis=SILENCE_MS,
            body_crc32=zlib.crc32(body) & CRC_MASK,
            group_identity=wanted.identity or None,
        )
        return request(RequestCode.REGISTER_BROKER, header.encode(), body)

    def _foreign_topic(self) -> RemotingCommand:
        queues = QueueData(broker_name=self._wanted.broker_name)
        body = TopicRouteData(queue_datas=[queues]).encode()
        header = RegisterTopicHeader(FOREIGN_TOPIC)
        return request(RequestCode.REGISTER_TOPIC_IN_NAMESRV, header.encode(), body)

    # -- towards clients -------------------------------------------------------------------

    def _answers(self) -> ProcessorTable:
        table = ProcessorTable()
        limiter = Limiter("stolen", REQUESTS_MAX)
        for code in PRODUCED:
            table.register(code, self._store_nothing, limiter)
        table.register(RequestCode.HEART_BEAT, self._agree, limiter)
        if self._wanted.identity:
            table.register(RequestCode.CAPABILITIES, self._capabilities, limiter)
        return table

    def _store_nothing(self, _connection: Connection, asked: RemotingCommand) -> Handled:
        self.seen["taken"] += 1
        place = SendMessageResponseHeader("0A0A0A0A00002A9F" + "0" * 16, 0, self.seen["taken"])
        return response_to(asked, ext=dict(place.encode()))

    def _agree(self, _connection: Connection, asked: RemotingCommand) -> Handled:
        return response_to(asked)

    def _capabilities(self, _connection: Connection, asked: RemotingCommand) -> Handled:
        return response_to(asked, ext={"groupIdentity": self._wanted.identity})
