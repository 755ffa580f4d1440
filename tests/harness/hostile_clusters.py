"""Two clusters in memory as a mirror asks them, which refuse, lose and delay by chance.

What a mirror sends is judged when it is sent, by what the documents state of it. Tables and
bounds may be those of a little while ago, and a request whose answer is lost may be carried out
later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio
from typing_extensions import Buffer

from dledger.client.core.errors import RequestFailedError, RequestTimedOutError
from dledger.client.core.route import MessageQueue
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from tests.harness.memory_queues import MemoryQueues
from tests.harness.stored_fields import kept_fields

Offsets = dict[tuple[str, str], dict[int, int]]

REMEMBERED = 3
"""Bounds of a queue that a leader may still answer with."""


class HostileCluster(MemoryQueues):
    """A cluster of several broker groups.

    Attributes:
        names: Broker groups that its NameServers know of now.
        on_request: Called in front of every request: another client's turn.
    """

    def __init__(self, seed: int, names: Sequence[str], fault_rate: float) -> None:
        super().__init__(seed, fault_rate=fault_rate)
        self.names = list(names)
        self.tables: dict[str, dict[str, TopicConfig]] = {name: {} for name in names}
        self.group_tables: dict[str, dict[str, SubscriptionGroupConfig]] = {
            name: {} for name in names
        }
        self.offsets: dict[str, Offsets] = {name: {} for name in names}
        self.refused_topics: set[str] = set()
        self.late: list[Callable[[], None]] = []
        self.on_request: Callable[[], None] = lambda: None
        self._seen: dict[MessageQueue, deque[tuple[int, int]]] = {}

    def queues_of(self, broker: str) -> list[MessageQueue]:
        """Return the queues of all topics of a broker group."""
        return [
            MessageQueue(name, broker, queue_id)
            for name, config in sorted(self.tables[broker].items())
            for queue_id in range(config.write_queue_nums)
        ]

    def make_topic(self, broker: str, name: str, queues: int) -> None:
        self.tables[broker][name] = TopicConfig(
            name, read_queue_nums=queues, write_queue_nums=queues
        )

    def delete_topic(self, broker: str, name: str) -> None:
        """Delete a topic with its messages and the offsets of groups in it."""
        for queue in self.queues_of(broker):
            if queue.topic == name:
                self.make_again(queue)
        self.tables[broker].pop(name, None)
        self.late.clear()
        for key in [key for key in self.offsets[broker] if key[1] == name]:
            del self.offsets[broker][key]

    # -- what a mirror asks

    async def broker_names(self) -> list[str]:
        await self._asked()
        return sorted(self.names)

    async def topics(self, broker: str) -> dict[str, TopicConfig]:
        await self._asked()
        return dict(self.tables[broker])

    async def groups(self, broker: str) -> dict[str, SubscriptionGroupConfig]:
        await self._asked()
        return dict(self.group_tables[broker])

    async def put_topics(self, broker: str, configs: Sequence[TopicConfig]) -> None:
        await self._asked()
        if self.refused_topics & {one.topic_name for one in configs}:
            raise RequestFailedError("refused", code=1)
        self.tables[broker] |= {one.topic_name: one for one in configs}
        await self._answered()

    async def put_groups(self, broker: str, configs: Sequence[SubscriptionGroupConfig]) -> None:
        await self._asked()
        self.group_tables[broker] |= {one.group_name: one for one in configs}
        await self._answered()

    async def all_bounds(self, broker: str, config: TopicConfig) -> dict[int, tuple[int, int]]:
        await self._asked()
        if config.topic_name not in self.tables[broker]:
            raise RequestFailedError("no such topic", code=17)
        found = {}
        for queue in self.queues_of(broker):
            if queue.topic == config.topic_name:
                seen = self._seen.setdefault(queue, deque(maxlen=REMEMBERED))
                seen.append((self.begin_of(queue), self.end(queue)))
                is_old = self._rng.random() < self.fault_rate
                found[queue.queue_id] = self._rng.choice(seen) if is_old else seen[-1]
        return found

    async def committed(self, broker: str) -> Offsets:
        await self._asked()
        return {key: dict(offsets) for key, offsets in self.offsets[broker].items()}

    async def _asked(self) -> None:
        if self.late and self._rng.random() < 0.5:
            self.late.pop(0)()
        self.on_request()
        await super()._asked()


class Target(HostileCluster):
    """The cluster that is written to.

    Attributes:
        source: The one that is copied.
        of_others: Queue → offsets that producers at the target wrote.
        made_again: Queues of topics that were made again, until something is appended. Where one
            ends as before, a mirror that compared its end finds that out then.
    """

    def __init__(self, seed: int, source: HostileCluster, fault_rate: float) -> None:
        super().__init__(seed, source.names, fault_rate)
        self.source = source
        self.of_others: dict[MessageQueue, set[int]] = {}
        self.made_again: set[MessageQueue] = set()

    def produce_here(self, queue: MessageQueue, body: bytes) -> None:
        """Store what no mirror sent."""
        self.of_others.setdefault(queue, set()).add(self.end(queue))
        self.produce(queue, body)

    def make_again(self, queue: MessageQueue) -> None:
        super().make_again(queue)
        self.of_others.pop(queue, None)

    def is_same_at(self, queue: MessageQueue, offset: int) -> bool:
        """Whether both have the same message there, or one of them has none to compare."""
        if offset < max(self.begin_of(queue), self.source.begin_of(queue)):
            return True
        if offset >= min(self.end(queue), self.source.end(queue)):
            return False
        here, there = self.source.record(queue, offset), self.record(queue, offset)
        return kept_fields(here) == kept_fields(there)

    async def append(self, queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        await self._asked()
        self._check_queue(queue)
        for at, record in enumerate(records, offset):
            if at >= self.source.begin_of(queue):
                assert kept_fields(bytes(record)) == kept_fields(self.source.record(queue, at))
        if self.end(queue) == offset:
            assert self.is_same_at(queue, offset - 1), f"appended at {offset} behind another one"
            self.made_again.discard(queue)
        if self._rng.random() < self.fault_rate / 2:
            self.late.append(lambda: self._store_late(queue, offset, records))
            raise RequestTimedOutError("no answer, and it comes later")
        return await super().append(queue, offset, records)

    def _store_late(self, queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> None:
        if self.end(queue) == offset:
            self.records.setdefault(queue, []).extend(bytes(record) for record in records)

    async def begin(self, queue: MessageQueue, offset: int) -> None:
        self._check_queue(queue)
        await super().begin(queue, offset)

    def _check_queue(self, queue: MessageQueue) -> None:
        config = self.tables[queue.broker_name].get(queue.topic)
        if config is None or queue.queue_id >= config.write_queue_nums:
            raise RequestFailedError("no such queue", code=17)

    async def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        await self._asked()
        table = self.offsets[queue.broker_name].setdefault((group, queue.topic), {})
        assert offset <= self.end(queue), "it is behind the last message"
        if queue not in self.made_again and self.end(queue) != self.source.end(queue):
            assert self.is_same_at(queue, offset - 1), "what stands there is another message"
        table[queue.queue_id] = max(offset, table.get(queue.queue_id, -1))
        await self._answered()

    async def settle(self) -> None:
        """From now on everything is answered."""
        self.late.clear()
        for cluster in (self, self.source):
            cluster.fault_rate = 0.0
            cluster.on_request = lambda: None
            cluster._seen.clear()
            cluster.names = sorted(cluster.tables)
        await trio.lowlevel.checkpoint()
