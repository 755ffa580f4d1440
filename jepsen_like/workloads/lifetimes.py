"""Clients that send messages with a time to live, pull them one by one, and receive them by POP."""

from __future__ import annotations

from typing import Final

from dledger.client.consumer.pop_calls import PopCalls
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, OffsetIllegalError
from dledger.client.core.message import Message
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.jepsen_like.history.operation import F, Operation, Outcome
from dledger.jepsen_like.workloads.producers import ATTEMPT_TIMEOUT_S, SEND_TIMEOUT_S
from dledger.jepsen_like.workloads.recorder import VALUE_BYTES, Recorder, value_of
from dledger.jepsen_like.workloads.through import Ends, Role, make_topic

OUTPUT_SUFFIX: Final = "-perishable"
"""Ends the name of the topic that these clients use."""
RECEIVERS: Final = "perishable-pop"
QUEUES: Final = 2
CLIENTS_FROM: Final = 700
"""Values are of other clients than those of producers."""
TTLS_MS: Final = (0, 0, 50, 500, 2_000, 8_000, 30_000)
"""Times to live; 0: none."""
SENDS, RECEIVES, BEGINS = 0.3, 0.5, 0.55
"""Where the shares end of what is done: sends, receives, pulls from the beginning; the rest goes on
where the last pull ended."""
WAIT_S: Final = 1.0
INVISIBLE_S: Final = 3.0


class Lifetimes(Role):
    """The clients of a run that send messages with a time to live."""

    field = "expirers"

    def __init__(self, clients: Recorder) -> None:
        super().__init__(clients)
        self.topic = clients.topic + OUTPUT_SUFFIX

    async def set_up(self, instance: ClientInstance) -> None:
        """Make the topic; return when clients know its queues."""
        await make_topic(self._clients, instance, self.topic, QUEUES)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be client *index* until it is over."""
        clients, rng = self._clients, self._clients.rng_of("perishable", index)
        config = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            retry_unknown=False,
            idempotent=False,
        )
        group = f"perishable-{index}"
        consumer, receiving = PullConsumer(instance, group), PopCalls(instance, RECEIVERS)
        process, offsets = clients.new_process(), dict.fromkeys(self._queues(), 0)
        async with Producer(instance, group, config) as producer:
            while await clients.pause(rng):
                queue, chance = rng.choice(list(offsets)), rng.random()
                with clients.acting():
                    if chance < SENDS:
                        op = clients.begin(process, F.PERISHABLE, queue)
                        op.value = clients.next_value(CLIENTS_FROM + index)
                        op.cnt = rng.choice(TTLS_MS)
                        await self._send(producer, queue, op)
                    elif chance < RECEIVES:
                        op = await self._receive(receiving, process)
                    else:
                        begin = 0 if chance < BEGINS else offsets[queue]
                        op = await self._pull(consumer, process, queue, begin)
                        offsets[queue] = op.max_off
                if op.outcome == Outcome.INFO:
                    process = clients.new_process()

    def _queues(self) -> list[MessageQueue]:
        broker = self._clients.queues[0].broker_name
        return [MessageQueue(self.topic, broker, number) for number in range(QUEUES)]

    async def _send(self, producer: Producer, queue: MessageQueue, op: Operation) -> None:
        self._clients.written(op)
        message = Message(self.topic, op.value.to_bytes(VALUE_BYTES, "big"), ttl_ms=op.cnt)
        with self._clients.attempt(op):
            op.off = (await producer.send_to(queue, message)).queue_offset

    async def _pull(
        self, consumer: PullConsumer, process: int, queue: MessageQueue, offset: int
    ) -> Operation:
        op = self._clients.begin(process, F.LIVING, queue)
        op.off = op.max_off = offset
        try:
            result = await consumer.pull(queue, offset, max_messages=1, timeout_s=WAIT_S)
        except OffsetIllegalError as error:
            self._clients.refused(op, "OffsetIllegalError")
            op.max_off = error.next_begin_offset
        except ClientError as error:
            self._clients.failed(op, error)
        else:
            op.max_off = result.next_begin_offset
            for message in result.messages:
                op.value = value_of(message.body)
            self._clients.end(op)
        return op

    async def _receive(self, receiving: PopCalls, process: int) -> Operation:
        op = self._clients.begin(process, F.LIVING, self._queues()[0])
        op.group = RECEIVERS
        try:
            messages = await receiving.pop(
                self.topic,
                self._clients.queues[0].broker_name,
                SubscriptionExpression(),
                max_messages=1,
                invisible_s=INVISIBLE_S,
                hold_s=WAIT_S,
            )
        except ClientError as error:
            self._clients.failed(op, error)
            return op
        for message in messages:
            if message.delivery_attempt == 1:
                op.value, op.queue = value_of(message.body), message.message_queue.queue_id
        self._clients.end(op)
        try:
            await receiving.ack_all(messages)
        except ClientError:
            pass  # it comes again
        return op

    async def drain(self, instance: ClientInstance, ends: Ends) -> None:
        """Pull everything that has not expired. Raises ClientError: A request was refused."""
        consumer, process = PullConsumer(instance, "perishable-drain"), self._clients.new_process()
        for queue in self._queues():
            offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
            while offset < end:
                op = await self._pull(consumer, process, queue, offset)
                if op.outcome != Outcome.OK or op.max_off <= offset:
                    raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
                offset = op.max_off
