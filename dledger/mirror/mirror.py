"""A mirror: rounds over all queues of two clusters. It keeps nothing that outlives it.

A round reads the tables and bounds of both clusters, makes topics and groups, copies what is new in
each queue up to the end that it had, or a part where that is much, and then commits the offsets of
consumer groups: after the messages that they point at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import structlog
import trio

from dledger.client.admin.copies import ClusterCopies
from dledger.client.core.errors import RequestFailedError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError, InvariantBroken, MQError
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
from dledger.mirror.queue_copy import QUEUES_AT_ONCE, QueueCopy
from dledger.remoting.protocol.bodies import TopicConfig
from dledger.remoting.seams import Clock

ROUND_S: Final = 1.0
"""From the end of a round in which nothing was new to the next one: how late a message may be at
the target when its queue was quiet."""

PAUSE_S: Final = 2.0
"""After a round in which a cluster did not answer."""

FRUITLESS_MAX: Final = 10
"""Rounds in a row that copy nothing, and leave something, before what is to be done once gives up:
an election takes a second or two."""

_log = structlog.get_logger(__name__)

ConfigT = TypeVar("ConfigT")


@dataclass(slots=True)
class Round:
    """What one round did.

    Attributes:
        copied_messages: Stored by it.
        commits: Offsets committed.
        errors: What a cluster refused, or did not answer, by what it was about.
    """

    copied_messages: int = 0
    commits: int = 0
    put_topics: int = 0
    put_groups: int = 0
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def is_quiet(self) -> bool:
        """Whether no message and no offset was new.

        Tables do not count: a target that keeps one otherwise is asked again in each round.
        """
        return not (self.copied_messages or self.commits)


class Mirror:
    """Copies one cluster into another.

    Attributes:
        queues: The state of each queue of the source, from round to round.
        rounds: How many have ended.
        pairs: Broker group of the source → the one of the target.
    """

    def __init__(
        self,
        source: ClusterCopies,
        target: ClusterCopies,
        clock: Clock,
        selection: Selection,
        given_pairs: Mapping[str, str] | None = None,
        *,
        queues_at_once: int = QUEUES_AT_ONCE,
    ) -> None:
        self.queues: dict[MessageQueue, QueueCopy] = {}
        self.rounds = 0
        self.pairs: dict[str, str] = {}
        self._source = source
        self._target = target
        self._clock = clock
        self._selection = selection
        self._given_pairs = dict(given_pairs or {})
        self._queues_at_once = queues_at_once

    @property
    def lag(self) -> int:
        """Messages of the source that the target does not have, of queues that are not stopped."""
        return sum(copy.lag for copy in self.queues.values() if not copy.stopped)

    @property
    def stopped(self) -> dict[MessageQueue, str]:
        """Queue of the source → why nothing is copied to its counterpart."""
        return {queue: copy.stopped for queue, copy in self.queues.items() if copy.stopped}

    async def run(self, on_round: Callable[[Round], None] = lambda _: None) -> None:
        """Copy until cancelled.

        Raises:
            ConfigError: Broker groups have no counterpart, in the first round.
        Cancellation: What is stored stays; the next mirror goes on behind it.
        """
        while True:
            done = await self.round()
            on_round(done)
            if done.errors:
                await self._clock.sleep(PAUSE_S)
            elif done.is_quiet:
                await self._clock.sleep(ROUND_S)

    async def run_once(self, on_round: Callable[[Round], None] = lambda _: None) -> Round:
        """Copy what is there now; return the last round, which has errors if that was given up.

        Raises:
            ConfigError: Broker groups have no counterpart.
        Cancellation: As `run`.
        """
        fruitless = 0
        while True:
            done = await self.round()
            on_round(done)
            if not (done.errors or self.lag):
                return done
            fruitless = fruitless + 1 if done.is_quiet else 0
            if fruitless >= FRUITLESS_MAX:
                return done
            if done.errors:
                await self._clock.sleep(PAUSE_S)

    async def round(self) -> Round:
        """Copy what is new now.

        Raises:
            ConfigError: Broker groups have no counterpart.
        Cancellation: As `run`.
        """
        done = Round()
        before = {queue: copy.stopped for queue, copy in self.queues.items()}
        try:
            names = await self._source.broker_names(), await self._target.broker_names()
        except MQError as error:
            done.errors["clusters"] = str(error)
            return done
        try:
            pairs = self._paired(*names, done)
        except ConfigError as error:
            if not self.pairs:
                raise
            # There were counterparts: a NameServer that was just started knows few brokers.
            done.errors["clusters"] = str(error)
            return done
        for source, target in pairs.items():
            await self._guarded(done, source, partial(self._pair, source, target, done))
        self.rounds += 1
        self._note_changes(before)
        return done

    def _paired(
        self, source: Collection[str], target: Collection[str], done: Round
    ) -> dict[str, str]:
        """Return the pairs that can be copied now; one whose counterpart is away holds up no other.

        Raises:
            ConfigError: There is none.
        """
        if not self.pairs:
            self.pairs = pair_brokers(source, target, self._given_pairs)
            return self.pairs
        # A NameServer that was just started may know another group first: none takes its place.
        kept = {**self.pairs, **self._given_pairs}
        kept = {here: there for here, there in kept.items() if here in source}
        ready = {here: there for here, there in kept.items() if there in target}
        if not ready or len(ready) == len(kept):
            self.pairs = pair_brokers(source, target, kept)
            return self.pairs
        for here in kept.keys() - ready.keys():
            done.errors[here] = f"its counterpart {kept[here]} is not registered at the target"
        return ready

    async def _guarded(self, done: Round, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do *work*; note what a cluster refuses or does not answer."""
        try:
            await work()
        except (ConfigError, InvariantBroken):
            raise
        except MQError as error:
            done.errors[what] = str(error)

    # ------------------------------------------------------------------------------ one pair

    async def _pair(self, source_name: str, target_name: str, done: Round) -> None:
        topics = await self._tables(source_name, target_name, done)
        self._forget_all_but(source_name, topics)
        copies = await self._with_bounds(source_name, target_name, topics, done)
        before = sum(copy.copied_messages for copy, _ in copies)
        await self._all(
            [(str(copy.source), partial(self._step, copy, seen)) for copy, seen in copies],
            done,
        )
        done.copied_messages += sum(copy.copied_messages for copy, _ in copies) - before
        ends: dict[QueueKey, int] = {
            (copy.source.topic, copy.source.queue_id): copy.end
            for copy, _ in copies
            if copy.is_copy
        }
        await self._offsets(source_name, target_name, ends, done)

    def _forget_all_but(self, source_name: str, topics: Collection[str]) -> None:
        """Forget queues of topics that were deleted at the source."""
        for queue in list(self.queues):
            if queue.broker_name == source_name and queue.topic not in topics:
                del self.queues[queue]

    async def _step(self, copy: QueueCopy, seen: tuple[Bounds, Bounds]) -> None:
        await copy.step(self._source, self._target, seen)

    async def _tables(
        self, source_name: str, target_name: str, done: Round
    ) -> dict[str, TopicConfig]:
        """Make the topics and groups of one pair equal; return the topics that are copied."""
        source, target, selection = self._source, self._target, self._selection
        all_topics = await source.topics(source_name)
        topics = {name: one for name, one in all_topics.items() if selection.has_topic(name)}
        all_groups = await source.groups(source_name)
        groups = {name: one for name, one in all_groups.items() if selection.has_group(name)}
        new_topics = topics_to_put(topics, await target.topics(target_name))
        done.put_topics += await self._put(
            partial(target.put_topics, target_name),
            {f"topic {one.topic_name}": one for one in new_topics},
            done,
        )
        new_groups = groups_to_put(groups, await target.groups(target_name))
        done.put_groups += await self._put(
            partial(target.put_groups, target_name),
            {f"consumer group {one.group_name}": one for one in new_groups},
            done,
        )
        return topics

    async def _put(
        self,
        put: Callable[[Sequence[ConfigT]], Awaitable[None]],
        configs: Mapping[str, ConfigT],
        done: Round,
    ) -> int:
        """Put all of *configs*; one by one where one of them is refused. Return how many are."""
        if not configs:
            return 0
        try:
            await put(list(configs.values()))
        except RequestFailedError as error:
            if len(configs) == 1 or error.outcome == "unknown":
                done.errors |= dict.fromkeys(configs, str(error))
                return 0
        else:
            return len(configs)
        return sum([await self._put(put, {what: one}, done) for what, one in configs.items()])

    async def _with_bounds(
        self,
        source_name: str,
        target_name: str,
        topics: Mapping[str, TopicConfig],
        done: Round,
    ) -> list[tuple[QueueCopy, tuple[Bounds, Bounds]]]:
        """Return each queue with what was seen of it; the target is asked before the source."""
        found: list[tuple[QueueCopy, tuple[Bounds, Bounds]]] = []
        there_are: dict[str, Collection[int]] = {}

        async def look(config: TopicConfig) -> None:
            there = await self._target.all_bounds(target_name, config)
            here = await self._source.all_bounds(source_name, config)
            there_are[config.topic_name] = here
            for queue_id, bounds in sorted(here.items()):
                queue = MessageQueue(config.topic_name, source_name, queue_id)
                copy = self.queues.get(queue)
                if copy is None:
                    counterpart = MessageQueue(config.topic_name, target_name, queue_id)
                    copy = self.queues[queue] = QueueCopy(queue, counterpart)
                seen = Bounds(*bounds), Bounds(*there.get(queue_id, (0, 0)))
                found.append((copy, seen))

        await self._all(
            [(name, partial(look, config)) for name, config in sorted(topics.items())], done
        )
        for queue in list(self.queues):
            kept = there_are.get(queue.topic)
            if queue.broker_name == source_name and kept is not None and queue.queue_id not in kept:
                del self.queues[queue]  # the topic was made again with fewer
        return found

    async def _offsets(
        self, source_name: str, target_name: str, ends: Mapping[QueueKey, int], done: Round
    ) -> None:
        source = await self._source.committed(source_name)
        target = await self._target.committed(target_name)
        commits = offsets_to_commit(source, target, ends, self._selection)

        async def commit(one: Commit) -> None:
            queue = MessageQueue(one.topic, target_name, one.queue_id)
            await self._target.commit(one.group, queue, one.offset)
            done.commits += 1

        await self._all(
            [(f"offset of {one.group} in {one.topic}", partial(commit, one)) for one in commits],
            done,
        )

    async def _all(
        self, works: Iterable[tuple[str, Callable[[], Awaitable[None]]]], done: Round
    ) -> None:
        """Do each of *works*, some at a time."""
        limit = trio.CapacityLimiter(self._queues_at_once)

        async def one(what: str, work: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                await self._guarded(done, what, work)

        async with trio.open_nursery() as nursery:
            for what, work in works:
                nursery.start_soon(one, what, work)

    def _note_changes(self, before: Mapping[MessageQueue, str]) -> None:
        """Log each queue that stops, and each that goes on."""
        for queue, copy in self.queues.items():
            was = before.get(queue, "")
            if copy.stopped and copy.stopped != was:
                _log.error("mirror_queue_stopped", queue=str(queue), why=copy.stopped)
            elif was and not copy.stopped:
                _log.info("mirror_queue_goes_on", queue=str(queue))
