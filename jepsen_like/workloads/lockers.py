"""What lockers do: lock queues, renew, commit under their locks, give them back, or forget them.

Some pause for longer than a lease lasts and commit with the token they had, as a paused process
does: only the holder of the queue by then may commit. A locker that saw an unknown outcome, or
forgets its locks, goes on as another client: its locks are not given back.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import trio

from client.consumer.pull_consumer import PullConsumer
from client.consumer.queue_locks import LockClient
from client.core.client_instance import ClientInstance
from client.core.errors import ClientError, LockLostError
from client.core.route import MessageQueue
from jepsen_like.history.operation import F, Operation, Outcome
from jepsen_like.seeded_rng import SimRng, rng_stream
from jepsen_like.workloads.recorder import Recorder

GROUP: Final = "lockers"
STILL_STEP_S: Final = 0.5
"""Between two checks of a paused one whether the run is over."""
RENEW, COMMIT, FETCH, UNLOCK, STAND_STILL = 0.35, 0.70, 0.80, 0.88, 0.96
"""Where the shares of what a holder does end, in a draw from 0 to 1; the rest forgets its lock."""


class Lockers:
    """The lockers of a run: all of one group, each a client of its own.

    Args:
        clients: Whose they are: the rows, the queues and the time.
        seed: Of what they do.
        lease_s: How long brokers let a lock last.
    """

    def __init__(self, clients: Recorder, seed: int, *, lease_s: float) -> None:
        self._clients = clients
        self._seed = seed
        self._lease_s = lease_s
        self._committed: Counter[MessageQueue] = Counter()

    async def run(self, instance: ClientInstance, count: int) -> None:
        """Let *count* lockers work until it is over."""
        async with PullConsumer(instance, GROUP) as consumer, trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(self._work, instance, consumer, index)

    async def _work(self, instance: ClientInstance, consumer: PullConsumer, index: int) -> None:
        rng = rng_stream(self._seed, "locker", index)
        while not self._clients.is_over:
            process = self._clients.new_process()
            # A process of the history is one holder, also for the broker.
            client_id = f"{instance.client_id}-locker-{process}"
            locks = LockClient(instance, GROUP, client_id=client_id)
            await self._live(_Locker(locks, consumer, process), rng)

    async def _live(self, locker: _Locker, rng: SimRng) -> None:
        """Work as one client until it is retired."""
        clients = self._clients
        while await clients.pause(rng):
            queue = clients.queues[rng.randrange(len(clients.queues))]
            chance = rng.random()
            if queue in locker.held and UNLOCK <= chance < STAND_STILL:
                await self._stand_still(rng)
                chance = RENEW  # commits next, whatever has become of its lock
            elif queue in locker.held and chance >= STAND_STILL:
                return
            if clients.is_over:
                return
            with clients.acting():
                op = await self._act(locker, queue, chance)
            if op.outcome == Outcome.INFO:
                return

    async def _stand_still(self, rng: SimRng) -> None:
        left_s = self._lease_s * (0.5 + 1.5 * rng.random())
        while left_s > 0 and not self._clients.is_over:
            await self._clients.sleep(min(left_s, STILL_STEP_S))
            left_s -= STILL_STEP_S

    async def _act(self, locker: _Locker, queue: MessageQueue, chance: float) -> Operation:
        token = locker.held.get(queue)
        if token is None or chance < RENEW:
            return await self._lock(locker, queue)
        if chance < COMMIT:
            # Every offset once: two commits of one offset could not be distinguished.
            self._committed[queue] += 1
            offset = self._committed[queue]
            op = await self._clients.commit(locker.consumer, locker.process, queue, offset, token)
            if op.err == LockLostError.__name__:
                del locker.held[queue]
            return op
        if chance < FETCH:
            return await self._clients.fetch_commit(locker.consumer, locker.process, queue)
        return await self._unlock(locker, queue, token)

    async def _lock(self, locker: _Locker, queue: MessageQueue) -> Operation:
        clients = self._clients
        op = clients.begin(locker.process, F.LOCK, queue)
        op.group = GROUP
        try:
            held = await locker.locks.lock([queue])
        except ClientError as error:
            clients.failed(op, error)
            return op
        token = held.get(queue)
        if token is None:
            locker.held.pop(queue, None)
            clients.refused(op, "LockedByOther")
            return op
        locker.held[queue] = op.token = token
        clients.end(op)
        return op

    async def _unlock(self, locker: _Locker, queue: MessageQueue, token: int) -> Operation:
        clients = self._clients
        op = clients.begin(locker.process, F.UNLOCK, queue)
        op.group, op.token = GROUP, token
        del locker.held[queue]
        try:
            await locker.locks.unlock({queue: token})
        except ClientError as error:
            clients.failed(op, error)
        else:
            clients.end(op)
        return op


class _Locker:
    """One client that locks, and the tokens it believes in."""

    def __init__(self, locks: LockClient, consumer: PullConsumer, process: int) -> None:
        self.locks = locks
        self.consumer = consumer
        self.process = process
        self.held: dict[MessageQueue, int] = {}
