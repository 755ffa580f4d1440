"""Requests that brokers send to this client: 39, 220, 221, 307, 309 and 326.

Questions about transactions go to the producer group they name, calls of operators to the consumer
group, and replies to the request that waits for them. Answers are those of RocketMQ's Java client.

Spec: docs/internals/protocol/remoting.md, section 11.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from dledger.client.core.errors import BackpressureError
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError, LocalProtocolError, MQError
from dledger.commitlog.properties import (
    PROPERTY_ARRIVE_TIME,
    PROPERTY_CORRELATION_ID,
    PROPERTY_PRODUCER_GROUP,
    decode_properties,
    encode_properties,
)
from dledger.commitlog.record import (
    NO_HOST,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    encode_record,
    pack_host,
)
from dledger.remoting.addresses import split_address
from dledger.remoting.connection import Connection
from dledger.remoting.handling import Answered, Handled, Limiter
from dledger.remoting.log import get_logger
from dledger.remoting.processor_table import ProcessorTable
from dledger.remoting.protocol import bodies
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.command import RemotingCommand, response_to
from dledger.remoting.protocol.headers import (
    CheckTransactionStateHeader,
    ConsumeDirectlyHeader,
    ConsumerClientHeader,
    GroupTopicHeader,
    ReplyMessageHeader,
    ResetOffsetHeader,
)
from dledger.remoting.seams import Clock, Rng

_log = get_logger(__name__)

CHECKS_MAX: Final = 1024
"""Questions looked at at a time; they are handed on at once."""


@dataclass(frozen=True, slots=True)
class Question:
    """A broker asks what became of a transaction.

    Attributes:
        message: The half message, in its real topic and queue; its `message_id` names the
            transaction.
        half_offset: Its place in the half topic.
        position: Its place in the log.
        broker_name: The broker group that asks; empty: an old RocketMQ, which does not say.
        connection: Where it came from.
    """

    message: MessageExt
    half_offset: int
    position: int
    broker_name: str
    connection: Connection


OnQuestion = Callable[[Question], None]


class CheckBacks:
    """The producers of this client by the group they answer for."""

    def __init__(self, server_requests: ProcessorTable) -> None:
        self._groups: dict[str, OnQuestion] = {}
        server_requests.register(
            RequestCode.CHECK_TRANSACTION_STATE,
            self._asked,
            Limiter("check transaction state", CHECKS_MAX),
        )

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: str, on_question: OnQuestion) -> None:
        """Let *on_question* have the questions for *group*; it must neither block nor raise.

        Raises ConfigError: a producer of this client answers for the group already.
        """
        if group in self._groups:
            raise ConfigError(f"this client instance has a transaction producer of {group} already")
        self._groups[group] = on_question

    def remove(self, group: str) -> None:
        """Answer for *group* no more."""
        del self._groups[group]

    def _asked(self, connection: Connection, command: RemotingCommand) -> None:
        """Take code 39; it wants no answer, but an END_TRANSACTION."""
        header = CheckTransactionStateHeader.decode(command.ext)
        message = MessageExt(memoryview(bytes(command.body)), 0, header.bname or "")
        try:
            group = message.properties.get(PROPERTY_PRODUCER_GROUP, "")
        except MQError as error:
            _log.warning("check_back_unreadable", error=str(error))
            return
        on_question = self._groups.get(group)
        if on_question is None:
            _log.debug("check_back_without_producer", group=group)
            return
        on_question(
            Question(
                message,
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.bname or "",
                connection,
            )
        )


CALLS_MAX: Final = 64
"""Requests of one kind that are open at a time: operators ask, and few of them."""


class CalledConsumer(Protocol):
    """A consumer as brokers ask it."""

    def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on at *offsets*; returns at once."""

    def consumed_offsets(self, topic: str) -> dict[MessageQueue, int]:
        """Return how far each queue of *topic* is that is this consumer's."""

    def running_info(
        self, *, with_stacks: bool
    ) -> bodies.ConsumerRunningInfo | Awaitable[bodies.ConsumerRunningInfo]:
        """Return how it is, or what is to be awaited for that."""

    async def consume_directly(self, message: MessageExt) -> bodies.ConsumeMessageDirectlyResult:
        """Give the listener one message, outside of all queues, and return what came of it."""


