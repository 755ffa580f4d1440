"""Consumers of a workload: pull in order, commit, resume from a committed offset, send back.

`Consumers` can be paused with offsets in hand while doubles under their names on another machine go
on in their place; resumed, they commit what they had. Every offset is committed by one at most.

`Retriers` read the workload's queues and their group's retry topic and send some messages back,
with one request each. In the end retry topic and dead letters are read from end to end.

`Filterers` pull with an expression, and begin again. A row holds which offsets an answer passed and
what it found there, as a count and a hash.

`Lockers` lock queues, renew, commit under their locks, give them back, or forget them. Some pause
for longer than a lease lasts and commit with the token they had, which must fail. A locker that saw
an unknown outcome, or forgets its locks, goes on as another client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from dledger.client.consumer.pull_consumer import PullConsumer
from dledger.client.consumer.queue_locks import LockClient
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.client_instance import ClientInstance
from dledger.client.core.errors import (
    BrokerUnreachableError,
    ClientError,
    LockLostError,
    NoRouteError,
    OffsetIllegalError,
    RequestFailedError,
    UnknownOutcomeError,
)
from dledger.client.core.message_ext import MessageExt
from dledger.client.core.route import MessageQueue
from dledger.commitlog.properties import PROPERTY_RETRY_TOPIC
from dledger.jepsen_like.checkers.contents import PROPERTIES
from dledger.jepsen_like.checkers.filters import FILTERS, Filter
from dledger.jepsen_like.checkers.retries import DEAD_PREFIX, MAX_TRIES, RETRY_PREFIX
from dledger.jepsen_like.history.columns import hash_range
from dledger.jepsen_like.history.operation import NOTHING, F, Operation, Outcome
from dledger.jepsen_like.nemesis.ground import Moment
from dledger.jepsen_like.seeded_rng import SimRng, rng_stream
from dledger.jepsen_like.workloads.recorder import Recorder, value_of
from dledger.jepsen_like.workloads.through import Ends, Role, read_queue
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.headers import ConsumerSendMsgBackHeader
from dledger.remoting.protocol.outcome import outcome_of
from dledger.settings.text import parse_delay_levels

ASK_AGAIN_S: Final = 0.5
"""Pause before a consumer asks again where it may begin."""
POLL_WAIT_S: Final = 5.0
"""How long a third of the polls may be held: for long enough that a message comes, most often."""

FIRST_RETRY_LEVEL: Final = 3
"""By RocketMQ's word, as the delay of a retry: that of this level, and one more each time."""

Offsets = dict[MessageQueue, int]


class Consumers(Role):
    """The consumers of a run, by number.

    *ask_first*: those that start from now on begin where they committed, not where they know.
    """

    field = "consumers"

    def __init__(self, clients: Recorder) -> None:
        super().__init__(clients)
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

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        async with PullConsumer(instance, f"consumers-{index}") as consumer:
            tried = self._tried_by(index)
            offsets = await self._committed(consumer) if self.ask_first else dict(tried)
            rng = self._clients.rng_of("consumer", index)
            await self._go_on(consumer, rng, tried, offsets, is_double=False)

    async def double(self, instance: ClientInstance, index: int) -> None:
        """Be another consumer *index*, which never pauses, until it is over."""
        async with PullConsumer(instance, f"consumers-{index}") as consumer:
            offsets = await self._committed(consumer)
            rng = self._clients.rng_of("double", index)
            await self._go_on(consumer, rng, self._tried_by(index), offsets, is_double=True)

    def _tried_by(self, index: int) -> Offsets:
        # Kept over restarts: two commits of one offset could not be distinguished.
        return self._tried.setdefault(index, dict.fromkeys(self._clients.queues, 0))

    async def _committed(self, consumer: PullConsumer) -> Offsets:
        """Return what was committed last, as the broker answers."""
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
                op.cnt, offsets[queue] = 1, max(op.off, 0)  # begins again where it committed
            return op
        wait_s = rng.choice((0.0, 0.0, POLL_WAIT_S))
        op, then = await clients.pull(
            consumer, process, queue, offsets[queue], wait_s, consumer.group
        )
        if op.cnt > 1 and then > tried[queue] and clients.is_awaited(Moment.HALF_A_BATCH):
            op.cnt //= 2
            op.values = op.values[: op.cnt]  # the rest it never saw
            then = offsets[queue] + op.cnt
            clients.arrive(Moment.HALF_A_BATCH)
        offsets[queue] = then
        return op


