"""Clients of messages with a time to live: each sends some, and reads what is there of all.

Some messages have no such time: they are passed over by no read. When the run is over all is read,
whether it has expired or not.
"""

from __future__ import annotations

from typing import Final

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.errors import ClientError, OffsetIllegalError
from client.core.message import Message
from client.core.message_ext import PullResult
from client.core.route import MessageQueue
from client.producer.config import ProducerConfig
from client.producer.producer import Producer
from jepsen_like.checkers.lifetimes import Read
from jepsen_like.history.operation import F, Operation, Outcome
from jepsen_like.seeded_rng import SimRng
from jepsen_like.workloads.output_topic import make_topic
from jepsen_like.workloads.producers import ATTEMPT_TIMEOUT_S, SEND_TIMEOUT_S
from jepsen_like.workloads.recorder import VALUE_BYTES, Recorder, value_of

OUTPUT_SUFFIX: Final = "-perishable"
"""Ends the name of the topic that these clients use."""
QUEUES: Final = 2
CLIENTS_FROM: Final = 700
"""Values are of other clients than those of producers."""
LIVES_MS: Final = (0, 0, 50, 500, 2_000, 8_000, 30_000)
"""Times to live; 0: none."""
SENDS: Final = 0.5
AGAIN: Final = 0.3
"""Share of the reads that go back; others go on where the last one ended."""
BACK: Final = 40
MESSAGES: Final = 16
WAIT_S: Final = 1.0


class Lifetimes:
    """The clients of a run that send messages with a time to live."""

    def __init__(self, clients: Recorder) -> None:
        self._clients = clients
        self.topic = clients.topic + OUTPUT_SUFFIX

    async def make_topic(self, instance: ClientInstance) -> None:
        """Make the topic; return when clients know its queues."""
        await make_topic(self._clients, instance, self.topic, QUEUES)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be client *index* until it is over."""
        clients, rng = self._clients, self._clients.rng_of("perishable", index)
        process, offsets = clients.new_process(), [0] * QUEUES
        config = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            retry_unknown=False,
            idempotent=False,
            compress_over_bytes=None,
        )
        async with (
            Producer(instance, f"perishable-{index}", config) as producer,
            PullConsumer(instance, f"perishable-{index}") as consumer,
        ):
            while await clients.pause(rng):
                number = rng.randrange(QUEUES)
                queue = MessageQueue(self.topic, clients.queues[0].broker_name, number)
                with clients.acting():
                    if rng.random() < SENDS:
                        op = await self._send(producer, process, queue, index, rng)
                    else:
                        begin = offsets[number]
                        if rng.random() < AGAIN:
                            begin = max(0, begin - rng.randrange(BACK))
                        op = await self._read(consumer, process, queue, begin, rng)
                        offsets[number] = max(begin, op.max_off)
                if op.outcome == Outcome.INFO:
                    process = clients.new_process()

    async def _send(
        self, producer: Producer, process: int, queue: MessageQueue, index: int, rng: SimRng
    ) -> Operation:
        clients = self._clients
        op = clients.begin(process, F.PERISHABLE, queue)
        op.value, op.cnt = clients.next_value(CLIENTS_FROM + index), rng.choice(LIVES_MS)
        body = op.value.to_bytes(VALUE_BYTES, "big")
        clients.written(op)
        try:
            result = await producer.send_to(queue, Message(self.topic, body, ttl_ms=op.cnt))
        except ClientError as error:
            clients.failed(op, error)
        else:
            op.off = result.queue_offset
            clients.end(op)
        return op

    async def _read(
        self, consumer: PullConsumer, process: int, queue: MessageQueue, offset: int, rng: SimRng
    ) -> Operation:
        clients = self._clients
        op = clients.begin(process, F.LIVING, queue)
        op.off = op.max_off = offset
        op.status = Read.LIVING
        wait_s = WAIT_S if rng.random() < 0.5 else 0.0
        try:
            result = await consumer.pull(queue, offset, max_messages=MESSAGES, timeout_s=wait_s)
        except OffsetIllegalError as error:
            clients.refused(op, "OffsetIllegalError")
            op.max_off = error.next_begin_offset
        except ClientError as error:
            clients.failed(op, error)
        else:
            self._found(op, queue, result)
        return op

    def _found(self, op: Operation, queue: MessageQueue, result: PullResult) -> None:
        """Complete the row of a read, and leave one for each message."""
        clients = self._clients
        op.max_off = result.next_begin_offset
        clients.end(op)
        for message in result.messages:
            one = clients.begin(op.process, F.LIVING, queue)
            one.off, one.value = message.queue_offset, value_of(message.body)
            one.status, one.txn = Read.MESSAGE, op.op_id
            clients.end(one)

    async def drain(self, instance: ClientInstance) -> None:
        """Read everything, whether it has expired or not.

        Raises:
            ClientError: A request was refused.
        """
        clients, process = self._clients, self._clients.new_process()
        consumer = PullConsumer(instance, "perishable-drain")
        for number in range(QUEUES):
            queue = MessageQueue(self.topic, clients.queues[0].broker_name, number)
            begin = offset = await consumer.min_offset(queue)
            end = await consumer.max_offset(queue)
            while offset < end:
                op = clients.begin(process, F.LIVING, queue)
                op.off, op.status, op.cnt = offset, Read.ALL, int(begin == 0)
                result = await consumer.pull(
                    queue, offset, max_messages=MESSAGES, timeout_s=0, with_expired=True
                )
                if result.next_begin_offset <= offset:
                    raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
                self._found(op, queue, result)
                offset = result.next_begin_offset
