"""Connected clients: what tools read of them, and what operators request of a client.

Reads are 203, 204, 300, 328, 343 and 345: every broker answers from its own table. Clients that
send heartbeats to the leader alone are known there only. For 223, 307 and 309 the broker passes the
request on over the client's own connection and returns the client's answer.

Spec: docs/internals/protocol/remoting.md, sections 10 and 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import structlog
import trio

from dledger.commitlog.errors import (
    CorruptRecordError,
    LocalProtocolError,
    MQError,
    OffsetOutOfRangeError,
)
from dledger.commitlog.message_id import decode_offset_message_id
from dledger.group_api import BrokerGroup
from dledger.processors.answers import RefusedError, bad_request, check_readable
from dledger.processors.client_table import Client, ClientTable, connection_of
from dledger.processors.handles import SUB, Limit, handles, needs
from dledger.remoting.access.accounts import ADMIN, SIGNED
from dledger.remoting.connection import Connection
from dledger.remoting.errors import RequestTimedOutError
from dledger.remoting.handling import Answered, Handled
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.bodies import Body, ProducerInfo, ProducerTableInfo
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, request, response_to
from dledger.remoting.protocol.headers import (
    ConsumeDirectlyHeader,
    ConsumerClientHeader,
    ConsumerGroupHeader,
    ConsumerStatusHeader,
    GroupHeader,
    GroupTopicHeader,
    ProducerGroupHeader,
    TopicHeader,
)
from dledger.remoting.protocol.outcome import Condition, answer
from dledger.remoting.seams import Clock
from dledger.settings.parts import BrokerSettings
from dledger.waiting import joined_in_turns

CLIENT_ANSWERS_WITHIN_S: Final = 10.0
"""RocketMQ's, for a request that a broker passes on to a client."""

STATUS_WITHIN_S: Final = 5.0
"""All clients of a group together, when each sends its progress."""

MIN_VERSION: Final = 62
"""V3_1_8_SNAPSHOT: older clients do not know the requests that are passed on."""

