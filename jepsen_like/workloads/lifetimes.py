"""Clients of messages with a time to live: each sends some, and reads what is there of all.

Some messages have no such time: they are passed over by no read. Some are delayed, some sent in a
transaction; each has a tag. Reads go by tag, by SQL92 or by neither, and some wait. Messages that
are read are given back now and then, or up; copies of these are read, too. Half of the clients also
receive by POP, those with an odd number in order, and leave some messages unacknowledged. When the
run is over all is read, whether it has expired or not, and what can be received is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from dledger.client.consumer.pop_calls import PopCalls, ReceivedMessage
from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError, NoRouteError, OffsetIllegalError
from dledger.client.core.hooks import LocalTransactionState
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt, PullResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer.config import ProducerConfig
from dledger.client.producer.producer import Producer
from dledger.client.producer.transaction import HalfMessage
from dledger.client.producer.transaction_producer import (
    TransactionProducer,
    TransactionProducerConfig,
)
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.checkers.lifetimes import Read, Sent
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from dledger.jepsen_like.workloads.output_topic import make_topic
from dledger.jepsen_like.workloads.producers import ATTEMPT_TIMEOUT_S, SEND_TIMEOUT_S
from dledger.jepsen_like.workloads.recorder import VALUE_BYTES, Recorder, value_of
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import ConsumerSendMsgBackHeader

OUTPUT_SUFFIX: Final = "-perishable"
"""Ends the name of the topic that these clients use."""
QUEUES: Final = 2
CLIENTS_FROM: Final = 700
"""Values are of other clients than those of producers."""
TTLS_MS: Final = (0, 0, 50, 500, 2_000, 8_000, 30_000)
"""Times to live; 0: none."""
TAGS: Final = 2
BY_TAG, BY_SQL = 0.2, 0.35
"""Where the shares of reads end that ask for one tag, and for one by SQL92."""
SENDS, RECEIVES, COPIES = 0.45, 0.65, 0.7
"""Where the shares end of what is done: sends, receives, reads of copies; the rest reads."""
DELAYED, COMMITTED = 0.15, 0.3
"""Where the shares of sends end that are delayed, and in a transaction."""
DELAYS_MS: Final = (500, 1_500, 4_000)
LOCAL_S: Final = (0.0, 0.2, 1.0)
"""How long local parts take."""
ROLLED_BACK: Final = 0.3
AGAIN: Final = 0.3
"""Share of the reads that go back; others go on where the last one ended."""
BACK: Final = 40
MESSAGES: Final = 16
WAIT_S: Final = 1.0
GIVES_BACK, GIVES_UP = 0.1, 0.2
"""Where the shares of reads end of which a message is given back, and up."""
INVISIBLE_S: Final = 3.0
ACKED: Final = 0.8
RECEIVED: Final = 4
RETRY_PREFIX, DEAD_PREFIX = "%RETRY%", "%DLQ%"
RECEIVERS: Final = "perishable-pop"
IN_ORDER_SUFFIX: Final = "-in-order"
DRAIN_TRIES: Final = 400
"""Receives of the last client of a group; with more than that nothing is demanded."""


class Lifetimes:
    """The clients of a run that send messages with a time to live."""

    def __init__(self, clients: Recorder) -> None:
        self._clients = clients
        self.topic = clients.topic + OUTPUT_SUFFIX
        self._groups: dict[str, None] = {}

    async def make_topic(self, instance: ClientInstance) -> None:
        """Make the topic; return when clients know its queues."""
        await make_topic(self._clients, instance, self.topic, QUEUES)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be client *index* until it is over."""
        client = _Client(self._clients, self.topic, instance, index)
        config = ProducerConfig(
            send_timeout_s=SEND_TIMEOUT_S,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            retry_unknown=False,
            idempotent=False,
            compress_over_bytes=None,
        )
        halves = TransactionProducerConfig(
            producer=config, end_timeout_s=SEND_TIMEOUT_S, retry_end=False
        )
        group = f"perishable-{index}"
        self._groups[group] = None
        async with (
            Producer(instance, group, config) as producer,
            TransactionProducer(instance, f"{group}-halves", _ask, halves) as transactions,
            PullConsumer(instance, group) as consumer,
        ):
            await client.act(producer, transactions, consumer)

    async def drain(self, instance: ClientInstance) -> None:
        """Read everything, whether it has expired or not; then receive what can be.

        Raises:
            ClientError: A request was refused.
        """
        clients, topic = self._clients, self.topic
        last = _Client(clients, topic, instance, 0)
        consumer = PullConsumer(instance, "perishable-drain")
        groups = [RECEIVERS, RECEIVERS + IN_ORDER_SUFFIX]
        begins, ends = await last.read_all(consumer, topic)
        is_received = [await last.receive_all(group, ends) for group in groups]
        copies = [
            prefix + group for prefix in (RETRY_PREFIX, DEAD_PREFIX) for group in self._groups
        ]
        for name in [*copies, *(DEAD_PREFIX + group for group in groups)]:
            try:
                await last.read_copies(consumer, name)
            except NoRouteError:
                continue  # nothing ever went there
        for group, is_whole in zip(groups, is_received, strict=True):
            op = clients.begin(last.process, F.LIVING, MessageQueue(topic, "", 0))
            op.status, op.group = Read.RECEIVED, group
            op.cnt = int(is_whole and not any(begins.values()))
            clients.end(op)


