"""What tests of consumers share: a listener that remembers, and messages to consume."""

from collections.abc import Callable, Sequence

import trio

from dledger.client.consumer.listener import ConsumeContext, ConsumeStatus, DeliveredMessage
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from tests.unit.client.fake_cluster import Group

QUEUE = MessageQueue("T", "g", 0)


class Heard:
    """An async listener that keeps what it received and does what it is configured to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.messages: list[DeliveredMessage] = []
        self.contexts: list[ConsumeContext] = []
        self.batches: list[int] = []
        self.at: list[float] = []
        self.running = 0
        self.most_running = 0
        self.delay_s = 0.0
        self._heard = trio.Event()
        self.answer: Callable[[DeliveredMessage, ConsumeContext], ConsumeStatus | None] = (
            lambda _message, _context: None
        )

    async def __call__(
        self, messages: Sequence[DeliveredMessage], context: ConsumeContext
    ) -> ConsumeStatus | None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.batches.append(len(messages))
            self.contexts.append(context)
            self.at += [trio.current_time()] * len(messages)
            self.messages += messages
            self.bodies += [message.body_bytes for message in messages]
            self._heard.set()
            self._heard = trio.Event()
            if self.delay_s:
                await trio.sleep(self.delay_s)
            return self.answer(messages[0], context)
        finally:
            self.running -= 1

    async def wait_for(self, count: int, within_s: float = 100.0) -> None:
        """Wait until *count* messages were received."""
        with trio.fail_after(within_s):
            while len(self.bodies) < count:
                await self._heard.wait()
                await trio.sleep(0.01)


async def send(producer: Producer, count: int, *, queues: int = 4, first: int = 0) -> list[bytes]:
    """Send numbered messages over the queues of T, in turn; return their bodies."""
    bodies = []
    for number in range(first, first + count):
        queue = MessageQueue("T", "g", number % queues)
        bodies.append(b"%d" % number)
        await producer.send_to(queue, Message("T", bodies[-1]))
    return bodies


def owned(*consumers: PushConsumer, topic: str = "T") -> list[list[int]]:
    """Return the queue ids of *topic* that each consumer owns."""
    return [sorted(q.queue_id for q in c.queues if q.topic == topic) for c in consumers]


async def settled(
    *consumers: PushConsumer, count: int = 4, within_s: float = 3.0, topic: str = "T"
) -> float:
    """Wait until all queues are owned, each by one consumer; return how long that took."""
    began = trio.current_time()
    with trio.fail_after(within_s):
        while True:
            parts = owned(*consumers, topic=topic)
            if all(parts) and sorted(q for part in parts for q in part) == list(range(count)):
                return trio.current_time() - began
            await trio.sleep(0.01)


def committed(group: Group, name: str = "c") -> dict[int, int]:
    """Return what consumer group *name* has committed of T."""
    return {q: at for (g, topic, q), at in group.committed.items() if (g, topic) == (name, "T")}
