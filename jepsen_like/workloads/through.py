"""What clients of a run are (`Role`), and what some act with: the SDK, or a proxy (`Through`).

`Producer` and `SimpleConsumer` of the SDK are a `Sender` and a `ReceivingConsumer`; so is what
speaks to a proxy. Errors are those of the SDK, so that one table of outcomes holds for all. A part
of a workload may have a topic for itself: it is made before its clients begin, and read last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, Protocol, TypeVar

from dledger.client.admin.admin import Admin
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, SendResult
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.workloads.recorder import Recorder, Seen
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


ASK_AGAIN_S: Final = 0.5
"""After so long a client asks again where there was no leader, or not yet the topic."""


async def make_topic(
    clients: Recorder, instance: ClientInstance, topic: str, queue_nums: int
) -> None:
    """Make a topic; return when clients know its queues. Cancellation: It may have been made."""
    while True:
        try:
            await Admin(instance).create_topic(topic, queue_nums=queue_nums)
            if (await instance.route(topic, fresh=True)).publish_queues:
                return
        except MQError:
            pass  # the cluster is still finding its leader
        await clients.sleep(ASK_AGAIN_S)


MESSAGES: Final = 32
"""Of one pull: as many as a broker gives at most unless it is set otherwise."""


async def read_queue(
    consumer: PullConsumer, queue: MessageQueue, found: Callable[[MessageExt], object]
) -> int:
    """Call *found* with each message in order; return the queue's first offset.

    Raises:
        ClientError: A request was refused, or a pull got no further.
    Cancellation: *found* has been called with some.
    """
    begin, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
    offset = begin
    while offset < end:
        result = await consumer.pull(queue, offset, max_messages=MESSAGES, timeout_s=0)
        if result.next_begin_offset <= offset:
            raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
        for message in result.messages:
            found(message)
        offset = result.next_begin_offset
    return begin


Ends = dict[MessageQueue, tuple[int, int]]
"""First and last offset of the queues of the workload, when all is over."""


class Role:
    """All clients of one kind; *clients*: what those of a run share.

    *field*: of a workload: how many of them there are.
    """

    field: ClassVar[str]

    def __init__(self, clients: Recorder) -> None:
        self._clients = clients

    @property
    def count(self) -> int:
        """How many act, each by its number."""
        return int(getattr(self._clients.plan.workload, self.field))

    async def set_up(self, instance: ClientInstance) -> None:
        """Make what they need; return when it is there. None of them acts yet."""

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be client *index* until the run is over."""
        raise NotImplementedError

    async def drain(self, instance: ClientInstance, ends: Ends) -> None:
        """Read what they have left; the cluster serves, and none of them acts any more.

        Raises ClientError: a request was refused.
        """
