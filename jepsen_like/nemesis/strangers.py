"""Processes that are no members: one that takes a broker name, one at the ports of the peers.

`NameThief` registers a broker name as the leader with the highest state version there is, takes the
members out, and answers clients that it has stored what they send; it stores nothing.
`PeerStranger` talks where members do: hellos under names of members too, claims to lead, requests
for votes and entries, entries that it made, hellos left unfinished.

Both act through seams alone, so they do the same in a simulated world and against real processes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import trio

from dledger.commitlog.entry import seal_no_op
from dledger.commitlog.errors import LocalProtocolError, RemoteProtocolError
from dledger.raft.identity import Hello
from dledger.raft.wire import (
    HELLO_BYTES_MAX,
    Kind,
    PeerFrame,
    PeerFrameDecoder,
    encode_cbor_head,
    encode_frame,
)
from dledger.remoting.addresses import join_address, split_address
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import BadRequestError, RemotingError
from dledger.remoting.handling import Handled, Limiter
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol.bodies import (
    ClusterInfo,
    DataVersion,
    QueueData,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import (
    BrokerHeader,
    RegisterBrokerHeader,
    SendMessageResponseHeader,
    TopicHeader,
)
from dledger.remoting.seams import Clock, Network, Rng, Stream
from dledger.remoting.server import RemotingServer

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
    """What it wants to be taken for."""

    cluster: str
    broker_name: str
    address: str
    topics: Sequence[str]
    identity: str = ""


class NameThief:
    """The process.

    *seen*: what became of it: ``registered``, ``register_refused``, ``unregistered``,
    ``unregister_refused``, ``topic_entered``, ``topic_refused``, ``unreachable``, and ``taken``,
    the sends that it answered as stored.
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
        host, port = split_address(self._wanted.address)
        server = RemotingServer(self._network, self._answers())
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, host, port)
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
            # A member that died meanwhile is not registered any more: nothing is taken from it.
            taken = answer.code == ResponseCode.SUCCESS and not answer.remark
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
        header = TopicHeader(FOREIGN_TOPIC)
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


T = TypeVar("T")

PEER_PAUSE_S: Final = 0.5
"""Between two attempts at all members."""

LISTENS_S: Final = 0.5
"""Seconds it waits on each connection for answers."""

PEER_NAME: Final = "evil"

EPOCH: Final = 5

HOSTS: Final = ("127.0.0.1:" + "9" * 19, "a..b:1", "x" * 300 + ":1", "\ud7ff:1", "127.0.0.1:0")
"""Addresses that cannot be called."""


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """The group it is after; *members*: names, and where their peer ports are."""

    cluster: str
    name: str
    members: dict[str, tuple[str, int]]


