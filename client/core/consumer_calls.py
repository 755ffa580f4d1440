"""What brokers ask of consumers: 220, 221, 307 and 309, handed to the consumer group they are for.

Answers are those of RocketMQ's Java client.

Spec: remoting fact sheet, section 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from client.core.message import MessageExt
from client.core.route import MessageQueue
from commitlog.errors import ConfigError
from remoting.connection import Connection
from remoting.log import get_logger
from remoting.processor import Answered, Handled, Limiter, ProcessorTable
from remoting.protocol import bodies
from remoting.protocol.codes import RequestCode, ResponseCode
from remoting.protocol.command import RemotingCommand, response_to
from remoting.protocol.headers import (
    ConsumeDirectlyHeader,
    ConsumerClientHeader,
    GroupTopicHeader,
    ResetOffsetHeader,
)

CALLS_MAX: Final = 64
"""Requests of one kind that are open at a time: operators ask, and few of them."""

_log = get_logger(__name__)


class CalledConsumer(Protocol):
    """A consumer as brokers ask it."""

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on at *offsets*; returns at once."""

    def consumed_offsets(self, topic: str) -> dict[MessageQueue, int]:
        """Return how far each queue of *topic* is that is this consumer's."""

    def running_info(self, *, with_stacks: bool) -> bodies.ConsumerRunningInfo:
        """Return how it is."""

    async def consume_directly(self, message: MessageExt) -> bodies.ConsumeMessageDirectlyResult:
        """Give the listener one message, outside of all queues, and return what came of it."""


class ConsumerCalls:
    """Who in this client answers for which consumer group."""

    def __init__(self, server_requests: ProcessorTable) -> None:
        self._consumers: dict[str, CalledConsumer] = {}
        for code, handler in (
            (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset),
            (RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self._status),
            (RequestCode.GET_CONSUMER_RUNNING_INFO, self._running_info),
            (RequestCode.CONSUME_MESSAGE_DIRECTLY, self._consume_directly),
        ):
            server_requests.register(
                code, handler, Limiter(code.name.lower().replace("_", " "), CALLS_MAX)
            )

    def add(self, group: str, consumer: CalledConsumer) -> None:
        """Let *consumer* answer for *group*.

        Raises:
            ConfigError: Somebody in this client answers for the group already.
        """
        if group in self._consumers:
            raise ConfigError(f"consumer group {group} is in use in this client instance")
        self._consumers[group] = consumer

    def remove(self, group: str) -> None:
        """Answer for *group* no more."""
        del self._consumers[group]

    def _reset(self, _connection: Connection, command: RemotingCommand) -> None:
        """Take 220; it wants no answer."""
        header = ResetOffsetHeader.decode(command.ext)
        table = bodies.ResetOffsetBody.decode(command.body).offset_table
        consumer = self._consumers.get(header.group)
        if consumer is None:
            _log.info("reset_for_nobody", group=header.group, topic=header.topic)
            return
        consumer.reset_offsets(
            {
                MessageQueue(queue.topic, queue.broker_name, queue.queue_id): offset
                for queue, offset in table.items()
                if queue.topic == header.topic
            }
        )

    def _status(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Answer 221; a group that is not here has an empty table, as in RocketMQ."""
        header = GroupTopicHeader.decode(command.ext)
        consumer = self._consumers.get(header.group)
        offsets = {} if consumer is None else consumer.consumed_offsets(header.topic)
        body = bodies.GetConsumerStatusBody(
            message_queue_table={wire_queue(queue): offset for queue, offset in offsets.items()}
        )
        return response_to(command, 0, None, None, body.encode())

    def _running_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        header = ConsumerClientHeader.decode(command.ext)
        consumer = self._consumers.get(header.consumer_group)
        if consumer is None:
            return _not_here(command, header.consumer_group)
        info = consumer.running_info(with_stacks=bool(header.jstack_enable))
        return response_to(command, 0, None, None, info.encode())

    def _consume_directly(self, _connection: Connection, command: RemotingCommand) -> Handled:
        header = ConsumeDirectlyHeader.decode(command.ext)
        consumer = self._consumers.get(header.consumer_group)
        if consumer is None:
            return _not_here(command, header.consumer_group)
        message = MessageExt(memoryview(bytes(command.body)), 0, header.broker_name or "")
        return _directly(command, consumer, message)


async def _directly(
    command: RemotingCommand, consumer: CalledConsumer, message: MessageExt
) -> Answered:
    result = await consumer.consume_directly(message)
    return response_to(command, 0, None, None, result.encode())


def _not_here(command: RemotingCommand, group: str) -> RemotingCommand:
    return response_to(
        command,
        int(ResponseCode.SYSTEM_ERROR),
        f"The Consumer Group <{group}> not exist in this consumer",
    )


def wire_queue(queue: MessageQueue) -> bodies.MessageQueue:
    """Return *queue* as it stands in bodies."""
    return bodies.MessageQueue(queue.topic, queue.broker_name, queue.queue_id)
