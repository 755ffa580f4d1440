"""SendMessage, EndTransaction and RecallMessage.

A transaction is named by the place of its half message, so any proxy can end it, and none has to
remember it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerRefusedError,
    MessageIllegalError,
    TransactionDecidedError,
    UnknownOutcomeError,
)
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.producer import recall as recall_from
from dledger.client.producer.transaction import HalfMessage, TransactionEnd, half_of, send_end
from dledger.commitlog.errors import LocalProtocolError, MQError
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.caller import Caller
from dledger.proxy.messages import kind_sent, sent_message, topic_of
from dledger.proxy.routes import BrokerConfigs
from dledger.proxy.status import OK, RefusedError, overall, status_of, status_of_send
from dledger.remoting.errors import BadRequestError
from dledger.remoting.protocol.codes import ResponseCode
from dledger.remoting.protocol.headers import RecallHandle

PRODUCER_GROUP: Final = "DLEDGER_PROXY"
"""Of all producers behind proxies, but for transactions: their group is named as their topic."""

MESSAGES_MAX: Final = 1_024
"""Of one call; as many records as one request to a broker holds."""

PLACE_MAX: Final = (1 << 63) - 1
"""Of a half message; brokers' requests hold no greater one."""

_TRANSACTION_ID: Final = re.compile("([0-9a-f]{1,16})-([0-9a-f]{1,16})-(.+)")

_STATES: Final = {
    pb.TRANSACTION_RESOLUTION_UNSPECIFIED: LocalTransactionState.UNKNOWN,
    pb.COMMIT: LocalTransactionState.COMMIT,
    pb.ROLLBACK: LocalTransactionState.ROLLBACK,
}

_SINGLE: Final = frozenset({pb.DELAY, pb.TRANSACTION})
"""Types whose messages go to brokers one by one."""


@dataclass(frozen=True, slots=True)
class TransactionId:
    """Where a half message is."""

    broker_name: str
    half_offset: int
    position: int

    def encode(self) -> str:
        """Return the id in one word."""
        return f"{self.half_offset:x}-{self.position:x}-{self.broker_name}"

    @classmethod
    def decode(cls, text: str) -> TransactionId:
        """Return what `encode` made. Raises RefusedError: it is none."""
        found = _TRANSACTION_ID.fullmatch(text)
        if found is not None:
            half_offset, position = int(found[1], 16), int(found[2], 16)
            if max(half_offset, position) <= PLACE_MAX:
                return cls(found[3], half_offset, position)
        raise RefusedError(pb.INVALID_TRANSACTION_ID, f"no transaction has the id {text[:64]!r}")


def queue_of_group(queues: Sequence[MessageQueue], message_group: str) -> MessageQueue:
    """Return the queue of a message group: the same at every proxy while the queues stay."""
    return queues[zlib.crc32(message_group.encode()) % len(queues)]


def is_too_far(error: MessageIllegalError) -> bool:
    """Return whether a broker refused a message for its delivery time; nothing is stored."""
    return "delay" in error.remark


