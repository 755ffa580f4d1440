"""Who is connected and what it wants: 203, 204, 300, 343 and 345.

Every broker answers from its own table. Clients that tell the leader alone are known there only.

Spec: remoting fact sheet, section 10.
"""

from __future__ import annotations

from dledger.group_api import BrokerGroup
from dledger.processors.client_table import ClientTable, connection_of
from remoting.connection import Connection
from remoting.processor import Handled
from remoting.protocol import bodies
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import (
    ConsumerGroupHeader,
    GroupHeader,
    GroupTopicHeader,
    ProducerGroupHeader,
    TopicHeader,
)
from remoting.protocol.outcome import Condition, answer


class ClientQueriesProcessor:
    """Answers questions about clients and subscriptions."""

    def __init__(self, group: BrokerGroup, clients: ClientTable[Connection]) -> None:
        self._group = group
        self._clients = clients

    def consumer_connections(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 203: the clients of a consumer group, 206 when there is none."""
        name = ConsumerGroupHeader.decode(command.ext).consumer_group
        group = self._clients.consumer_group(name)
        if group is None:
            return answer(
                command, Condition.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        return response_to(command, 0, None, None, group.connection().encode())

    def producer_connections(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 204: the clients of a producer group, 1 when there is none."""
        name = ProducerGroupHeader.decode(command.ext).producer_group
        clients = self._clients.producers(name)
        if not clients:
            return answer(command, Condition.BAD_REQUEST, f"the producer group[{name}] not exist")
        body = bodies.ProducerConnection([connection_of(client) for client in clients])
        return response_to(command, 0, None, None, body.encode())

    def consumers_of_topic(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 300: groups that have committed offsets of a topic, or subscribe it now."""
        topic = TopicHeader.decode(command.ext).topic
        found = {group for group, of_topic in self._offset_keys() if of_topic == topic}
        found |= {
            group.name for group in self._clients.consumer_groups if topic in group.subscriptions
        }
        return response_to(command, 0, None, None, bodies.GroupList(sorted(found)).encode())

    def topics_of_consumer(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 343: topics of which a group has committed offsets, or that it subscribes now."""
        name = GroupHeader.decode(command.ext).group
        found = {topic for group, topic in self._offset_keys() if group == name}
        online = self._clients.consumer_group(name)
        if online is not None:
            found |= set(online.subscriptions)
        return response_to(command, 0, None, None, bodies.TopicList(sorted(found)).encode())

    def subscription(self, _connection: Connection, command: RemotingCommand) -> Handled:
        """Answer 345: what a group wants of a topic; no data in it when nobody is connected."""
        header = GroupTopicHeader.decode(command.ext)
        online = self._clients.consumer_group(header.group)
        found = None if online is None else online.subscriptions.get(header.topic)
        body = bodies.QuerySubscriptionResponseBody(
            None if found is None else found.data, header.group, header.topic
        )
        return response_to(command, 0, None, None, body.encode())

    def _offset_keys(self) -> list[tuple[str, str]]:
        return list(self._group.state.consumer_offsets)
