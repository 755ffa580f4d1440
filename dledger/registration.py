"""A broker makes itself known to every NameServer.

A group registers as RocketMQ's DLedger groups do: one broker name, the leader as id 0, a follower
as the number in its own id plus one. Every NameServer has a task of its own, so one that is down
never holds up the others. Each topic is encoded once, and again when it has changed; differences
have only what changed since the version that a NameServer confirmed.

Spec: docs/internals/protocol/semantics.md, section 11; docs/internals/protocol/remoting.md, section
12.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import trio
from msgspec import Raw, json

from dledger.commitlog.errors import LocalProtocolError
from dledger.group_api import BrokerGroup, QueueTouched
from dledger.remoting.client import RemotingClient
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RemotingError
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfigSerializeWrapper,
)
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request
from dledger.remoting.protocol.headers import (
    BrokerHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerHeader,
    RegisterBrokerResponseHeader,
)
from dledger.remoting.seams import Clock
from dledger.settings.parts import BrokerSettings
from dledger.settings.tables import ClientTable
from dledger.settings.text import LEADER_ID
from dledger.state.topics import TopicConfig
from dledger.waiting import ROWS_PER_TURN, Wakeup, call_in_turns


def wire_topic(config: TopicConfig) -> bodies.TopicConfig:
    """Return a topic as remoting bodies show it."""
    return bodies.TopicConfig(
        topic_name=config.topic,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        attributes=dict(config.attributes),
    )


def encoded_topic(config: TopicConfig) -> bytes:
    """Return a topic as a member of remoting's tables of topics."""
    # It has no field without a value, which alone would want the dialect's own writer.
    return json.encode({config.topic: wire_topic(config)})[1:-1]


def data_version(group: BrokerGroup) -> bodies.DataVersion:
    """Return how new the topics of a broker are."""
    state = group.state
    return bodies.DataVersion(
        timestamp=state.topics_changed_ms,
        counter=state.topics_counter,
        state_version=group.term,
    )


class TopicTable:
    """The encoded topics of one group."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._pieces: dict[str, bytes] = {}
        self._counter: int | None = None
        self._lock = trio.Lock()
        self.encoded = 0

    async def whole(self) -> tuple[DataVersion, bytes]:
        """Return the version now and a registration's body with all topics."""
        async with self._lock:
            await self._catch_up()
            version = data_version(self._group)
            table: Any = Raw(b"{%b}" % b",".join(self._pieces.values()))
        return version, RegisterBrokerBody(TopicConfigSerializeWrapper(table, version)).encode()

    def since(self, base: DataVersion) -> tuple[DataVersion, bytes] | None:
        """Return the version now and a body with what changed since *base*; None: too much."""
        state = self._group.state
        changed = state.topics_since(base.counter)
        if changed is None:
            return None
        table, removed = {}, []
        for name in changed:
            config = state.topic_config(name)
            if config is None:
                removed.append(name)
            else:
                table[name] = wire_topic(config)
        self.encoded += len(table)
        version = data_version(self._group)
        wrapper = TopicConfigSerializeWrapper(topic_config_table=table, data_version=version)
        body = RegisterBrokerBody(
            topic_config_serialize_wrapper=wrapper, removed_topics=removed or None
        )
        return version, body.encode()

    async def _catch_up(self) -> None:
        state = self._group.state
        while self._counter != state.topics_counter:
            counter = state.topics_counter
            changed = None if self._counter is None else state.topics_since(self._counter)
            if changed is None:
                self._pieces.clear()
                changed = [config.topic for config in state.all_topics()]
            await call_in_turns(self._encode, changed, ROWS_PER_TURN)
            self._counter = counter

    def _encode(self, name: str) -> None:
        config = self._group.state.topic_config(name)
        if config is None:
            self._pieces.pop(name, None)
            return
        self._pieces[name] = encoded_topic(config)
        self.encoded += 1


RETRY_S = 3.0
"""After a failed registration: a NameServer that comes back gets one soon, not after 30 s."""

LIST_LOOK_S = 10.0
"""How soon a change in the list of NameServers is noticed: it is read every 120 s."""

