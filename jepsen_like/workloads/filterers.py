"""What consumers do that want some messages only: pull with an expression, and begin again.

A row holds which offsets an answer passed and what it found there, as a count and a hash.
"""

from __future__ import annotations

from typing import Final

from client.consumer.pull_consumer import PullConsumer
from client.consumer.subscriptions import SubscriptionExpression
from client.core.client_instance import ClientInstance
from client.core.errors import ClientError, OffsetIllegalError
from client.core.route import MessageQueue
from jepsen_like.checkers.filters import FILTERS, Filter
from jepsen_like.history.columns import hash_range
from jepsen_like.history.operation import F, Operation, Outcome
from jepsen_like.seeded_rng import SimRng, rng_stream
from jepsen_like.workloads.recorder import Recorder, value_of

AGAIN: Final = 0.05
"""How likely a step is to begin again somewhere before."""
WAIT_S: Final = 2.0
"""For how long a broker holds some of the pulls: woken, it evaluates the expression again."""
PULLED: Final = 32


def _expression(chosen: Filter) -> SubscriptionExpression:
    if chosen.is_sql:
        return SubscriptionExpression.by_sql(chosen.text)
    return SubscriptionExpression.by_tag(chosen.text)


class Filterers:
    """Consumers with an expression each."""

    def __init__(self, clients: Recorder, seed: int) -> None:
        self._clients = clients
        self._seed = seed

    async def consume(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        clients, rng = self._clients, rng_stream(self._seed, "filterer", index)
        number = index % len(FILTERS)
        wanted = _expression(FILTERS[number])
        offsets = dict.fromkeys(clients.queues, 0)
        process = clients.new_process()
        async with PullConsumer(instance, f"filterers-{index}") as consumer:
            while await clients.pause(rng):
                queue = clients.queues[rng.randrange(len(clients.queues))]
                if rng.random() < AGAIN:
                    offsets[queue] = rng.randint(0, offsets[queue])
                with clients.acting():
                    op = clients.begin(process, F.FILTERED, queue)
                    op.status = number
                    offsets[queue] = await self._pull(
                        consumer, op, queue, offsets[queue], wanted, rng
                    )
                if op.outcome == Outcome.INFO:
                    process = clients.new_process()

    async def _pull(
        self,
        consumer: PullConsumer,
        op: Operation,
        queue: MessageQueue,
        offset: int,
        wanted: SubscriptionExpression,
        rng: SimRng,
    ) -> int:
        """Pull once; return where to go on."""
        clients = self._clients
        op.off = op.max_off = offset
        wait_s = WAIT_S if rng.random() < 0.5 else 0.0
        try:
            result = await consumer.pull(
                queue, offset, max_messages=PULLED, tags=wanted, timeout_s=wait_s
            )
        except OffsetIllegalError as error:
            clients.refused(op, "OffsetIllegalError")
            return error.next_begin_offset
        except ClientError as error:
            clients.failed(op, error)
            return offset
        clients.end(op)
        values = [value_of(message.body) for message in result.messages]
        op.max_off = result.next_begin_offset
        op.cnt, op.range_hash = len(values), hash_range(0, values)
        return result.next_begin_offset
