"""INVOKE_BROKER_TO_RESET_OFFSET (222): the consumers of a group are told to go on elsewhere.

Works as RocketMQ 4.9's broker does: it reckons the offsets and tells every client of the group
(220), which stops, takes them over and commits them. Nobody there: 206, and the tools commit the
offsets themselves.

Spec: remoting fact sheet, sections 10 and 11.
"""

from __future__ import annotations

import structlog

from commitlog.errors import MQError
from dledger.group_api import BrokerGroup
from dledger.processors.broker_settings import BrokerSettings
from dledger.processors.client_table import Client, ClientTable
from dledger.processors.current_read import when_current
from dledger.processors.offsets import search_offset
from dledger.processors.refusal import RefusedError, not_leader, refusal
from dledger.services.offset_commits import OffsetCommits
from remoting.connection import Connection
from remoting.errors import RemotingError
from remoting.processor import Handled
from remoting.protocol.bodies import (
    MessageQueue,
    QueueOffset,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, request, response_to
from remoting.protocol.headers import ResetOffsetHeader
from remoting.protocol.outcome import Condition

LATEST = -1
"""As a time: the end of each queue."""

UNDERSTANDS_SINCE = 37
"""Clients from RocketMQ 3.0.11 on; the request is little older than that."""

logger = structlog.get_logger(__name__)


class ResetOffsetsProcessor:
    """Answers 222 with the offsets that the clients were told."""

    def __init__(
        self,
        group: BrokerGroup,
        clients: ClientTable[Connection],
        offsets: OffsetCommits,
        settings: BrokerSettings,
    ) -> None:
        self._group = group
        self._clients = clients
        self._offsets = offsets
        self._settings = settings

    def handle(self, connection: Connection, command: RemotingCommand) -> Handled:
        """Reckon behind the read barrier, since where a queue ends is part of it."""
        try:
            header = ResetOffsetHeader.decode(command.ext)
            if self._group.leadership is None:
                raise not_leader(self._group)
        except MQError as error:
            return refusal(command, error)
        return when_current(self._group, connection, command, lambda: self._reset(command, header))

    def _reset(self, command: RemotingCommand, header: ResetOffsetHeader) -> RemotingCommand:
        table = self._table(header)
        consumers = self._clients.consumer_group(header.group)
        if consumers is None:
            return response_to(
                command,
                int(ResponseCode.CONSUMER_NOT_ONLINE),
                f"Consumer not online, so can not reset offset, Group: {header.group}"
                f" Topic: {header.topic} Timestamp: {header.timestamp}",
            )
        clients = list(consumers.clients.values())
        for client in clients:
            if client.version < UNDERSTANDS_SINCE:
                raise RefusedError(
                    Condition.BAD_REQUEST,
                    f"the client {client.client_id} is too old to be told: {client.version}",
                )
        body = ResetOffsetBody(offset_table=table)
        for client in clients:
            self._tell(client, header, body)
        return response_to(command, 0, None, None, body.encode())

    def _table(self, header: ResetOffsetHeader) -> dict[MessageQueue, int]:
        state = self._group.state
        config = state.topic_config(header.topic)
        if config is None:
            raise RefusedError(Condition.BAD_REQUEST, f"topic {header.topic} does not exist")
        queues = range(config.write_queue_nums)
        if header.queue_id is not None and header.queue_id >= 0:
            if header.queue_id not in queues:
                raise RefusedError(
                    Condition.BAD_REQUEST, f"topic {header.topic} has no queue {header.queue_id}"
                )
            queues = range(header.queue_id, header.queue_id + 1)
        table = {}
        for queue_id in queues:
            consumed = self._offsets.offset(header.group, header.topic, queue_id)
            if consumed is None:
                raise RefusedError(
                    Condition.BAD_REQUEST,
                    f"the consumer group {header.group} has no offset in queue {queue_id} of"
                    f" {header.topic}",
                )
            wanted = self._wanted(header, queue_id)
            queue = MessageQueue(header.topic, self._settings.broker_name, queue_id)
            table[queue] = wanted if header.is_force or wanted < consumed else consumed
        return table

    def _wanted(self, header: ResetOffsetHeader, queue_id: int) -> int:
        state, topic = self._group.state, header.topic
        if header.offset is not None and header.offset >= 0:
            low, high = state.min_offset(topic, queue_id), state.max_offset(topic, queue_id)
            return min(max(header.offset, low), high)
        if header.timestamp == LATEST:
            return state.max_offset(topic, queue_id)
        return search_offset(self._group, topic, queue_id, header.timestamp, upper=False)

    def _tell(
        self, client: Client[Connection], header: ResetOffsetHeader, body: ResetOffsetBody
    ) -> None:
        told = request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            {
                "topic": header.topic,
                "group": header.group,
                "timestamp": str(header.timestamp),
                "isForce": "true" if header.is_force else "false",
            },
            _for_c(body).encode() if client.language == "CPP" else body.encode(),
        )
        try:
            client.channel.invoke_oneway(told)
        except RemotingError as error:
            # It is taken out with its connection, and goes on from what is committed.
            logger.info("reset_not_told", client=client.client_id, reason=str(error))


def _for_c(body: ResetOffsetBody) -> ResetOffsetBodyForC:
    return ResetOffsetBodyForC(
        offset_table=[
            QueueOffset(
                topic=queue.topic,
                broker_name=queue.broker_name,
                queue_id=queue.queue_id,
                offset=offset,
            )
            for queue, offset in body.offset_table.items()
        ]
    )