EMPTY_LIST_LOOK_S = 1.0
"""How soon the first answer of an address server is noticed."""

KNOWN_WITHIN_S: Final = 1.0
"""How long a change of topics waits for a NameServer to know it: tools give a request 3 s."""

UNREGISTER_TIMEOUT_S = 1.0
"""At a clean stop no NameServer may hold up the others; the connection's end shows it anyway."""

CRC_MASK = 0x7FFFFFFF

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _NameServer:
    address: str
    wake: Wakeup = field(default_factory=Wakeup)
    # The role that was last sent, so that a change is sent at once and one-way.
    told_id: int | None = None
    reachable: bool = True
    # The connection over which it knows this broker: when it ends, the broker is forgotten there.
    known_over: Connection | None = None
    # Why it does not list this broker; empty: it does, or it was not asked yet.
    refusal: str = ""
    left_out: str = ""
    # It is one of ours and takes differences; and the topics it has of this broker.
    takes_differences: bool = False
    has: DataVersion | None = None


@dataclass(eq=False, frozen=True, slots=True)
class _Waiting:
    counter: int
    then: Callable[[], None]


@dataclass(eq=False, repr=False)
class Registration:
    """Keeps this broker registered."""

    _group: BrokerGroup
    _client: RemotingClient
    _broker: BrokerSettings
    settings: ClientTable
    _name_servers: Callable[[], Sequence[str]]
    _clock: Clock

    def __post_init__(self) -> None:
        self._known: dict[str, _NameServer] = {}
        self._topics_counter = self._group.state.topics_counter
        self._topics = TopicTable(self._group)
        self._nursery: trio.Nursery | None = None
        # One for each change of topics that is stored and not answered yet: handlers limit them.
        self._waiting: dict[_Waiting, None] = {}

    @property
    def broker_id(self) -> int:
        """The id this node has now: 0 as the serving leader."""
        return LEADER_ID if self._group.leadership is not None else self._broker.follower_id

    def _address(self, broker_id: int) -> str:
        """Return the address that clients are to use for this node under that id."""
        leads = broker_id == LEADER_ID
        return (self._broker.broker.leader_address if leads else "") or self._broker.address

    def role_changed(self) -> None:
        """Tell every NameServer at once that does not know; call it at every change of role."""
        broker_id = self.broker_id
        for name_server in self._known.values():
            if name_server.told_id != broker_id:
                name_server.wake.set()

    def on_applied(self, _touched: Sequence[QueueTouched]) -> None:
        """Tell every NameServer when topics changed; to be put into the group's `on_applied`."""
        counter = self._group.state.topics_counter
        if counter != self._topics_counter:
            self._topics_counter = counter
            for name_server in self._known.values():
                name_server.wake.set()

    def when_known(self, then: Callable[[], None]) -> None:
        """Call *then* once the NameServers have the topics of now, or after `KNOWN_WITHIN_S`.

        One that is not reachable, or refuses this broker, is not waited for, and none is where
        `run` does not run.
        """
        waiting = _Waiting(self._group.state.topics_counter, then)
        if self._nursery is None or self._is_known(waiting.counter):
            then()
            return
        self._waiting[waiting] = None
        self._nursery.start_soon(self._wait_at_most, waiting)

    def _is_known(self, counter: int) -> bool:
        return all(
            server.has is not None and server.has.counter >= counter
            for server in self._known.values()
            if server.reachable and not server.refusal
        )

    def _end_known(self) -> None:
        """End the wait for what NameServers have learned."""
        ended = [each for each in self._waiting if self._is_known(each.counter)]
        self._group.turns.call_each(self._end, ended)

    def _end(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            del self._waiting[waiting]
            waiting.then()

    async def _wait_at_most(self, waiting: _Waiting) -> None:
        await self._clock.sleep(KNOWN_WITHIN_S)
        self._end(waiting)

    async def run(self) -> None:
        """Register with every NameServer, until cancelled.

        Cancellation: The broker stays registered until it times out or `unregister` is called.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                while True:
                    wanted = set(self._name_servers())
                    for address in sorted(wanted - self._known.keys()):
                        name_server = self._known[address] = _NameServer(address)
                        nursery.start_soon(self._keep_registered, name_server)
                    for address in sorted(self._known.keys() - wanted):
                        self._known.pop(address).wake.set()
                    await self._clock.sleep(LIST_LOOK_S if wanted else EMPTY_LIST_LOOK_S)
        finally:
            self._nursery = None
            for waiting in list(self._waiting):
                self._end(waiting)

    async def unregister(self) -> None:
        """Take this broker out of every NameServer, at a clean stop; failures are logged.

        Cancellation: Some NameServers may not know; they notice the closed connection.
        """
        async with trio.open_nursery() as nursery:
            for address in sorted(set(self._name_servers())):
                nursery.start_soon(self._unregister_from, address)

    async def _keep_registered(self, name_server: _NameServer) -> None:
        while self._known.get(name_server.address) is name_server:
            registered = await self._register(name_server)
            self._end_known()
            if name_server.reachable and name_server.told_id not in (None, self.broker_id):
                # It changed while the news was under way: `role_changed` compared with the old.
                name_server.wake.set()
            pause_s = self.settings.register_interval_ms / 1000 if registered else RETRY_S
            await name_server.wake.wait_or(self._clock, pause_s)

    async def _register(self, name_server: _NameServer) -> bool:
        """Tell one NameServer; True when it has confirmed."""
        timeout_s = self.settings.register_timeout_ms / 1000
        if not self._group.group_identity:
            return False  # before bootstrap: nothing is served yet, and no name is taken
        broker_id = self.broker_id
        role_is_news = name_server.told_id is not None and name_server.told_id != broker_id
        try:
            if role_is_news:
                # One-way, so that nothing waits for a slow NameServer; confirmed a little later.
                command, name_server.has = await self._with_all_topics(broker_id)
                await self._client.invoke_oneway(name_server.address, command, timeout_s)
                name_server.told_id = broker_id
                if broker_id == LEADER_ID and self._address(LEADER_ID) != self._broker.address:
                    # Under its own address the leader would be listed a second time.
                    command = self._unregister_request(self._broker.follower_id)
                    await self._client.invoke_oneway(name_server.address, command, timeout_s)
                return False
            response = await self._exchange(name_server, broker_id)
            if not self._is_taken(name_server, response):
                name_server.has = None
                return False
        except (RemotingError, LocalProtocolError) as error:
            if name_server.reachable:
                logger.warning(
                    "name_server_unreachable", name_server=name_server.address, reason=str(error)
                )
            name_server.reachable = False
            name_server.has = None
            return False
        if name_server.told_id != broker_id or not name_server.reachable:
            logger.info(
                "registered",
                name_server=name_server.address,
                broker_id=broker_id,
                term=self._group.term,
            )
        name_server.reachable = True
        name_server.told_id = broker_id
        self._watch(name_server)
        return True

    def _is_taken(self, name_server: _NameServer, response: RemotingCommand) -> bool:
        """Note what a NameServer did not take; tell whether it lists this broker."""
        said = RegisterBrokerResponseHeader.decode(response.ext)
        if response.code != ResponseCode.SUCCESS:
            refusal = response.remark or f"code {response.code}"
        elif said.kept_by:
            refusal = f"{said.kept_by} is registered in the place of this broker"
        else:
            refusal = ""
        if refusal and refusal != name_server.refusal:
            logger.warning(
                "registration_refused",
                name_server=name_server.address,
                code=response.code,
                remark=refusal,
            )
        left_out = said.topics_left_out or ""
        if left_out and left_out != name_server.left_out:
            logger.warning("topics_left_out", name_server=name_server.address, topics=left_out)
        name_server.refusal, name_server.left_out = refusal, left_out
        return not refusal

    def status(self) -> dict[str, Any]:
        """Return what ``dledger raft status`` shows: which NameServers refuse this broker, why."""
        refused = {server.address: server.refusal for server in self._known.values()}
        return {"registration_refused": {a: why for a, why in refused.items() if why}}

    async def _exchange(self, name_server: _NameServer, broker_id: int) -> RemotingCommand:
        """Tell a NameServer as little as will do, and return its last answer."""
        address, timeout_s = name_server.address, self.settings.register_timeout_ms / 1000
        has = name_server.has if self._is_known_to(name_server) else None
        if has is not None and has == data_version(self._group):
            answer = await self._client.invoke(address, self._version_request(has), timeout_s)
            if answer.code == ResponseCode.SUCCESS and not _changed(answer):
                return answer
            has = None
        if has is not None:
            differences = self._topics.since(has)
            if differences is not None:
                version, body = differences
                command = self._register_request(broker_id, body, since=has)
                answer = await self._client.invoke(address, command, timeout_s)
                if answer.code == ResponseCode.SUCCESS and not _needs_all(answer):
                    name_server.has = version
                    return answer
        command, version = await self._with_all_topics(broker_id)
        answer = await self._client.invoke(address, command, timeout_s)
        name_server.takes_differences = _takes_differences(answer)
        name_server.has = version
        return answer

    def _is_known_to(self, name_server: _NameServer) -> bool:
        """Whether a NameServer of ours knows this broker over the connection that is open."""
        connection = self._client.live(name_server.address)
        return (
            name_server.takes_differences
            and connection is not None
            and connection is name_server.known_over
        )

    def _watch(self, name_server: _NameServer) -> None:
        """Register again at once when the connection ends: the NameServer takes us out with it."""
        connection = self._client.live(name_server.address)
        if connection is None:
            name_server.wake.set()
        elif connection is not name_server.known_over:
            name_server.known_over = connection
            connection.on_close.append(lambda _ended: name_server.wake.set())

    async def _with_all_topics(self, broker_id: int) -> tuple[RemotingCommand, DataVersion]:
        version, body = await self._topics.whole()
        return self._register_request(broker_id, body), version

    def _version_request(self, version: DataVersion) -> RemotingCommand:
        """Return the question whether a NameServer has the topics of *version*: a heartbeat."""
        return request(
            RequestCode.QUERY_DATA_VERSION,
            self._broker_header(self.broker_id).encode(),
            version.encode(),
        )

    def _register_request(
        self, broker_id: int, body: bytes, *, since: DataVersion | None = None
    ) -> RemotingCommand:
        broker, address = self._broker.broker, self._address(broker_id)
        header = RegisterBrokerHeader(
            broker_name=broker.broker_name,
            broker_addr=address,
            cluster_name=broker.cluster_name,
            ha_server_addr=address,
            broker_id=broker_id,
            compressed=False,
            body_crc32=zlib.crc32(body) & CRC_MASK,
            group_identity=self._group.group_identity,
            membership_proof=self._group.membership_proof or None,
            topics_since=None if since is None else since.text,
        )
        return request(RequestCode.REGISTER_BROKER, header.encode(), body)

    def _broker_header(self, broker_id: int) -> BrokerHeader:
        broker = self._broker.broker
        return BrokerHeader(
            broker_name=broker.broker_name,
            broker_addr=self._address(broker_id),
            cluster_name=broker.cluster_name,
            broker_id=broker_id,
            group_identity=self._group.group_identity,
        )

    def _unregister_request(self, broker_id: int) -> RemotingCommand:
        return request(RequestCode.UNREGISTER_BROKER, self._broker_header(broker_id).encode())

    async def _unregister_from(self, address: str) -> None:
        command = self._unregister_request(self.broker_id)
        try:
            await self._client.invoke(address, command, UNREGISTER_TIMEOUT_S)
        except (RemotingError, LocalProtocolError) as error:
            logger.info("unregister_failed", name_server=address, reason=str(error))


def _changed(answer: RemotingCommand) -> bool:
    return QueryDataVersionResponseHeader.decode(answer.ext).changed


def _needs_all(answer: RemotingCommand) -> bool:
    return RegisterBrokerResponseHeader.decode(answer.ext).needs_all is True


def _takes_differences(answer: RemotingCommand) -> bool:
    return RegisterBrokerResponseHeader.decode(answer.ext).takes_differences is True