logger = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class ClientQueriesProcessor:
    """Answers queries about clients and subscriptions."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _clock: Clock

    @handles(RequestCode.GET_CONSUMER_CONNECTION_LIST, limit=Limit.ADMIN, rule=SIGNED)
    async def consumer_connections(
        self, _connection: Connection, command: RemotingCommand
    ) -> Answered:
        """Answer 203: the clients of a consumer group, 206 when there is none."""
        name = ConsumerGroupHeader.decode(command.ext).consumer_group
        group = self._clients.consumer_group(name)
        if group is None:
            return answer(
                command, Condition.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        clients = await _encoded_clients(connection_of, group.clients.values())
        return response_to(command, body=group.connection(clients).encode())

    @handles(RequestCode.GET_PRODUCER_CONNECTION_LIST, limit=Limit.ADMIN, rule=SIGNED)
    async def producer_connections(
        self, _connection: Connection, command: RemotingCommand
    ) -> Answered:
        """Answer 204: the clients of a producer group, 1 when there is none."""
        name = ProducerGroupHeader.decode(command.ext).producer_group
        clients = self._clients.producers(name)
        if not clients:
            return answer(command, Condition.BAD_REQUEST, f"the producer group[{name}] not exist")
        encoded = await _encoded_clients(connection_of, clients)
        return response_to(command, body=bodies.ProducerConnection(encoded).encode())

    @handles(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, limit=Limit.ADMIN, rule=SIGNED)
    def consumers_of_topic(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 300: groups that have committed offsets of a topic, or subscribe it now."""
        topic = TopicHeader.decode(command.ext).topic
        found = {group for group, _ in self._group.state.consumer_offsets.keys_with(1, topic)}
        found |= {
            group.name for group in self._clients.consumer_groups if topic in group.subscriptions
        }
        return response_to(command, body=bodies.GroupList(sorted(found)).encode())

    @handles(RequestCode.QUERY_TOPICS_BY_CONSUMER, limit=Limit.ADMIN, rule=SIGNED)
    def topics_of_consumer(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 343: topics of which a group has committed offsets, or that it subscribes now."""
        name = GroupHeader.decode(command.ext).group
        found = {topic for _, topic in self._group.state.consumer_offsets.keys_with(0, name)}
        online = self._clients.consumer_group(name)
        if online is not None:
            found |= set(online.subscriptions)
        return response_to(command, body=bodies.TopicList(sorted(found)).encode())

    @handles(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, limit=Limit.ADMIN, rule=SIGNED)
    def subscription(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 345: a group's subscription to a topic; without data if no client is connected."""
        header = GroupTopicHeader.decode(command.ext)
        online = self._clients.consumer_group(header.group)
        found = None if online is None else online.subscriptions.get(header.topic)
        body = bodies.QuerySubscriptionResponseBody(
            None if found is None else found.data, header.group, header.topic
        )
        return response_to(command, body=body.encode())

    @handles(RequestCode.GET_ALL_PRODUCER_INFO, limit=Limit.ADMIN, rule=SIGNED)
    async def producers(self, _connection: Connection, command: RemotingCommand) -> Answered:
        """Answer 328: every producer group with its clients."""
        groups = {}
        for name in self._clients.producer_groups():
            await trio.lowlevel.checkpoint()
            clients = await _encoded_clients(self._info, self._clients.producers(name))
            groups[name] = clients
        return response_to(command, body=ProducerTableInfo(groups).encode())

    def _info(self, client: Client[Connection]) -> ProducerInfo:
        silent_ms = round(1000 * (self._clock.monotonic() - client.last_update))
        return ProducerInfo(
            client_id=client.client_id,
            remote_ip=client.address,
            language=client.language,
            version=client.version,
            last_update_timestamp=self._clock.wall_ms() - silent_ms,
        )


async def _encoded_clients(
    shown: Callable[[Client[Connection]], Body], clients: Iterable[Client[Connection]]
) -> Any:
    return await joined_in_turns((shown(client).encode() for client in list(clients)), b"[]")


@dataclass(eq=False, repr=False)
class ClientCallsProcessor:
    """Passes requests on to clients."""

    _group: BrokerGroup
    _clients: ClientTable[Connection]
    _settings: BrokerSettings

    @handles(
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        limit=Limit.ADMIN,
        rule=needs(SUB, group="consumerGroup"),
    )
    def running_info(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 307 with the client's own report."""
        header = ConsumerClientHeader.decode(command.ext)
        client = self._client(header.consumer_group, header.client_id)
        return self._pass_on(command, client, request(command.code, dict(command.ext)))

    @handles(RequestCode.CONSUME_MESSAGE_DIRECTLY, limit=Limit.ADMIN, rule=ADMIN, reads=True)
    def consume_directly(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 309 with the result: the client consumes one stored message now."""
        header = ConsumeDirectlyHeader.decode(command.ext)
        client = self._client(header.consumer_group, header.client_id)
        record = self._record(header.msg_id)
        ext = {**command.ext, "brokerName": self._settings.broker.broker_name}
        return self._pass_on(command, client, request(command.code, ext, record))

    @handles(
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        limit=Limit.ADMIN,
        rule=needs(SUB, topic="topic", group="group"),
    )
    def consumer_status(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 223: how far each client of a group is in a topic, by its own account."""
        header = ConsumerStatusHeader.decode(command.ext)
        group = self._clients.consumer_group(header.group)
        clients = [] if group is None else list(group.clients.values())
        if header.client_addr:
            clients = [client for client in clients if client.client_id == header.client_addr]
        if not clients:
            raise RefusedError(
                Condition.CONSUMER_NOT_ONLINE,
                f"No Any Consumer online in the consumer group: [{header.group}]",
            )
        return self._ask_all(command, header, clients)

    # ------------------------------------------------------------------------------ clients

    def _client(self, group_name: str, client_id: str | None) -> Client[Connection]:
        group = self._clients.consumer_group(group_name)
        for client in () if group is None else group.clients.values():
            if client_id is None or client.client_id == client_id:
                if client.version < MIN_VERSION:
                    raise bad_request(
                        f"The Consumer <{client.client_id}> Version <{client.version}> too low to "
                        "finish, please upgrade it to V3_1_8_SNAPSHOT"
                    )
                return client
        raise bad_request(f"The Consumer <{group_name}> <{client_id}> not online")

    async def _pass_on(
        self, command: RemotingCommand, client: Client[Connection], passed: RemotingCommand
    ) -> Answered:
        try:
            answered = await client.channel.invoke(passed, CLIENT_ANSWERS_WITHIN_S)
        except RequestTimedOutError as error:
            return answer(
                command,
                Condition.CLIENT_SILENT,
                f"consumer <{client.client_id}> did not answer: {error}",
            )
        ext = dict(answered.ext)
        return response_to(command, answered.code, answered.remark, ext, answered.body)

    async def _ask_all(
        self,
        command: RemotingCommand,
        header: ConsumerStatusHeader,
        clients: list[Client[Connection]],
    ) -> Answered:
        table: dict[str, dict[bodies.MessageQueue, int]] = {}
        ext = {"topic": header.topic, "group": header.group}

        async def ask(client: Client[Connection]) -> None:
            asked = request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, dict(ext))
            try:
                answered = await client.channel.invoke(asked, STATUS_WITHIN_S)
                if answered.code == ResponseCode.SUCCESS:
                    status = bodies.GetConsumerStatusBody.decode(answered.body)
                    table[client.client_id] = status.message_queue_table
            except MQError as error:
                # It is missing in the answer, which holds the progress of the others.
                logger.info("no_consumer_status", client=client.client_id, reason=str(error))

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(ask, client)
        ordered = {client_id: table[client_id] for client_id in sorted(table)}
        body = bodies.GetConsumerStatusBody(consumer_table=ordered)
        return response_to(command, body=body.encode())

    # ------------------------------------------------------------------------------ log

    def _record(self, msg_id: str) -> bytes:
        try:
            _, _, phy_offset = decode_offset_message_id(msg_id)
            if 0 <= phy_offset < self._group.state.applied_end_position:
                record = bytes(self._group.log.record_at(phy_offset))
                check_readable(record)
                return record
        except (LocalProtocolError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise _no_message(msg_id) from error
        raise _no_message(msg_id)


def _no_message(msg_id: str) -> RefusedError:
    return bad_request(f"can not find message by the offset in the id {msg_id}")