class ConsumerCalls:
    """The consumers of this client by the group they answer for."""

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

        Raises ConfigError: a consumer of this client answers for the group already.
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
            _log.info("reset_without_consumer", group=header.group, topic=header.topic)
            return
        consumer.reset_offsets(
            {
                sdk_queue(queue): offset
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

    def _running_info(self, _connection: Connection, command: RemotingCommand) -> Handled:
        header = ConsumerClientHeader.decode(command.ext)
        consumer = self._consumers.get(header.consumer_group)
        if consumer is None:
            return _not_here(command, header.consumer_group)
        info = consumer.running_info(with_stacks=bool(header.jstack_enable))
        if isinstance(info, bodies.ConsumerRunningInfo):
            return response_to(command, 0, None, None, info.encode())
        return _later(command, info)

    def _consume_directly(self, _connection: Connection, command: RemotingCommand) -> Handled:
        header = ConsumeDirectlyHeader.decode(command.ext)
        consumer = self._consumers.get(header.consumer_group)
        if consumer is None:
            return _not_here(command, header.consumer_group)
        message = MessageExt(memoryview(bytes(command.body)), 0, header.broker_name or "")
        return _directly(command, consumer, message)


async def _later(command: RemotingCommand, info: Awaitable[bodies.ConsumerRunningInfo]) -> Answered:
    return response_to(command, 0, None, None, (await info).encode())


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


def sdk_queue(queue: bodies.MessageQueue) -> MessageQueue:
    """Return a queue of a body as the SDK knows it."""
    return MessageQueue(queue.topic, queue.broker_name, queue.queue_id)


OPEN_REQUESTS_MAX: Final = 65_536
"""Requests that wait at a time; more wait for nothing but a slow replier, and would only grow."""

REPLIES_MAX: Final = 1024
"""Replies looked at at a time; they are handed over at once."""

CORRELATION_ID_BYTES: Final = 16
"""Too many to be guessed: any client that knows an id could answer in the replier's place."""

_BODY_FLAGS: Final = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK


@dataclass(eq=False, repr=False, slots=True)
class OpenRequest:
    """A request that waits."""

    correlation_id: str
    reply: MessageExt | None = None
    ended: trio.Event = field(default_factory=trio.Event)


class OpenRequests:
    """The requests of one client.

    *in_use*: a request was made: from then on all brokers are to know this client.
    """

    def __init__(self, server_requests: ProcessorTable, clock: Clock, rng: Rng) -> None:
        self.in_use = False
        self.unmatched = 0
        self._clock = clock
        self._rng = rng
        self._open: dict[str, OpenRequest] = {}
        server_requests.register(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            self._pushed,
            Limiter("push reply message", REPLIES_MAX),
        )

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def opened(self) -> Iterator[OpenRequest]:
        """Wait for a reply inside the block.

        Raises BackpressureError: `OPEN_REQUESTS_MAX` wait already.
        """
        if len(self._open) >= OPEN_REQUESTS_MAX:
            raise BackpressureError(f"{len(self._open)} requests wait for their replies")
        waiting = OpenRequest(self._rng.randbytes(CORRELATION_ID_BYTES).hex())
        self._open[waiting.correlation_id] = waiting
        try:
            yield waiting
        finally:
            self._open.pop(waiting.correlation_id, None)

    def _pushed(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """Take code 326. A reply that comes too late, or again, is confirmed as well."""
        try:
            reply = _message_of(command, self._clock.wall_ms())
            correlation_id = reply.properties.get(PROPERTY_CORRELATION_ID, "")
        except MQError as error:
            _log.warning("reply_unreadable", error=str(error))
            return response_to(command, ResponseCode.SYSTEM_ERROR, "process reply message fail")
        waiting = self._open.pop(correlation_id, None)
        if waiting is None:
            self.unmatched += 1
            _log.info(
                "reply_without_request", correlation_id=correlation_id, sender=reply.born_host
            )
        else:
            waiting.reply = reply
            waiting.ended.set()
        return response_to(command)


def _message_of(command: RemotingCommand, arrived_ms: int) -> MessageExt:
    header = ReplyMessageHeader.decode(command.ext)
    properties = decode_properties(header.properties or "")
    properties[PROPERTY_ARRIVE_TIME] = str(arrived_ms)
    record = encode_record(
        topic=header.topic,
        queue_id=header.queue_id,
        body=command.body,
        properties=encode_properties(properties),
        flag=header.flag,
        sys_flag=header.sys_flag & _BODY_FLAGS,
        born_timestamp_ms=header.born_timestamp,
        born_host=_packed(header.born_host),
        reconsume_times=header.reconsume_times or 0,
        store_timestamp_ms=header.store_timestamp,
        store_host=_packed(header.store_host),
    )
    return MessageExt(memoryview(record), 0)


def _packed(address: str | None) -> bytes:
    try:
        return pack_host(*split_address(address or ""))
    except LocalProtocolError:
        return NO_HOST
