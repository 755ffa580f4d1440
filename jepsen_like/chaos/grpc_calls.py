"""Clients of RocketMQ's gRPC protocol: what they send and receive goes through proxies.

A client calls one proxy until a call to it breaks, then the next one; what became of that call is
not known. A message is sent under a message group that belongs to its queue, so its queue is known.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import grpc
import trio

from dledger.client.core.errors import (
    BrokerBusyError,
    BrokerUnreachableError,
    ClientError,
    MessageIllegalError,
    NoRouteError,
    ReceiptStaleError,
    RequestFailedError,
    UnknownOutcomeError,
)
from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult, SendStatus
from dledger.client.core.route import MessageQueue
from dledger.proxy import messaging_pb2 as pb
from dledger.proxy.messages import duration, milliseconds
from dledger.remoting.protocol.pop_requests import ReceiptHandle

CALL_TIMEOUT_S: Final = 8.0
"""Longer than a broker waits for a majority; the time that a receive waits comes on top."""

CALLS_MAX: Final = 128
"""Calls under way: each has a thread. More wait for their turn."""

CONNECT_LOOK_S: Final = 0.1
"""Between two searches for a proxy that is connected."""

RECONNECT_MS: Final = (100, 1_000)
"""Between two attempts to reach a proxy: at first, and at most."""

SERVICE: Final = "/apache.rocketmq.v2.MessagingService"

UNKNOWN: Final = frozenset(
    {
        pb.PROXY_TIMEOUT,
        pb.MASTER_PERSISTENCE_TIMEOUT,
        pb.SLAVE_PERSISTENCE_TIMEOUT,
        pb.HA_NOT_AVAILABLE,
    }
)
"""Codes after which it may have happened or not."""

REFUSED: Final = frozenset({pb.INTERNAL_SERVER_ERROR, pb.BAD_REQUEST})
"""Codes of requests that brokers or the proxy refused: no leader, no route, no answer in time."""


class UnexpectedStatusError(ClientError):
    """A proxy answered with a code that it has no reason for; the run fails."""


def error_of(status: Any) -> ClientError | None:
    """Return what a status means for the operation; None: it happened."""
    text = f"{pb.Code.Name(status.code)}: {status.message}"
    match status.code:
        case pb.OK:
            return None
        case pb.INVALID_RECEIPT_HANDLE:
            return ReceiptStaleError(text)
        case pb.TOO_MANY_REQUESTS:
            return BrokerBusyError(text, code=status.code)
        case pb.TOPIC_NOT_FOUND:
            return NoRouteError(text)
        case code if code in UNKNOWN:
            return UnknownOutcomeError(text)
        case code if code in REFUSED:
            return RequestFailedError(text, code=code)
    return UnexpectedStatusError(text)


def error_of_all(statuses: Sequence[Any]) -> ClientError | None:
    """Return what statuses of one request mean for all of it; None: all of it happened.

    Where they differ it is not known of any of them.
    """
    codes = {status.code for status in statuses}
    if len(codes) == 1:
        return error_of(statuses[0])
    names = ", ".join(sorted(pb.Code.Name(code) for code in codes))
    return UnknownOutcomeError(f"different results: {names}")


def message_group_of(queue_id: int, queues: int) -> str:
    """Return a message group whose messages every proxy puts into the queue *queue_id*.

    *queues*: of the topic; all are of one broker group.
    """
    names = (f"group-{number}" for number in count())
    return next(name for name in names if zlib.crc32(name.encode()) % queues == queue_id)


@dataclass(slots=True)
class HandedOut:
    """A message that a proxy handed out; see `dledger.jepsen_like.workloads.through.Received`."""

    message: Any
    message_queue: MessageQueue
    receipt: ReceiptHandle

    @property
    def body(self) -> bytes:
        """The body."""
        return bytes(self.message.body)

    @property
    def tags(self) -> str:
        """Its tag."""
        return str(self.message.system_properties.tag)

    @property
    def keys(self) -> str:
        """Its keys."""
        return " ".join(self.message.system_properties.keys)

    @property
    def properties(self) -> dict[str, str]:
        """The properties that its producer gave it."""
        return dict(self.message.user_properties)

    @property
    def born_timestamp_ms(self) -> int:
        """When it was sent."""
        return milliseconds(self.message.system_properties.born_timestamp)

    @property
    def queue_id(self) -> int:
        """Its queue."""
        return self.message_queue.queue_id

    @property
    def queue_offset(self) -> int:
        """Its place there."""
        return int(self.message.system_properties.queue_offset)

    @property
    def delivery_attempt(self) -> int:
        """How often it was handed out, this time included."""
        return int(self.message.system_properties.delivery_attempt)


class Link:
    """The connection to one proxy, which all clients share; *channel*: where calls are made."""

    def __init__(self, address: str) -> None:
        first_ms, most_ms = RECONNECT_MS
        options = [
            ("grpc.initial_reconnect_backoff_ms", first_ms),
            ("grpc.min_reconnect_backoff_ms", first_ms),
            ("grpc.max_reconnect_backoff_ms", most_ms),
            ("grpc.enable_http_proxy", 0),
        ]
        self.channel = grpc.insecure_channel(address, options)
        self._state: grpc.ChannelConnectivity | None = None
        self.channel.subscribe(self._note, try_to_connect=True)

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state  # on a thread of the library

    @property
    def is_connected(self) -> bool:
        """Whether a call reaches the proxy, as far as is known."""
        return self._state is grpc.ChannelConnectivity.READY

    def connect(self) -> None:
        """Begin to connect again; returns at once."""
        self.channel.subscribe(_ignore, try_to_connect=True)
        self.channel.unsubscribe(_ignore)

    def close(self) -> None:
        """End it, and all calls."""
        self.channel.unsubscribe(self._note)
        self.channel.close()


def _ignore(_: grpc.ChannelConnectivity) -> None:
    pass


class GrpcCalls:
    """Calls of all clients of a run; see `dledger.jepsen_like.workloads.through.Through`."""

    def __init__(self, links: Sequence[Link], queues: int) -> None:
        self._links = links
        self._limiter = trio.CapacityLimiter(CALLS_MAX)
        self._groups = [message_group_of(queue_id, queues) for queue_id in range(queues)]

    @asynccontextmanager
    async def producer(self, index: int) -> AsyncIterator[GrpcProducer]:
        """Return what producer *index* sends with."""
        yield GrpcProducer(_Caller(self, index, "producer"), self._groups)

    def consumer(self, index: int, group: str, topic: str, broker_name: str) -> GrpcConsumer:
        """Return what receiver *index* receives with, of the queues of a broker group."""
        return GrpcConsumer(_Caller(self, index, "receiver"), group, topic, broker_name)

    async def connected(self, place: int, timeout_s: float) -> int:
        """Return *place* where that proxy is connected, else the next place whose proxy is.

        Raises BrokerUnreachableError: none is within *timeout_s*; nothing was called.
        """
        with trio.move_on_after(timeout_s):
            while True:
                for at in range(place, place + len(self._links)):
                    if self.link(at).is_connected:
                        return at
                for link in self._links:
                    link.connect()
                await trio.sleep(CONNECT_LOOK_S)
        raise BrokerUnreachableError(f"no proxy is connected within {timeout_s:.0f} s")

    def link(self, place: int) -> Link:
        """Return the link at *place*, modulo their number."""
        return self._links[place % len(self._links)]

    async def wait(self, call: Any, wait: Callable[[], Any]) -> Any:
        """Return what *wait* returns, in a thread.

        Cancellation: *call* is cancelled; the proxy may have done what it asks for.
        """
        try:
            return await trio.to_thread.run_sync(
                wait, abandon_on_cancel=True, limiter=self._limiter
            )
        except trio.Cancelled:
            call.cancel()
            raise


@contextmanager
def grpc_calls(addresses: Sequence[str], queues: int) -> Iterator[GrpcCalls]:
    """Let clients call the proxies at *addresses* while the block runs."""
    links = [Link(address) for address in addresses]
    try:
        yield GrpcCalls(links, queues)
    finally:
        for link in links:
            link.close()


class _Caller:
    """One client: the proxy that it calls, and what it is known as."""

    def __init__(self, calls: GrpcCalls, index: int, role: str) -> None:
        self._calls = calls
        self._place = index
        self._metadata = (("x-mq-client-id", f"{role}-{index}"), ("x-mq-language", "PYTHON"))

    async def one(self, name: str, request: Any, answer: Any, timeout_s: float) -> Any:
        """Return the answer to a call."""
        make = await self._method("unary_unary", name, request, answer)
        call = make.future(request, timeout=timeout_s, metadata=self._metadata)
        return await self._wait(name, call, call.result)

    async def several(self, name: str, request: Any, answer: Any, timeout_s: float) -> list[Any]:
        """Return all answers to a call."""
        make = await self._method("unary_stream", name, request, answer)
        call = make(request, timeout=timeout_s, metadata=self._metadata)
        return list(await self._wait(name, call, lambda: list(call)))

    async def _method(self, kind: str, name: str, request: Any, answer: Any) -> Any:
        self._place = await self._calls.connected(self._place, CALL_TIMEOUT_S)
        return getattr(self._calls.link(self._place).channel, kind)(
            f"{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )

    async def _wait(self, name: str, call: Any, wait: Callable[[], Any]) -> Any:
        try:
            return await self._calls.wait(call, wait)
        except grpc.RpcError as error:
            self._place += 1
            code = getattr(error, "code", lambda: None)()
            raise UnknownOutcomeError(f"{name} broke: {code}") from error


class GrpcProducer:
    """Sends through a proxy; see `dledger.jepsen_like.workloads.through.Sender`."""

    def __init__(self, caller: _Caller, message_groups: Sequence[str]) -> None:
        self._caller = caller
        self._groups = message_groups

    async def send_to(self, queue: MessageQueue, message: Message) -> SendResult:
        """Send to a queue. Raises ClientError: it was refused, or what became of it is unknown."""
        (result,) = await self.send_batch([message], queue=queue)
        return result

    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None
    ) -> list[SendResult]:
        """Send messages of one queue together.

        Raises ClientError: they were refused, or what became of them is unknown.
        """
        assert queue is not None
        asked = pb.SendMessageRequest(
            messages=[self._wire(message, queue.queue_id) for message in messages]
        )
        answer = await self._caller.one(
            "SendMessage", asked, pb.SendMessageResponse, CALL_TIMEOUT_S
        )
        entries = answer.entries
        error = error_of_all([entry.status for entry in entries] or [answer.status])
        if error is not None:
            raise error
        return [
            SendResult(SendStatus.SEND_OK, entry.message_id, queue, entry.offset)
            for entry in entries
        ]

    async def recall(self, sent: str) -> object:
        """Refuse it: no message that is sent here has a time of its own.

        Raises MessageIllegalError: always.
        """
        raise MessageIllegalError("no message of this producer has a time of its own")

    def _wire(self, message: Message, queue_id: int) -> Any:
        body = bytes(message.body)
        system = pb.SystemProperties(
            message_id=f"chaos-{body[:8].hex()}",
            message_type=pb.FIFO,
            message_group=self._groups[queue_id],
            body_encoding=pb.IDENTITY,
        )
        if message.tags:
            system.tag = message.tags
        topic = pb.Resource(name=message.topic)
        return pb.Message(
            topic=topic,
            system_properties=system,
            user_properties=dict(message.properties or {}),
            body=body,
        )


class GrpcConsumer:
    """Receives through a proxy; see `dledger.jepsen_like.workloads.through.ReceivingConsumer`."""

    def __init__(self, caller: _Caller, group: str, topic: str, broker_name: str) -> None:
        self._caller = caller
        self.group = group
        self._topic = topic
        self._broker_name = broker_name

    async def receive(
        self, max_messages: int, invisible_s: float, wait_s: float
    ) -> list[HandedOut]:
        """Return messages, none after *wait_s*.

        Raises ClientError: it was refused, or whether messages are out is unknown.
        """
        asked = pb.ReceiveMessageRequest(
            group=pb.Resource(name=self.group),
            message_queue=pb.MessageQueue(
                topic=pb.Resource(name=self._topic), broker=pb.Broker(name=self._broker_name)
            ),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=max_messages,
            invisible_duration=duration(round(invisible_s * 1000)),
            long_polling_timeout=duration(round(wait_s * 1000)),
        )
        answers = await self._caller.several(
            "ReceiveMessage", asked, pb.ReceiveMessageResponse, wait_s + CALL_TIMEOUT_S
        )
        for answer in answers:
            if answer.HasField("status") and answer.status.code != pb.MESSAGE_NOT_FOUND:
                error = error_of(answer.status)
                if error is not None:
                    raise error
        return [self._handed_out(each.message) for each in answers if each.HasField("message")]

    def _handed_out(self, message: Any) -> HandedOut:
        system = message.system_properties
        queue = MessageQueue(self._topic, self._broker_name, system.queue_id)
        return HandedOut(message, queue, ReceiptHandle.decode(system.receipt_handle))

    async def ack(self, message: HandedOut) -> None:
        """Acknowledge a message.

        Raises ClientError: it was refused, or what became of it is unknown.
        """
        await self.ack_all([message])

    async def ack_all(self, messages: Sequence[HandedOut]) -> None:
        """Acknowledge messages with one request.

        Raises ClientError: all were refused, or what became of each is unknown.
        """
        entries = [pb.AckMessageEntry(receipt_handle=each.receipt.encode()) for each in messages]
        asked = pb.AckMessageRequest(
            group=pb.Resource(name=self.group), topic=pb.Resource(name=self._topic), entries=entries
        )
        answer = await self._caller.one("AckMessage", asked, pb.AckMessageResponse, CALL_TIMEOUT_S)
        error = error_of_all([entry.status for entry in answer.entries] or [answer.status])
        if error is not None:
            raise error

    async def change_invisible(self, message: HandedOut, invisible_s: float) -> None:
        """Give a message another time, and a new receipt.

        Raises ClientError: it was refused, or what became of it is unknown.
        """
        asked = pb.ChangeInvisibleDurationRequest(
            group=pb.Resource(name=self.group),
            topic=pb.Resource(name=self._topic),
            receipt_handle=message.receipt.encode(),
            invisible_duration=duration(round(invisible_s * 1000)),
        )
        answer = await self._caller.one(
            "ChangeInvisibleDuration", asked, pb.ChangeInvisibleDurationResponse, CALL_TIMEOUT_S
        )
        error = error_of(answer.status)
        if error is not None:
            raise error
        message.receipt = ReceiptHandle.decode(answer.receipt_handle)