GROUPS: Final = "retriers-"
PULLED: Final = 8
GIVEN_UP_PER_MILLE: Final = 150
"""Of those that are given back: at once to the dead letters."""
ATTEMPT_S: Final = 8.0


def retry_delay_ms(tries: int, levels_ms: Sequence[int]) -> int:
    """Return after how long a message comes again that was consumed *tries* times before."""
    return levels_ms[min(FIRST_RETRY_LEVEL + tries, len(levels_ms)) - 1]


class Retriers(Role):
    """Consumers that give messages back, each a group of its own."""

    field = "consumers"

    def __init__(self, clients: Recorder) -> None:
        super().__init__(clients)
        self._per_mille = clients.plan.workload.send_back_per_mille
        self._levels_ms = parse_delay_levels(clients.plan.settings.delay_levels)
        self._groups: dict[str, None] = {}

    @property
    def count(self) -> int:
        """As many as consumers, where messages are given back."""
        return super().count if self._per_mille else 0

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        clients, rng = self._clients, rng_stream(self._clients.plan.seed, "retrier", index)
        process = clients.new_process()
        offsets: dict[MessageQueue, int] = {}
        group = f"{GROUPS}{index}"
        self._groups[group] = None
        async with PullConsumer(instance, group) as consumer:
            while await clients.pause(rng):
                with clients.acting():
                    for message in await self._read(consumer, rng, offsets):
                        if rng.randrange(1000) < self._per_mille:
                            op = await self._give_back(instance, group, process, message, rng)
                            if op.outcome == Outcome.INFO:
                                process = clients.new_process()

    async def _read(
        self, consumer: PullConsumer, rng: SimRng, offsets: dict[MessageQueue, int]
    ) -> list[MessageExt]:
        """Return the next messages of a queue; none when there are none, or no answer."""
        queues = list(self._clients.queues)
        try:
            if rng.random() < 0.5:
                queues = list(await consumer.fetch_message_queues(RETRY_PREFIX + consumer.group))
            queue = queues[rng.randrange(len(queues))]
            offset = offsets.get(queue, 0)
            result = await consumer.pull(queue, offset, max_messages=PULLED, timeout_s=0.0)
        except OffsetIllegalError as error:
            offsets[queue] = error.next_begin_offset
            return []
        except ClientError:
            return []  # the cluster is in trouble: that is the point
        offsets[queue] = result.next_begin_offset
        return list(result.messages)

    async def _give_back(
        self, instance: ClientInstance, group: str, process: int, message: MessageExt, rng: SimRng
    ) -> Operation:
        clients = self._clients
        asked = -1 if rng.randrange(1000) < GIVEN_UP_PER_MILLE else 0
        op = clients.begin(process, F.SEND_BACK)
        op.group, op.value = group, value_of(message.body)
        op.cnt, op.status = message.reconsume_times, asked
        if asked == 0:
            op.due_ns = op.call_ns + retry_delay_ms(op.cnt, self._levels_ms) * 1_000_000
        header = ConsumerSendMsgBackHeader(
            message.phy_offset, group, asked, max_reconsume_times=MAX_TRIES
        )
        with clients.attempt(op):
            name = clients.queues[0].broker_name
            address = instance.leaders.address(name)
            if address is None:
                await instance.route(clients.topic, fresh=True)
                raise BrokerUnreachableError(f"no leader of {name} is known")
            answer = await instance.ask(
                address,
                RequestCode.CONSUMER_SEND_MSG_BACK,
                dict(header.encode()),
                timeout_s=ATTEMPT_S,
            )
            if answer.code != 0:
                instance.leader_search.note_refusal(name, address, answer)
                if outcome_of(answer) == "unknown":
                    raise UnknownOutcomeError(answer.remark or "")
                raise RequestFailedError(answer.remark or "", code=answer.code)
        return op

    async def drain(self, instance: ClientInstance, ends: Ends) -> None:
        """Read what came of it all, one row for each copy.

        Raises ClientError: the healed cluster does not serve.
        """
        consumer, process = PullConsumer(instance, "drain"), self._clients.new_process()
        prefixes = (RETRY_PREFIX, DEAD_PREFIX)
        for group, prefix in [(group, prefix) for group in self._groups for prefix in prefixes]:
            topic = prefix + group
            try:
                queues = await consumer.fetch_message_queues(topic)
            except NoRouteError:
                continue  # nothing ever went there
            for queue in queues:
                note = partial(self._note_copy, process, group, queue)
                begin = await read_queue(consumer, queue, note)
                if begin:
                    self._returned(process, group, queue, NOTHING, 0, begin)

    def _note_copy(
        self, process: int, group: str, queue: MessageQueue, message: MessageExt
    ) -> None:
        value, tries = value_of(message.body), message.reconsume_times
        op = self._returned(process, group, queue, value, tries, 0)
        self._clients.seen(op, message)
        origin = message.properties.get(PROPERTY_RETRY_TOPIC)
        # Hostile producers write the properties that brokers add to what is given back.
        is_hostile = bool(self._clients.plan.workload.hostile_per_mille)
        if not is_hostile and origin != self._clients.topic:
            op.err = op.err or PROPERTIES

    def _returned(
        self, process: int, group: str, queue: MessageQueue, value: int, tries: int, min_off: int
    ) -> Operation:
        op = self._clients.begin(process, F.RETURNED, queue)
        op.group, op.value, op.cnt, op.min_off = group, value, tries, min_off
        self._clients.end(op)
        return op


