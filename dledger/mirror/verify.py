"""Compares two clusters queue by queue: where they begin and end, and each message both have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import trio

from dledger.client.admin.copies import ClusterCopies, offsets_of, without_store
from dledger.client.core.errors import OffsetIllegalError
from dledger.client.core.route import MessageQueue
from dledger.mirror.plan import (
    Bounds,
    Commit,
    QueueKey,
    Selection,
    groups_to_put,
    offsets_to_commit,
    pair_brokers,
    topics_to_put,
)
from dledger.mirror.queue_copy import CHUNK_BYTES, DIGEST_BYTES, QUEUES_AT_ONCE, Source

SAME: Final = "same"
BEHIND: Final = "behind"
AHEAD: Final = "ahead"
DIFFERS: Final = "differs"


@dataclass(frozen=True, slots=True)
class QueueVerdict:
    """What was found of one queue.

    Attributes:
        queue: At the source.
        source, target: Bounds there.
        compared: Messages that both have and that were compared.
        digest: Over those of the source; the same at both where *differs_at* is None.
        differs_at: First offset whose message is another one; None: there is none.
    """

    queue: MessageQueue
    source: Bounds
    target: Bounds
    compared: int
    digest: str
    differs_at: int | None

    @property
    def verdict(self) -> str:
        """In one word."""
        return verdict_of(self.source, self.target, self.differs_at)


def verdict_of(source: Bounds, target: Bounds, differs_at: int | None) -> str:
    """Return how a queue at the target is beside that of the source. Pure."""
    if differs_at is not None:
        return DIFFERS
    if target.end > source.end:
        return AHEAD
    return BEHIND if target.end < source.end else SAME


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found of two clusters.

    Attributes:
        queues: By topic, broker group and queue id.
        tables: Topics and consumer groups that are not at the target as they are at the source.
        offsets: Committed offsets that are behind at the target.
    """

    queues: list[QueueVerdict]
    tables: list[str]
    offsets: list[Commit]

    @property
    def is_same(self) -> bool:
        """Whether the target has all that is copied."""
        return not (self.tables or self.offsets) and all(one.verdict == SAME for one in self.queues)


async def compare(
    source: ClusterCopies,
    target: ClusterCopies,
    selection: Selection,
    given_pairs: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare everything that a mirror copies.

    Raises:
        ConfigError: Broker groups have no counterpart.
        ClientError: A cluster does not answer, or refuses.
    """
    pairs = pair_brokers(
        await source.broker_names(), await target.broker_names(), given_pairs or {}
    )
    found = Comparison([], [], [])
    for here, there in pairs.items():
        await _compare_pair(source, target, selection, (here, there), found)
    found.queues.sort(key=lambda one: (one.queue.topic, one.queue.broker_name, one.queue.queue_id))
    return found


async def _compare_pair(
    source: ClusterCopies,
    target: ClusterCopies,
    selection: Selection,
    pair: tuple[str, str],
    found: Comparison,
) -> None:
    here, there = pair
    topics = {k: v for k, v in (await source.topics(here)).items() if selection.has_topic(k)}
    groups = {k: v for k, v in (await source.groups(here)).items() if selection.has_group(k)}
    theirs = await target.topics(there)
    found.tables.extend(f"topic {one.topic_name}" for one in topics_to_put(topics, theirs))
    changed = groups_to_put(groups, await target.groups(there))
    found.tables.extend(f"consumer group {one.group_name}" for one in changed)
    limit = trio.CapacityLimiter(QUEUES_AT_ONCE)
    ends: dict[QueueKey, int] = {}

    async def look(queue: MessageQueue, counterpart: MessageQueue) -> None:
        async with limit:
            verdict = await compare_queue(source, target, queue, counterpart)
        found.queues.append(verdict)
        ends[queue.topic, queue.queue_id] = verdict.target.end

    async with trio.open_nursery() as nursery:
        for name, config in sorted(topics.items()):
            if name not in theirs:
                continue
            for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
                queue = MessageQueue(name, here, queue_id)
                nursery.start_soon(look, queue, MessageQueue(name, there, queue_id))
    committed = await source.committed(here), await target.committed(there)
    found.offsets.extend(offsets_to_commit(*committed, ends, selection))


async def compare_queue(
    source: Source, target: Source, queue: MessageQueue, counterpart: MessageQueue
) -> QueueVerdict:
    """Compare one queue, message by message; raises as `compare`."""
    there = Bounds(*await target.bounds(counterpart))
    here = Bounds(*await source.bounds(queue))
    first, end = max(here.begin, there.begin), min(here.end, there.end)
    digest = blake2b(digest_size=DIGEST_BYTES)
    compared, differs_at = 0, None
    mine, others = Reader(source, queue, first), Reader(target, counterpart, first)
    while mine.offset < end and differs_at is None:
        offset = mine.offset
        try:
            left, right = await mine.next(), await others.next()
        except OffsetIllegalError as error:
            # Retention moved on meanwhile: what is kept is compared.
            first = max(error.min_offset, offset + 1)
            mine, others = Reader(source, queue, first), Reader(target, counterpart, first)
            continue
        if left is None or right is None:
            differs_at = offset
            break
        content = without_store(left)
        if content != without_store(right):
            differs_at = offset
            break
        digest.update(content)
        compared += 1
    return QueueVerdict(queue, here, there, compared, digest.hexdigest(), differs_at)


class Reader:
    """The stored records of a queue one by one, read in chunks.

    Attributes:
        offset: Of the next one.
    """

    def __init__(self, cluster: Source, queue: MessageQueue, offset: int) -> None:
        self.offset = offset
        self._cluster = cluster
        self._queue = queue
        self._chunk: list[memoryview] = []
        self._at = 0

    async def next(self) -> memoryview | None:
        """Return the record at `offset`; None where the cluster returns another one, or none.

        Raises:
            OffsetIllegalError: The queue does not hold it.
            ClientError: The cluster does not answer.
        """
        if self._at == len(self._chunk):
            self._chunk = await self._cluster.read(self._queue, self.offset, CHUNK_BYTES)
            self._at = 0
        if not self._chunk or offsets_of([self._chunk[self._at]]) != [self.offset]:
            return None
        record = self._chunk[self._at]
        self._at += 1
        self.offset += 1
        return record