class Sends:
    """Sends for all clients of a proxy."""

    def __init__(self, instance: ClientInstance, configs: BrokerConfigs) -> None:
        """Prepare; to be opened inside *instance*."""
        self._instance = instance
        self._configs = configs
        config = ProducerConfig(compress_over_bytes=None)
        self._producer = Producer(instance, PRODUCER_GROUP, config)
        # A second half message would never be decided: only what is stored once is sent again.
        self._halves = Producer(
            instance, PRODUCER_GROUP, ProducerConfig(compress_over_bytes=None, max_retries=0)
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Send while the block runs; sends under way are waited for at its end."""
        async with self._producer, self._halves:
            yield

    # ------------------------------------------------------------------------------ messages

    async def send(self, request: pb.SendMessageRequest, caller: Caller) -> pb.SendMessageResponse:
        """Send one message or several of one topic; each has a status of its own.

        Raises:
            RefusedError: Nothing was sent.
            ClientError: As `Producer.send`, of a single message or of all.
        """
        asked = request.messages
        if not asked:
            raise RefusedError(pb.MESSAGE_CORRUPTED, "there is no message in the request")
        if len(asked) > MESSAGES_MAX:
            raise RefusedError(
                pb.BAD_REQUEST, f"{len(asked)} messages in one request, at most {MESSAGES_MAX}"
            )
        messages = [sent_message(each) for each in asked]
        topic = messages[0].topic
        kinds = {kind_sent(each) for each in asked}
        if any(message.topic != topic for message in messages):
            raise RefusedError(pb.MESSAGE_CORRUPTED, "the messages of a request share a topic")
        if len(kinds) > 1:
            raise RefusedError(pb.BAD_REQUEST, "the messages of a request share a type")
        kind = kinds.pop()
        types = await self._configs.types(topic)
        if kind not in types:
            accepted = ", ".join(pb.MessageType.Name(each) for each in types)
            raise RefusedError(
                pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"{topic} takes {accepted}, not {pb.MessageType.Name(kind)}",
            )
        if len(messages) == 1:
            entries = [await self._send_one(messages[0], asked[0], kind, caller)]
        elif kind in _SINGLE:
            entries = await self._send_each(messages, asked, kind, caller)
        else:
            entries = await self._send_batch(messages, asked, caller)
        return pb.SendMessageResponse(
            status=overall([entry.status for entry in entries]), entries=entries
        )

    async def _send_one(
        self, message: Message, asked: pb.Message, kind: pb.MessageType, caller: Caller
    ) -> pb.SendResultEntry:
        timeout_s = caller.timeout_s()
        if kind == pb.TRANSACTION:
            half = half_of(message, message.topic)
            result = await self._halves.send(half, timeout_s=timeout_s)
            place = HalfMessage(message, result, message.topic)
            try:
                name = TransactionId(place.broker_name, place.half_offset, place.position)
            except LocalProtocolError as error:
                raise UnknownOutcomeError(f"stored, and its place is not known: {error}") from error
            return _entry(result, transaction_id=name.encode())
        queue = await self._queue(message.topic, asked)
        try:
            if queue is None:
                return _entry(await self._producer.send(message, timeout_s=timeout_s))
            return _entry(await self._producer.send_to(queue, message, timeout_s=timeout_s))
        except MessageIllegalError as error:
            if kind == pb.DELAY and is_too_far(error):
                raise RefusedError(pb.ILLEGAL_DELIVERY_TIME, str(error)) from error
            raise

    async def _queue(self, topic: str, asked: pb.Message) -> MessageQueue | None:
        system = asked.system_properties
        if not system.message_group:
            return None
        queues = await self._producer.publish_queues(topic)
        route = self._instance.routes.known_publish(topic)
        if route is not None and route.writable_queues:
            # Those of a group that elects a leader, too: in the queue of another one a message
            # would overtake those before it.
            queues = route.writable_queues
        return queue_of_group(queues, system.message_group)

    async def _send_each(
        self,
        messages: Sequence[Message],
        asked: Sequence[pb.Message],
        kind: pb.MessageType,
        caller: Caller,
    ) -> list[pb.SendResultEntry]:
        entries = [pb.SendResultEntry() for _ in messages]

        async def send(place: int) -> None:
            try:
                entries[place] = await self._send_one(messages[place], asked[place], kind, caller)
            except MQError as error:
                entries[place] = pb.SendResultEntry(
                    status=status_of(error), message_id=messages[place].message_id
                )

        async with trio.open_nursery() as nursery:
            for place in range(len(messages)):
                nursery.start_soon(send, place)
        return entries

    async def _send_batch(
        self, messages: Sequence[Message], asked: Sequence[pb.Message], caller: Caller
    ) -> list[pb.SendResultEntry]:
        groups = {each.system_properties.message_group for each in asked}
        if len(groups) > 1:
            raise RefusedError(
                pb.ILLEGAL_MESSAGE_GROUP, "the messages of a request are of one message group"
            )
        queue = await self._queue(messages[0].topic, asked[0])
        sent = await self._producer.send_batch(messages, queue=queue, timeout_s=caller.timeout_s())
        return [_entry(result) for result in sent]

    # ------------------------------------------------------------------------------ transactions

    async def end_transaction(
        self, request: pb.EndTransactionRequest, caller: Caller
    ) -> pb.EndTransactionResponse:
        """Commit a half message or take it back.

        Raises:
            RefusedError: The id names no transaction, or there is no such resolution.
            TransactionDecidedError: It is decided otherwise.
            ClientError: As `dledger.client.producer.transaction.send_end`.
        """
        place = TransactionId.decode(request.transaction_id)
        topic = topic_of(request.topic)
        state = _STATES.get(request.resolution)
        if state is None:
            raise RefusedError(pb.BAD_REQUEST, f"no resolution has the number {request.resolution}")
        await self._configs.find_broker(topic, place.broker_name, pb.INVALID_TRANSACTION_ID)
        end = TransactionEnd(
            topic,
            place.broker_name,
            topic,
            place.half_offset,
            place.position,
            request.message_id,
            state,
            is_answer=request.source == pb.SOURCE_SERVER_CHECK,
        )
        try:
            await send_end(self._instance, end, caller.timeout_s())
        except TransactionDecidedError:
            raise
        except BrokerRefusedError as error:
            if error.code == ResponseCode.SYSTEM_ERROR:
                # No half message stands there, or it is another topic's.
                raise RefusedError(pb.INVALID_TRANSACTION_ID, str(error)) from error
            raise
        return pb.EndTransactionResponse(status=OK)

    async def recall(
        self, request: pb.RecallMessageRequest, caller: Caller
    ) -> pb.RecallMessageResponse:
        """Take back a message with a delivery time.

        Raises:
            RefusedError: The handle is none, of another topic, or names no broker group.
            ClientError: As `Producer.recall`.
        """
        try:
            named = RecallHandle.decode(request.recall_handle)
        except BadRequestError as error:
            raise RefusedError(pb.BAD_REQUEST, str(error)) from error
        if named.topic != topic_of(request.topic):
            raise RefusedError(pb.BAD_REQUEST, "the recall handle is of another topic")
        await self._configs.find_broker(named.topic, named.broker_name, pb.BAD_REQUEST)
        message_id = await recall_from(
            self._instance, PRODUCER_GROUP, request.recall_handle, caller.timeout_s()
        )
        return pb.RecallMessageResponse(status=OK, message_id=message_id)


def _entry(result: SendResult, *, transaction_id: str = "") -> pb.SendResultEntry:
    return pb.SendResultEntry(
        status=status_of_send(result.status),
        message_id=result.message_id,
        transaction_id=transaction_id,
        offset=result.queue_offset,
        recall_handle=result.recall_handle,
    )