class PeerStranger:
    """The process.

    *seen*: what became of it: ``refused`` connections and ``unreachable`` members; ``disclosed``,
    the frames with a name or an index in it that it was sent; ``named``, those in which a member
    without a log names itself alone; ``called``, the members that called it back.
    """

    def __init__(
        self, network: Network, clock: Clock, rng: Rng, group: PeerGroup, address: tuple[str, int]
    ) -> None:
        self._network = network
        self._clock = clock
        self._rng = rng
        self._group = group
        self._address = address
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Go on until cancelled."""
        listener = await self._network.listen(*self._address)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attack_all)
                while True:
                    stream = await listener.accept()
                    self.seen["called"] += 1
                    nursery.start_soon(self._hear, stream)
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def _attack_all(self) -> None:
        while True:
            for member, address in sorted(self._group.members.items()):
                try:
                    stream = await self._network.connect(*address, timeout_s=TIMEOUT_S)
                except OSError:
                    self.seen["unreachable"] += 1
                    continue
                await self._attack(stream, member)
            await self._clock.sleep(PEER_PAUSE_S)

    async def _attack(self, stream: Stream, member: str) -> None:
        with self._clock.time_out(LISTENS_S):
            try:
                for data in self._words(member):
                    await stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.seen["refused"] += 1
            else:
                await self._hear(stream)
        with trio.CancelScope(shield=True):
            await stream.aclose()

    async def _hear(self, stream: Stream) -> None:
        decoder = PeerFrameDecoder(HELLO_BYTES_MAX)
        try:
            while data := await stream.receive_some(65_536):
                for frame in decoder.feed(memoryview(data)):
                    if _names_itself_alone(frame):
                        self.seen["named"] += 1
                    else:
                        self.seen["disclosed"] += _is_telling(frame)
            self.seen["refused"] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.seen["refused"] += 1
        except RemoteProtocolError:
            self.seen["disclosed"] += 1  # more than a hello

    # -- what it sends ---------------------------------------------------------------------

    def _words(self, member: str) -> Sequence[bytes]:
        others = sorted(self._group.members.keys() - {member})
        hello = self._hello(self._one_of((PEER_NAME, PEER_NAME, *others)))
        term = self._one_of((0, 1, 2, 3, 5, 9, 2**29, 2**40, 2**62, 2**63 - 1, 2**200))
        index = self._one_of((0, 1, 10, 100, 10_000, 2**40))
        forged = seal_no_op(index + 1, min(term, 2**62), 0, 0, 0)
        words: list[tuple[Kind, tuple[Any, ...], bytes]] = [
            (Kind.HEARTBEAT, (1, index), b""),
            (Kind.VOTE, (2**30, 2**30, True), b""),
            (Kind.PRE_VOTE, (term, 2**30, 2**30), b""),
            (Kind.FETCH, (1, 10**6), b""),
            (Kind.APPEND, (index, min(term, 2**30), index + 1), forged),
            (Kind.TIMEOUT_NOW, (index,), b""),
            (Kind.SNAPSHOT, (2**40, 0, 9), b"no tables"),
            (Kind.APPEND_REPLY, (True, index), b""),
            (Kind.TERM_NOTICE, (), b""),
        ]
        draw = self._rng.random()
        if draw < 0.1:
            return [hello[:-3]]
        if draw < 0.2:
            return [self._rng.randbytes(200)]
        chosen = [self._one_of(words) for _ in range(3)]
        frames = [
            _frame(kind, term, n, fields, data) for n, (kind, fields, data) in enumerate(chosen, 1)
        ]
        return [hello, *frames]

    def _one_of(self, things: Sequence[T]) -> T:
        return things[self._rng.randrange(len(things))]

    def _hello(self, name: str) -> bytes:
        group, (host, port) = self._group, self._address
        said = Hello(
            cluster=group.cluster,
            group=group.name,
            name=name,
            incarnation=self._rng.randbytes(16).hex(),
            voters={},
            doubtful=False,
            client_address="127.0.0.1:1",
            channel=self._one_of(("control", "data")),
            peer=join_address(host, port),
        ).encode()
        if self._rng.random() < 0.2:
            said["peer"] = self._one_of(HOSTS)
        return _frame(Kind.HELLO, 0, 0, (said,), b"")


def _frame(kind: Kind, term: int, sequence: int, fields: tuple[Any, ...], payload: bytes) -> bytes:
    head = encode_cbor_head(kind, term, EPOCH, sequence, fields)
    return encode_frame(head, [memoryview(payload)] if payload else None)


def _is_telling(frame: PeerFrame) -> bool:
    """Whether a frame holds more than that its sender does not know this process."""
    said = frame.fields[0] if frame.kind is Kind.HELLO_ACK else None
    return not isinstance(said, dict) or "name" in said


def _names_itself_alone(frame: PeerFrame) -> bool:
    """Whether a frame is how a member introduces itself before it knows any other."""
    said = frame.fields[0] if frame.kind is Kind.HELLO_ACK else None
    return (
        isinstance(said, dict)
        and "name" in said
        and not said["voters"]
        and not said.get("members")
        and not any(said.get("last", ()))
    )
