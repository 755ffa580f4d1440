"""What consumers do: pull in order, commit, sometimes begin again from what they committed.

They can be told to stand still with offsets in hand while doubles, consumers under their names on
another machine, go on in their place; awake again they commit what they had, as somebody does who
was away for long and knows nothing of it. Every offset is committed by one of them at most, or
nobody could tell two commits apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from client.consumer.pull_consumer import PullConsumer
from client.core.client_instance import ClientInstance
from client.core.route import MessageQueue
from jepsen_like.history.operation import Operation, Outcome
from jepsen_like.nemesis.ground import Moment
from jepsen_like.seeded_rng import SimRng

if TYPE_CHECKING:
    from jepsen_like.workloads.clients import WorkloadClients

ASK_AGAIN_S: Final = 0.5
"""Pause before a consumer asks again where it may begin."""

Offsets = dict[MessageQueue, int]


class Consumers:
    """The consumers of a run, by number.

    Args:
        clients: Whose they are: the rows, the queues and the time.

    Attributes:
        client_id: Of the machine they run on.
        ask_first: Those that start from now on begin where they committed, not where they know.
    """

    def __init__(self, clients: WorkloadClients) -> None:
        self._clients = clients
        self._tried: dict[int, Offsets] = {}
        self._waking: trio.Event | None = None
        self._in_hand = 0
        self.client_id = ""
        self.ask_first = False

    # -- standing still --------------------------------------------------------------------

    def hold(self) -> None:
        """Let all stand still before their next step."""
        if self._waking is None:
            self._waking, self._in_hand = trio.Event(), 0

    def release(self) -> int:
        """Let them commit what they have in hand and go on; tell how much that is. Idempotent."""
        if self._waking is None:
            return 0
        self._waking.set()
        self._waking = None
        return self._in_hand

    async def _stand_still(
        self, waking: trio.Event, consumer: PullConsumer, tried: Offsets, offsets: Offsets
    ) -> None:
        in_hand = {queue: at for queue, at in offsets.items() if at > tried[queue]}
        tried.update(in_hand)  # a double leaves these to it
        self._in_hand += len(in_hand)
        await waking.wait()
        for queue, offset in in_hand.items():
            if not self._clients.is_over:
                with self._clients.acting():
                    await self._clients.commit(consumer, self._clients.new_process(), queue, offset)

    # -- working ---------------------------------------------------------------------------

    async def consume(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        async with PullConsumer(instance, f"consumers-{index}") as consumer:
            tried = self._tried_by(index)
            offsets = await self._committed(consumer) if self.ask_first else dict(tried)
            rng = self._clients.rng_of("consumer", index)
            await self._go_on(consumer, rng, tried, offsets, is_double=False)

    async def double(self, instance: ClientInstance, index: int) -> None:
        """Be another consumer *index*, which stands still for nobody, until it is over."""
        async with PullConsumer(instance, f"consumers-{index}") as consumer:
            offsets = await self._committed(consumer)
            rng = self._clients.rng_of("double", index)
            await self._go_on(consumer, rng, self._tried_by(index), offsets, is_double=True)

    def _tried_by(self, index: int) -> Offsets:
        # Kept over lives: no offset is committed twice, or nobody could tell the two apart.
        return self._tried.setdefault(index, dict.fromkeys(self._clients.queues, 0))

    async def _committed(self, consumer: PullConsumer) -> Offsets:
        """Return what was committed last, as the broker says."""
        found = dict.fromkeys(self._clients.queues, 0)
        for queue in found:
            while not self._clients.is_over:
                with self._clients.acting():
                    op = await self._clients.fetch_commit(
                        consumer, self._clients.new_process(), queue
                    )
                if op.outcome == Outcome.OK:
                    found[queue] = max(op.off, 0)
                    break
                await self._clients.sleep(ASK_AGAIN_S)
        return found

    async def _go_on(
        self,
        consumer: PullConsumer,
        rng: SimRng,
        tried: Offsets,
        offsets: Offsets,
        *,
        is_double: bool,
    ) -> None:
        clients = self._clients
        process = clients.new_process()
        while await clients.pause(rng):
            if self._waking is not None and not is_double:
                await self._stand_still(self._waking, consumer, tried, offsets)
                continue
            queue = clients.queues[rng.randrange(len(clients.queues))]
            with clients.acting():
                op = await self._act(consumer, process, queue, rng, tried, offsets)
            if op.outcome == Outcome.INFO:
                process = clients.new_process()

    async def _act(
        self,
        consumer: PullConsumer,
        process: int,
        queue: MessageQueue,
        rng: SimRng,
        tried: Offsets,
        offsets: Offsets,
    ) -> Operation:
        clients = self._clients
        chance = rng.random()
        if chance < 0.2 and offsets[queue] > tried[queue]:
            tried[queue] = offsets[queue]
            return await clients.commit(consumer, process, queue, offsets[queue])
        if chance < 0.35:
            op = await clients.fetch_commit(consumer, process, queue)
            if op.outcome == Outcome.OK and rng.random() < 0.2:
                offsets[queue] = max(op.off, 0)  # begins again where it committed
            return op
        wait_s = rng.choice((0.0, 0.0, 2.0))
        op, then = await clients.pull(consumer, process, queue, offsets[queue], wait_s)
        if op.cnt > 1 and then > tried[queue] and clients.is_awaited(Moment.HALF_A_BATCH):
            then = offsets[queue] + op.cnt // 2
            clients.arrive(Moment.HALF_A_BATCH)
        offsets[queue] = then
        return op
