"""What receivers do: receive, acknowledge, forget, ask for more time, and use receipts again.

Those with an even number are of one group, the others of a group that receives in order. A receipt
that is used again must be refused. Some messages are acknowledged together, with others of the same
answer between them that are not. What is forgotten each time goes to the dead letters, which are
read from brokers in the end.

Where they share, all of the first group on one machine use one consumer, and so one request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, Final

import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.simple_consumer import SimpleConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    ClientError,
    NoRouteError,
    ReceiptStaleError,
    UnknownOutcomeError,
)
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import MQError
from dledger.jepsen_like.checkers.pop import IN_ORDER_SUFFIX
from dledger.jepsen_like.checkers.retries import DEAD_PREFIX
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.workloads.recorder import Recorder, value_of
from dledger.jepsen_like.workloads.through import (
    Ends,
    Received,
    ReceivingConsumer,
    Role,
    Through,
    read_queue,
)
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.remoting.protocol.codes import RequestCode, ResponseCode
from dledger.remoting.protocol.pop_requests import ReceiptHandle

GROUP: Final = "receivers"
INVISIBLE_S: Final = (2.0, 12.0)
"""How long messages are out: drawn between these."""
SHARED_INVISIBLE_S: Final = (2.0, 6.0)
"""Likewise, of those that share a consumer, one of these: only equal ones go together."""
MAX_MESSAGES: Final = 4
WAIT_S: Final = 2.0
USED_RECEIPTS: Final = 16
ACK, CHANGE, FORGET = 0.65, 0.80, 0.92
"""Where the shares of what is done with a message end; the rest uses an old receipt."""
OLD_AGAIN, NEW_AGAIN = 0.4, 0.7
"""Where the shares end of what is used at once when a message got a new receipt: the old one, the
new one; the rest uses none."""
TOGETHER: Final = 0.3
"""Share of answers whose first, third, ... message is acknowledged with one request."""
RETRIES: Final = 2
"""How often a message is handed out after its first time, before it is given up."""
SET_UP_S: Final = 5.0
ASK_AGAIN_S: Final = 0.5
DRAIN_S: Final = 2.0
"""Invisible time of the last receives, which acknowledge everything."""
DRAINERS: Final = 4
"""How many receive the rest at the same time: one alone gets 600 messages a second."""


class Receivers(Role):
    """The receivers of a run; *through*: what they go through, None: the SDK."""

    field = "receivers"

    def __init__(self, clients: Recorder, through: Through | None) -> None:
        super().__init__(clients)
        self._through = through
        self._shared: tuple[ClientInstance, ReceivingConsumer[Any]] | None = None

    async def set_up(self, instance: ClientInstance) -> None:
        """Let the groups give messages up after a few times; return when that is stored."""
        for group in (GROUP, GROUP + IN_ORDER_SUFFIX):
            config = SubscriptionGroupConfig(
                group,
                retry_max_times=RETRIES,
                # A proxy asks the group's settings whether it receives in order.
                consume_message_orderly=self._through is not None and group != GROUP,
            )
            while True:
                try:
                    answer = await instance.ask_leader(
                        self._clients.queues[0].broker_name,
                        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
                        {},
                        config.encode(),
                        topic=self._clients.topic,
                        timeout_s=SET_UP_S,
                    )
                    if answer.code == ResponseCode.SUCCESS:
                        break
                except MQError:
                    pass  # the cluster is still finding its leader
                await self._clients.sleep(ASK_AGAIN_S)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be receiver *index* until it is over."""
        clients, rng = self._clients, rng_stream(self._clients.plan.seed, "receiver", index)
        consumer = self._consumer_of(instance, index)
        used: deque[Received] = deque(maxlen=USED_RECEIPTS)
        process = clients.new_process()
        while await clients.pause(rng):
            with clients.acting():
                process = await self._round(consumer, process, used, rng)

    def _consumer_of(self, instance: ClientInstance, index: int) -> ReceivingConsumer[Any]:
        in_order = bool(index % 2)
        if self._through is not None:
            group = GROUP + IN_ORDER_SUFFIX if in_order else GROUP
            broker_name = self._clients.queues[0].broker_name
            return self._through.consumer(index, group, self._clients.topic, broker_name)
        if in_order or not self._clients.plan.workload.shared_receivers:
            return self._consumer(instance, in_order=in_order)
        if self._shared is None or self._shared[0] is not instance:
            self._shared = (instance, self._consumer(instance, in_order=False))
        return self._shared[1]

    def _consumer(self, instance: ClientInstance, *, in_order: bool) -> SimpleConsumer:
        # Not opened: receivers of one instance are of one group, which it has once.
        group = GROUP + IN_ORDER_SUFFIX if in_order else GROUP
        return SimpleConsumer(instance, group, {self._clients.topic: "*"}, in_order=in_order)

    async def _round(
        self, consumer: ReceivingConsumer[Any], process: int, used: deque[Received], rng: SimRng
    ) -> int:
        """Receive once and deal with what came; return the process that goes on."""
        low, high = INVISIBLE_S
        invisible_s = round(low + (high - low) * rng.random(), 1)
        if self._shared is not None and consumer is self._shared[1]:
            invisible_s = SHARED_INVISIBLE_S[invisible_s > (low + high) / 2]
        wait_s = WAIT_S if rng.random() < 0.5 else 0.0
        messages = await self._receive(
            consumer, process, 1 + rng.randrange(MAX_MESSAGES), invisible_s, wait_s
        )
        if messages is None:
            return self._clients.new_process()
        if len(messages) > 2 and rng.random() < TOGETHER:
            process = await self._ack_together(consumer, process, messages[::2])
            used.extend(messages[::2])
            messages = messages[1::2]
        for message in messages:
            chance = rng.random()
            if chance < ACK:
                op = await self._ack(consumer, process, message)
            elif chance < CHANGE:
                before = copy(message)
                op = await self._change(consumer, process, message, low * (1 + rng.randrange(4)))
                if op.outcome == Outcome.OK:
                    chance = rng.random()
                    used.append(before)
                    if chance < NEW_AGAIN:
                        again = before if chance < OLD_AGAIN else message
                        op = await self._ack(consumer, process, again)
            elif chance >= FORGET and used:
                op = await self._ack(consumer, process, used[rng.randrange(len(used))])
            else:
                continue
            used.append(message)
            if op.outcome == Outcome.INFO:
                process = self._clients.new_process()
        return process

    async def _receive(
        self,
        consumer: ReceivingConsumer[Any],
        process: int,
        count: int,
        invisible_s: float,
        wait_s: float,
    ) -> Sequence[Received] | None:
        """Receive once, a row for each message; None: it is not known what was handed out."""
        clients = self._clients
        op = clients.begin(process, F.RECEIVE, clients.queues[0])
        op.group, op.status, op.off = consumer.group, round(invisible_s * 1000), NOTHING
        called_ns = op.call_ns
        try:
            messages = await consumer.receive(count, invisible_s, wait_s)
        except ClientError as error:
            clients.failed(op, error)
            return None if op.outcome == Outcome.INFO else []
        if not messages:
            clients.refused(op, "NothingThere")
            return []
        for place, message in enumerate(messages):
            if place:
                op = clients.begin(process, F.RECEIVE, message.message_queue)
                op.group, op.status, op.call_ns = (
                    consumer.group,
                    round(invisible_s * 1000),
                    called_ns,
                )
            op.topic, op.queue = message.message_queue.topic, message.queue_id
            op.off, op.cnt = message.queue_offset, message.delivery_attempt
            op.txn = _number(message.receipt)
            op.value = clients.seen(op, message)
            clients.end(op)
        return messages

    async def _ack(
        self, consumer: ReceivingConsumer[Any], process: int, message: Received
    ) -> Operation:
        op = self._begin(consumer, process, F.ACK, message)
        with self._clients.attempt(op):
            await consumer.ack(message)
        return op

    async def _ack_together(
        self, consumer: ReceivingConsumer[Any], process: int, messages: Sequence[Received]
    ) -> int:
        """Acknowledge with one request, a row for each message; return the process that goes on."""
        ops = [self._begin(consumer, process, F.ACK, message) for message in messages]
        with self._clients.attempt(*ops):
            try:
                await consumer.ack_all(messages)
            except ReceiptStaleError as error:
                # One of them is old, and it is not known which: each may be acknowledged.
                raise UnknownOutcomeError(str(error)) from error
        is_known = all(op.outcome != Outcome.INFO for op in ops)
        return process if is_known else self._clients.new_process()

    async def _change(
        self, consumer: ReceivingConsumer[Any], process: int, message: Received, invisible_s: float
    ) -> Operation:
        op = self._begin(consumer, process, F.CHANGE_TIME, message)
        op.status = round(invisible_s * 1000)
        with self._clients.attempt(op):
            await consumer.change_invisible(message, invisible_s)
            op.min_off = _number(message.receipt)
        return op

    def _begin(
        self, consumer: ReceivingConsumer[Any], process: int, f: F, message: Received
    ) -> Operation:
        op = self._clients.begin(process, f, message.message_queue)
        op.group, op.off, op.txn = consumer.group, message.queue_offset, _number(message.receipt)
        return op

    async def drain(self, instance: ClientInstance, ends: Ends) -> None:
        """Receive and acknowledge everything; the cluster serves, and nothing comes any more.

        Raises ClientError: a request was refused.
        """
        clients = self._clients
        for in_order in (False, True):
            consumer = self._consumer(instance, in_order=in_order)
            reader = PullConsumer(instance, consumer.group)  # for what is committed
            refused: list[ClientError] = []
            async with trio.open_nursery() as nursery:
                for _ in range(DRAINERS):
                    own = self._consumer(instance, in_order=in_order)
                    nursery.start_soon(self._drain_with, own, reader, ends, refused)
            if refused:
                raise refused[0]
            process = clients.new_process()
            is_whole = await self._read_dead_letters(reader, process)
            for queue, (begin, end) in ends.items():
                op = clients.begin(process, F.RECEIVE, queue)
                op.group, op.min_off, op.max_off = consumer.group, begin, end
                op.cnt = RETRIES + 1 if is_whole else 0
                clients.end(op)

    async def _drain_with(
        self,
        consumer: SimpleConsumer,
        reader: PullConsumer,
        ends: Ends,
        refused: list[ClientError],
    ) -> None:
        """Receive and acknowledge until the group has everything, or a request was *refused*."""
        process = self._clients.new_process()
        try:
            while not refused:
                messages = await self._receive(consumer, process, 32, DRAIN_S, 1.0)
                if messages is None:
                    raise ClientError("a receive of the drain got no answer")
                if messages:
                    # Together: one by one, thousands take longer than a run waits for its end.
                    process = await self._ack_together(consumer, process, messages)
                elif await self._is_done(reader, ends):
                    return
        except ClientError as error:
            refused.append(error)

    async def _read_dead_letters(self, reader: PullConsumer, process: int) -> bool:
        """Leave a row for each message that was given up; tell whether all of them are there."""
        is_whole = True
        try:
            queues = await reader.fetch_message_queues(DEAD_PREFIX + reader.group)
        except NoRouteError:
            return True  # nothing ever went there
        for queue in queues:
            note = partial(self._note_given_up, process, reader.group, queue)
            is_whole = await read_queue(reader, queue, note) == 0 and is_whole
        return is_whole

    def _note_given_up(
        self, process: int, group: str, queue: MessageQueue, message: MessageExt
    ) -> None:
        op = self._clients.begin(process, F.GIVEN_UP, queue)
        op.group, op.value = group, value_of(message.body)
        op.cnt, op.max_off = message.reconsume_times, message.queue_offset
        self._clients.end(op)

    async def _is_done(self, reader: PullConsumer, ends: Ends) -> bool:
        for queue, (_, end) in ends.items():
            if end and await reader.committed_offset(queue) != end:
                return False
        return True


def _number(receipt: ReceiptHandle) -> int:
    """Return what distinguishes the receipts of one message."""
    return receipt.revive_queue_id