async def _ask(message: MessageExt) -> LocalTransactionState:
    """A local part that is not known is not decided, and given up in the end."""
    del message
    await trio.lowlevel.checkpoint()
    return LocalTransactionState.UNKNOWN


_ALL: Final = SubscriptionExpression()


class _Client:
    """One client, with what it knows.

    Attributes:
        process: Its number in the history.
    """

    def __init__(self, clients: Recorder, topic: str, instance: ClientInstance, index: int) -> None:
        self._clients = clients
        self._topic = topic
        self._instance = instance
        self._index = index
        self._rng = clients.rng_of("perishable", index)
        self._offsets: dict[MessageQueue, int] = {}
        self.process = clients.new_process()

    async def act(
        self, producer: Producer, transactions: TransactionProducer, consumer: PullConsumer
    ) -> None:
        """Do one thing after the other until it is over."""
        clients, rng = self._clients, self._rng
        group = RECEIVERS + IN_ORDER_SUFFIX if self._index % 2 else RECEIVERS
        receiving = PopCalls(self._instance, group)
        while await clients.pause(rng):
            queue = self._queue(self._topic, rng.randrange(QUEUES))
            chance = rng.random()
            with clients.acting():
                if chance < SENDS:
                    op = await self._send(producer, transactions, queue)
                elif chance < RECEIVES:
                    op = await self._receive(receiving, group, WAIT_S, ACKED)
                else:
                    if chance < COPIES:
                        prefix = RETRY_PREFIX if rng.random() < 0.5 else DEAD_PREFIX
                        queue = self._queue(prefix + consumer.group, 0)
                    op = await self._read_on(consumer, queue)
            if op.outcome == Outcome.INFO:
                self.process = clients.new_process()

    def _queue(self, topic: str, number: int) -> MessageQueue:
        return MessageQueue(topic, self._clients.queues[0].broker_name, number)

    # -- sends -----------------------------------------------------------------------------

    async def _send(
        self, producer: Producer, transactions: TransactionProducer, queue: MessageQueue
    ) -> Operation:
        clients, rng = self._clients, self._rng
        op = clients.begin(self.process, F.PERISHABLE, queue)
        op.value, op.cnt = clients.next_value(CLIENTS_FROM + self._index), rng.choice(TTLS_MS)
        op.min_off, op.status = rng.randrange(TAGS), Sent.PLAIN
        message = Message(
            self._topic,
            op.value.to_bytes(VALUE_BYTES, "big"),
            tags=f"t{op.min_off}",
            properties={"lane": str(op.min_off)},
            ttl_ms=op.cnt,
        )
        chance = rng.random()
        if chance < DELAYED:
            op.status, message.delay_ms = Sent.DELAYED, rng.choice(DELAYS_MS)
            op.due_ns = op.call_ns + message.delay_ms * 1_000_000
        elif chance < COMMITTED:
            op.status = Sent.COMMITTED
        clients.written(op)
        try:
            if op.status == Sent.COMMITTED:
                await self._transact(transactions, queue, message, op)
                return op
            result = await producer.send_to(queue, message)
        except ClientError as error:
            clients.failed(op, error)
        else:
            op.off = NOTHING if message.is_delayed else result.queue_offset
            clients.end(op)
        return op

    async def _transact(
        self,
        transactions: TransactionProducer,
        queue: MessageQueue,
        message: Message,
        op: Operation,
    ) -> None:
        """Send *message*, and commit or roll back after a while.

        Raises:
            ClientError: The half message is not stored, or that is unknown.
        """
        clients, rng = self._clients, self._rng
        state = LocalTransactionState.COMMIT
        if rng.random() < ROLLED_BACK:
            state = LocalTransactionState.ROLLBACK
        local_s = rng.choice(LOCAL_S)

        async def local(_: HalfMessage) -> LocalTransactionState:
            await clients.sleep(local_s)
            op.due_ns = clients.now_ns
            clients.written(op)
            return state

        result = await transactions.send_in_transaction(message, local, queue=queue)
        if not result.is_confirmed:
            clients.unknown(op, "NotConfirmed")
        elif state is LocalTransactionState.ROLLBACK:
            clients.refused(op, "RolledBack")
        else:
            clients.end(op)

    # -- reads -----------------------------------------------------------------------------

    async def _read_on(self, consumer: PullConsumer, queue: MessageQueue) -> Operation:
        rng = self._rng
        begin = self._offsets.get(queue, 0)
        if rng.random() < AGAIN:
            begin = max(0, begin - rng.randrange(BACK))
        tag, wanted = rng.randrange(TAGS), _ALL
        chance = rng.random()
        if queue.topic != self._topic or chance >= BY_SQL:
            tag = NOTHING
        elif chance < BY_TAG:
            wanted = SubscriptionExpression.by_tag(f"t{tag}")
        else:
            wanted = SubscriptionExpression.by_sql(f"lane = '{tag}'")
        wait_s = WAIT_S if rng.random() < 0.5 else 0.0
        op, messages = await self.read(consumer, queue, begin, (tag, wanted), wait_s)
        self._offsets[queue] = max(begin, op.max_off)
        chance = rng.random()
        if messages and queue.topic == self._topic and chance < GIVES_UP:
            level = 1 if chance < GIVES_BACK else -1
            await self._give_back(consumer.group, messages[0], level)
        return op

    async def read(
        self,
        consumer: PullConsumer,
        queue: MessageQueue,
        offset: int,
        wanted: tuple[int, SubscriptionExpression],
        wait_s: float,
    ) -> tuple[Operation, Sequence[MessageExt]]:
        """Read what has not expired once, a row for each message."""
        clients = self._clients
        op = clients.begin(self.process, F.LIVING, queue)
        op.off = op.max_off = offset
        op.status, op.min_off = Read.LIVING, wanted[0]
        try:
            result = await consumer.pull(
                queue, offset, max_messages=MESSAGES, tags=wanted[1], timeout_s=wait_s
            )
        except OffsetIllegalError as error:
            clients.refused(op, "OffsetIllegalError")
            op.max_off = error.next_begin_offset
        except ClientError as error:
            clients.failed(op, error)
        else:
            self._found(op, queue, result)
            return op, result.messages
        return op, ()

    def _found(self, op: Operation, queue: MessageQueue, result: PullResult) -> None:
        """Complete the row of a read, and leave one for each message."""
        op.max_off = result.next_begin_offset
        self._clients.end(op)
        for message in result.messages:
            self._row(op, queue, message)

    def _row(self, op: Operation, queue: MessageQueue, message: MessageExt) -> Operation:
        one = self._clients.begin(op.process, F.LIVING, queue)
        one.off, one.value = message.queue_offset, value_of(message.body)
        one.status, one.txn = Read.MESSAGE, op.op_id
        if isinstance(message, ReceivedMessage):
            one.cnt = message.delivery_attempt
        self._clients.end(one)
        return one

    async def _give_back(self, group: str, message: MessageExt, level: int) -> None:
        """Give a message back, or with *level* -1 up; it leaves no row."""
        header = ConsumerSendMsgBackHeader(message.phy_offset, group, level)
        try:
            await self._instance.ask_leader(
                self._clients.queues[0].broker_name,
                RequestCode.CONSUMER_SEND_MSG_BACK,
                dict(header.encode()),
                topic=self._topic,
                timeout_s=ATTEMPT_TIMEOUT_S,
            )
        except MQError:
            pass  # the cluster is in trouble: that is the point

    # -- receives --------------------------------------------------------------------------

    async def _receive(
        self, receiving: PopCalls, group: str, wait_s: float, acked: float
    ) -> Operation:
        """Receive once and acknowledge a share *acked* of it."""
        clients, rng = self._clients, self._rng
        op = clients.begin(self.process, F.LIVING, self._queue(self._topic, 0))
        op.status, op.group = Read.RECEIVED, group
        try:
            messages = await receiving.pop(
                self._topic,
                self._clients.queues[0].broker_name,
                _ALL,
                max_messages=RECEIVED,
                invisible_s=INVISIBLE_S,
                hold_s=wait_s,
                in_order=group.endswith(IN_ORDER_SUFFIX),
            )
        except ClientError as error:
            clients.failed(op, error)
            return op
        clients.end(op)
        for message in messages:
            self._row(op, message.message_queue, message)
        kept = [message for message in messages if rng.random() < acked]
        if kept:
            try:
                await receiving.ack_all(kept)
            except ClientError:
                pass  # they come again
        return op

    # -- the end ---------------------------------------------------------------------------

    async def read_all(
        self, consumer: PullConsumer, topic: str
    ) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]]:
        """Read a topic, whether it has expired or not; return begin and end of its queues.

        Raises:
            NoRouteError: There is no such topic.
            ClientError: A request was refused.
        """
        clients = self._clients
        begins: dict[MessageQueue, int] = {}
        ends: dict[MessageQueue, int] = {}
        for each in await consumer.fetch_message_queues(topic):
            queue = self._queue(topic, each.queue_id)
            begins[queue] = begin = offset = await consumer.min_offset(queue)
            ends[queue] = end = await consumer.max_offset(queue)
            while offset < end:
                op = clients.begin(self.process, F.LIVING, queue)
                op.off, op.status, op.cnt = offset, Read.ALL, int(begin == 0)
                result = await consumer.pull(
                    queue, offset, max_messages=MESSAGES, timeout_s=0, with_expired=True
                )
                if result.next_begin_offset <= offset:
                    raise ClientError(f"{queue}: the drain stands at {offset} of {end}")
                self._found(op, queue, result)
                offset = result.next_begin_offset
        return begins, ends

    async def read_copies(self, consumer: PullConsumer, topic: str) -> None:
        """Read a topic of copies twice: everything, and what has not expired.

        Raises:
            NoRouteError: There is no such topic.
            ClientError: A request was refused.
        """
        begins, ends = await self.read_all(consumer, topic)
        for queue, offset in begins.items():
            while offset < ends[queue]:
                op, _ = await self.read(consumer, queue, offset, (NOTHING, _ALL), 0.0)
                if op.max_off <= offset:
                    raise ClientError(f"{queue}: the drain stands at {offset} of {ends[queue]}")
                offset = op.max_off

    async def receive_all(self, group: str, ends: dict[MessageQueue, int]) -> bool:
        """Receive and acknowledge until the group stands at *ends*; tell whether it does.

        Raises:
            ClientError: A request was refused.
        """
        reader, receiving = PullConsumer(self._instance, group), PopCalls(self._instance, group)
        for _ in range(DRAIN_TRIES):
            stands = [await reader.committed_offset(queue) or 0 for queue in ends]
            if all(at >= end for at, end in zip(stands, ends.values(), strict=True)):
                return True
            op = await self._receive(receiving, group, WAIT_S, 1.0)
            if op.outcome == Outcome.INFO:
                self.process = self._clients.new_process()
        return False
