"""What consumers by step do: read a queue, send one output for each message, commit, in one step.

Some steps read two queues, and leave a row for each. All are of one group and read the same queues,
which no rebalance shares out. Some steps are taken twice at almost one moment, by two consumers at
the same offset: only one may be stored.
"""

from __future__ import annotations

from typing import Final

import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import ClientError
from dledger.client.core.message import Message
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.jepsen_like.history.operation import NOTHING, F, Operation
from dledger.jepsen_like.seeded_rng import SimRng
from dledger.jepsen_like.workloads.recorder import Recorder
from dledger.jepsen_like.workloads.through import Ends, Role, make_topic, read_queue

GROUP: Final = "steppers"
OUTPUT_SUFFIX: Final = "-steps"
"""Ends the name of the topic that steps send to."""
OUTPUT_QUEUES: Final = 2
MAX_MESSAGES: Final = 8
"""Messages of one step, at most."""
STEP_S: Final = 4.0
"""How long a step may take before its outcome is unknown."""
RACE: Final = 0.5
"""Share of steps that more than one consumer takes."""
RACERS: Final = 3
RACE_S: Final = 0.02
"""Racers begin within this."""
WORKS: Final = 0.3
"""Share of steps that take time between what is read and what is stored; faults meet these."""
WORK_S: Final = 3.0
IN_TWO: Final = 0.4
"""Share of steps that read two queues."""
TO_NOWHERE: Final = 0.05
"""Share of steps with an output for a queue that does not exist: nothing of them may be stored."""

_Span = tuple[int, int, int]
"""Where the step begins, its first message, and its end."""


class Steps(Role):
    """The consumers by step of a run."""

    field = "steppers"

    def __init__(self, clients: Recorder) -> None:
        super().__init__(clients)
        self.output = clients.topic + OUTPUT_SUFFIX

    async def set_up(self, instance: ClientInstance) -> None:
        """Make the topic that steps send to; return when clients know its queues."""
        await make_topic(self._clients, instance, self.output, OUTPUT_QUEUES)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        clients, rng = self._clients, self._clients.rng_of("stepper", index)
        # Not opened: consumers of one instance are of one group, which it has once.
        consumers = [PullConsumer(instance, GROUP) for _ in range(RACERS)]
        while await clients.pause(rng):
            first = rng.randrange(len(clients.queues))
            queues = [clients.queues[first]]
            if len(clients.queues) > 1 and rng.random() < IN_TWO:
                queues.append(clients.queues[(first + 1) % len(clients.queues)])
            count = RACERS if rng.random() < RACE else 1
            work_s = WORK_S * rng.random() if rng.random() < WORKS else 0.0
            delays_s = [round(work_s + RACE_S * rng.random(), 4) for _ in range(count)]
            with clients.acting():
                await self._round(consumers[:count], queues, delays_s, rng)

    async def _round(
        self,
        consumers: list[PullConsumer],
        queues: list[MessageQueue],
        delays_s: list[float],
        rng: SimRng,
    ) -> None:
        """Take a step from where the group stands, by each of *consumers*."""
        clients = self._clients
        standing = []
        for consumer in consumers:
            try:
                standing.append([await consumer.committed_offset(each) or 0 for each in queues])
            except ClientError:
                return
        spans: dict[MessageQueue, _Span] = {}
        for queue, off in zip(queues, standing[0], strict=True):
            op, then = await clients.pull(consumers[0], clients.new_process(), queue, off)
            if then <= off:
                return
            wanted = 1 + rng.randrange(MAX_MESSAGES)
            # Without a message retention had removed what was before.
            spans[queue] = (off, off, min(then, off + wanted)) if op.cnt else (off, then, then)
        is_to_nowhere = rng.random() < TO_NOWHERE
        async with trio.open_nursery() as nursery:
            for consumer, offs, delay_s in zip(consumers, standing, delays_s, strict=True):
                if offs == standing[0]:
                    nursery.start_soon(self._step, consumer, spans, is_to_nowhere, delay_s)

    async def _step(
        self,
        consumer: PullConsumer,
        spans: dict[MessageQueue, _Span],
        is_to_nowhere: bool,
        delay_s: float,
    ) -> None:
        clients = self._clients
        await clients.sleep(delay_s)
        process, ops = clients.new_process(), list[Operation]()
        for queue, span in spans.items():
            op = clients.begin(process, F.STEP, queue)
            op.group, (op.off, op.min_off, op.max_off) = GROUP, span
            op.cnt = op.max_off - op.min_off
            ops.append(op)
            op.txn = ops[0].op_id
        with clients.attempt(*ops):
            async with consumer.transaction(timeout_s=STEP_S) as step:
                for op, queue in zip(ops, spans, strict=True):
                    for off in range(op.min_off, op.max_off):
                        body = b"%d %d %d" % (op.op_id, queue.queue_id, off)
                        number = off % OUTPUT_QUEUES + OUTPUT_QUEUES * is_to_nowhere
                        to = MessageQueue(self.output, queue.broker_name, number)
                        step.send(Message(self.output, body), to)
                    step.commit(queue, op.max_off)

    async def drain(self, instance: ClientInstance, ends: Ends) -> None:
        """Read all outputs and what is committed; the cluster serves, and no step begins any more.

        Raises ClientError: a request was refused.
        """
        clients, process = self._clients, self._clients.new_process()
        consumer = PullConsumer(instance, GROUP)
        committed = await self._committed(consumer)
        while True:
            is_whole, found = await self._outputs(consumer)
            then = await self._committed(consumer)
            if then == committed:
                break  # else a late step was stored meanwhile
            committed = then
        for name, at, body in found:
            step, queue_id, off = (int(part) for part in body.split())
            op = self._begin(process, MessageQueue(clients.topic, name.broker_name, queue_id))
            op.off, op.txn, op.cnt, op.max_off = off, step, name.queue_id, at
            clients.end(op)
        for queue, offset in committed.items():
            op = self._begin(process, queue)
            op.off, op.max_off, op.cnt = NOTHING, offset, int(is_whole)
            clients.end(op)

    def _begin(self, process: int, queue: MessageQueue) -> Operation:
        op = self._clients.begin(process, F.STEP_FOUND, queue)
        op.group = GROUP
        return op

    async def _committed(self, consumer: PullConsumer) -> dict[MessageQueue, int]:
        return {
            queue: await consumer.committed_offset(queue) or 0 for queue in self._clients.queues
        }

    async def _outputs(
        self, consumer: PullConsumer
    ) -> tuple[bool, list[tuple[MessageQueue, int, bytes]]]:
        """Return whether outputs were read from their beginning, and each: queue, offset, body."""
        is_whole = True
        found: list[tuple[MessageQueue, int, bytes]] = []
        for number in range(OUTPUT_QUEUES):
            queue = MessageQueue(self.output, self._clients.queues[0].broker_name, number)
            messages: list[MessageExt] = []
            is_whole = await read_queue(consumer, queue, messages.append) == 0 and is_whole
            found += [(queue, each.queue_offset, bytes(each.body)) for each in messages]
        return is_whole, found