AGAIN: Final = 0.05
"""How likely a step is to begin again somewhere before."""
WAIT_S: Final = 2.0
"""For how long a broker holds some of the pulls: woken, it evaluates the expression again."""
FILTERED_MESSAGES: Final = 32


def _expression(chosen: Filter) -> SubscriptionExpression:
    if chosen.is_sql:
        return SubscriptionExpression.by_sql(chosen.text)
    return SubscriptionExpression.by_tag(chosen.text)


class Filterers(Role):
    """Consumers with an expression each."""

    field = "filterers"

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Be consumer *index* until it is over."""
        clients, rng = self._clients, rng_stream(self._clients.plan.seed, "filterer", index)
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
                queue, offset, max_messages=FILTERED_MESSAGES, tags=wanted, timeout_s=wait_s
            )
        except OffsetIllegalError as error:
            clients.refused(op, "OffsetIllegalError")
            return error.next_begin_offset
        except ClientError as error:
            clients.failed(op, error)
            return offset
        clients.end(op)
        values = clients.found(op, result.messages)
        op.max_off = result.next_begin_offset
        op.cnt, op.range_hash = len(values), hash_range(0, values)
        return result.next_begin_offset


LOCKERS: Final = "lockers"
STILL_STEP_S: Final = 0.5
"""Between two checks of a paused one whether the run is over."""
RENEW, COMMIT, FETCH, UNLOCK, STAND_STILL = 0.35, 0.70, 0.80, 0.88, 0.96
"""Where the shares of what a holder does end, in a draw from 0 to 1; the rest forgets its lock."""


class Lockers(Role):
    """The lockers of a run: all of one group, each a client of its own."""

    field = "lockers"

    def __init__(self, clients: Recorder) -> None:
        super().__init__(clients)
        self._committed: Counter[MessageQueue] = Counter()

    @property
    def count(self) -> int:
        """One, which lets all work: they share the consumer of their group."""
        return min(1, super().count)

    async def act(self, instance: ClientInstance, index: int) -> None:
        """Let all lockers work until it is over."""
        async with PullConsumer(instance, LOCKERS) as consumer, trio.open_nursery() as nursery:
            for number in range(super().count):
                nursery.start_soon(self._work, instance, consumer, number)

    async def _work(self, instance: ClientInstance, consumer: PullConsumer, index: int) -> None:
        rng = rng_stream(self._clients.plan.seed, "locker", index)
        while not self._clients.is_over:
            process = self._clients.new_process()
            # A process of the history is one holder, also for the broker.
            client_id = f"{instance.client_id}-locker-{process}"
            locks = LockClient(instance, LOCKERS, client_id=client_id)
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
        lease_s = self._clients.plan.settings.lock_lease_ms / 1000
        left_s = lease_s * (0.5 + 1.5 * rng.random())
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
        op.group = LOCKERS
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
        op = self._clients.begin(locker.process, F.UNLOCK, queue)
        op.group, op.token = LOCKERS, token
        del locker.held[queue]
        with self._clients.attempt(op):
            await locker.locks.unlock({queue: token})
        return op


class _Locker:
    """One client that locks, and the tokens it believes in."""

    def __init__(self, locks: LockClient, consumer: PullConsumer, process: int) -> None:
        self.locks = locks
        self.consumer = consumer
        self.process = process
        self.held: dict[MessageQueue, int] = {}
