"""What producers and receivers of a workload act with: the SDK, or a proxy (`Through`).

`Producer` and `SimpleConsumer` of the SDK are a `Sender` and a `ReceivingConsumer`; so is what
speaks to a proxy. Errors are those of the SDK, so that one table of outcomes holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from dledger.client.core.message import Message
from dledger.client.core.message_ext import SendResult
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.workloads.recorder import Seen
from dledger.remoting.protocol.pop_requests import ReceiptHandle


class Sender(Protocol):
    """Sends messages to queues; see `dledger.client.producer.producer.Producer`."""

    async def send_to(self, queue: MessageQueue, message: Message) -> SendResult:
        """Send to a queue. Raises ClientError: as `Producer.send_to`."""

    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None
    ) -> Iterable[SendResult]:
        """Send messages of one queue together. Raises ClientError: as `Producer.send_batch`."""

    async def recall(self, sent: str) -> object:
        """Take a message with a time of its own back. Raises ClientError: as `Producer.recall`."""


class Received(Seen, Protocol):
    """A message that a receiver has for a time: a `ReceivedMessage`."""

    receipt: ReceiptHandle
    message_queue: MessageQueue

    @property
    def queue_id(self) -> int:
        """Its queue."""

    @property
    def queue_offset(self) -> int:
        """Its place there."""

    @property
    def delivery_attempt(self) -> int:
        """How often it was handed out, this time included."""


ReceivedT = TypeVar("ReceivedT", bound=Received)


class ReceivingConsumer(Protocol[ReceivedT]):
    """Receives messages one by one; see `client.consumer.simple_consumer.SimpleConsumer`."""

    @property
    def group(self) -> str:
        """Its consumer group."""

    async def receive(
        self, max_messages: int, invisible_s: float, wait_s: float
    ) -> Sequence[ReceivedT]:
        """Return messages, none after *wait_s*. Raises ClientError: as `SimpleConsumer.receive`."""

    async def ack(self, message: ReceivedT) -> None:
        """Acknowledge a message. Raises ClientError: as `SimpleConsumer.ack`."""

    async def ack_all(self, messages: Sequence[ReceivedT]) -> None:
        """Acknowledge messages with one request.

        Raises ClientError: as `SimpleConsumer.ack_all`.
        """

    async def change_invisible(self, message: ReceivedT, invisible_s: float) -> None:
        """Give a message another time, and a new receipt.

        Raises ClientError: as `SimpleConsumer.change_invisible`.
        """


class Through(Protocol):
    """What clients that use no SDK go through."""

    def producer(self, index: int) -> AbstractAsyncContextManager[Sender]:
        """Return what producer *index* sends with."""

    def consumer(
        self, index: int, group: str, topic: str, broker_name: str
    ) -> ReceivingConsumer[Any]:
        """Return what receiver *index* receives with, of the queues of a broker group."""
