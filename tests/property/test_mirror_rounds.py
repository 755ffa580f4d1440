"""Rounds of two mirrors between clusters that are changed, refuse, and answer late or never.

Topics are deleted and made again on either side, with other numbers of queues; producers write to
the target; retention cuts the source; groups commit on both sides; NameServers forget a broker
group; mirrors are cancelled in the middle, and new ones begin. What is sent is judged by
`tests.harness.hostile_clusters`; in the end each queue is a copy, or stopped for a reason that the
documents name.
"""

from __future__ import annotations

import random
from typing import cast

import pytest
import trio

from dledger.client.admin.copies import ClusterCopies
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError
from dledger.jepsen_like.simulation.virtual_time import seeded_scheduler
from dledger.mirror import queue_copy
from dledger.mirror.mirror import Mirror
from dledger.mirror.plan import Selection
from dledger.mirror.verify import compare
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig
from dledger.testing.doubles import ManualClock
from tests.harness.hostile_clusters import HostileCluster, Target

BROKERS = ("a", "b")
TOPICS = ("T", "U")
GROUP = "g"
STEPS = 40
SEEDS = 60
QUIET_ROUNDS = 30


class Sites:
    """Two clusters, two mirrors, and what the world does to them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        rate = rng.choice([0.0, 0.05, 0.2])
        self.source = HostileCluster(rng.randrange(1 << 30), BROKERS, rate)
        self.target = Target(rng.randrange(1 << 30), self.source, rate)
        for broker in BROKERS:
            for topic in TOPICS:
                self.source.make_topic(broker, topic, rng.randint(1, 3))
            self.source.group_tables[broker][GROUP] = SubscriptionGroupConfig(GROUP)
        self.mirrors = [self.mirror(), self.mirror()]
        self.written = 0

    def mirror(self) -> Mirror:
        here, there = cast(ClusterCopies, self.source), cast(ClusterCopies, self.target)
        return Mirror(here, there, ManualClock(), Selection())

    def queue(self, cluster: HostileCluster) -> MessageQueue | None:
        queues = cluster.queues_of(self.rng.choice(BROKERS))
        return self.rng.choice(queues) if queues else None

    def body(self) -> bytes:
        self.written += 1
        return b"message %d" % self.written

    # -- what happens at any time, also in the middle of a round

    def produce(self) -> None:
        queue = self.queue(self.source)
        for _ in range(self.rng.randint(1, 12) if queue else 0):
            self.source.produce(cast(MessageQueue, queue), self.body())

    def retain(self) -> None:
        queue = self.queue(self.source)
        if queue is not None:
            begin, end = self.source.begin_of(queue), self.source.end(queue)
            self.source.keep_from(queue, self.rng.randint(begin, end))

    def produce_at_target(self) -> None:
        queue = self.queue(self.target)
        for _ in range(self.rng.randint(1, 4) if queue else 0):
            self.target.produce_here(cast(MessageQueue, queue), self.body())

    def disturb(self) -> None:
        """Let another client come between two requests of a mirror."""
        act = self.rng.random()
        if act < 0.03:
            self.produce()
        elif act < 0.04:
            self.retain()
        elif act < 0.042:
            self.produce_at_target()

    # -- what happens between rounds

    def commit(self) -> None:
        """Let the group consume at one side."""
        cluster = self.rng.choice([self.source, self.source, self.target])
        queue = self.queue(cluster)
        if queue is not None:
            table = cluster.offsets[queue.broker_name].setdefault((GROUP, queue.topic), {})
            begin, end = cluster.begin_of(queue), cluster.end(queue)
            table[queue.queue_id] = self.rng.randint(begin, end)

    def make_again(self) -> None:
        """Delete a topic at one side, and make it again with other queues there or not."""
        cluster: HostileCluster = self.rng.choice([self.source, self.target])
        broker, topic = self.rng.choice(BROKERS), self.rng.choice(TOPICS)
        queue_nums = self.rng.randint(1, 3)
        ends = [cluster.end(MessageQueue(topic, broker, number)) for number in range(3)]
        cluster.delete_topic(broker, topic)
        self.target.made_again.update(MessageQueue(topic, broker, number) for number in range(3))
        if cluster is self.target and self.rng.random() < 0.5:
            return
        cluster.make_topic(broker, topic, queue_nums)
        if self.rng.random() < 0.5:  # as many messages as before, other ones
            for number in range(queue_nums):
                queue = MessageQueue(topic, broker, number)
                for _ in range(ends[number]):
                    if cluster is self.target:
                        self.target.produce_here(queue, self.body())
                    else:
                        cluster.produce(queue, self.body())

    def forget_names(self) -> None:
        """Let the target's NameServers know fewer broker groups, or all again."""
        self.target.names = self.rng.choice([[], ["a"], ["b"], *[list(BROKERS)] * 3])

    async def round(self, number: int) -> None:
        try:
            await self.mirrors[number].round()
        except ConfigError:  # the first round: there is no counterpart
            self.mirrors[number] = self.mirror()

    async def cancelled_round(self, number: int) -> None:
        """Cancel a round at one of its requests, and perhaps begin with a new mirror."""
        left = self.rng.randint(1, 60)
        with trio.CancelScope() as scope:

            def disturb() -> None:
                nonlocal left
                left -= 1
                if not left:
                    scope.cancel()

            self.target.on_request = disturb
            await self.round(number)
        self.target.on_request = self.disturb
        if self.rng.random() < 0.5:
            self.mirrors[number] = self.mirror()

    async def play(self) -> None:
        self.source.on_request = self.target.on_request = self.disturb
        for _ in range(STEPS):
            act = self.rng.random()
            if act < 0.2:
                self.produce()
            elif act < 0.25:
                self.retain()
            elif act < 0.28:
                self.produce_at_target()
            elif act < 0.4:
                self.commit()
            elif act < 0.46:
                self.make_again()
            elif act < 0.5:
                self.forget_names()
            elif act < 0.6:
                await self.cancelled_round(self.rng.randrange(2))
            elif act < 0.85:
                await self.round(self.rng.randrange(2))
            else:
                async with trio.open_nursery() as nursery:
                    for number in range(2):
                        nursery.start_soon(self.round, number)

    async def settle(self, mirror: Mirror) -> None:
        """Without faults a mirror gets as far as it can."""
        await self.target.settle()
        for _ in range(QUIET_ROUNDS):
            done = await mirror.round()
            assert not done.errors
            if done.is_quiet and not mirror.lag:
                return
        raise AssertionError("it never comes to an end")

    def check_stopped(self, mirror: Mirror, *, is_new: bool) -> None:
        """A queue is stopped where the documents name a reason, and only there.

        Args:
            is_new: It has compared the ends of all queues as they are now.
        """
        wanted = set()
        for broker in BROKERS:
            for queue in self.source.queues_of(broker):
                begin, end = self.source.begin_of(queue), self.source.end(queue)
                stands = self.target.end(queue)
                if (
                    stands > end
                    or 0 < stands < begin
                    or not self.target.is_same_at(queue, stands - 1)
                ):
                    wanted.add(queue)
                else:
                    assert stands == end, f"{queue} ends at {stands}, not at {end}"
        assert set(mirror.stopped) == wanted if is_new else set(mirror.stopped) <= wanted
        assert set(mirror.queues) == {
            queue for broker in BROKERS for queue in self.source.queues_of(broker)
        }

    def check_offsets(self, stopped: set[MessageQueue]) -> None:
        """Each committed offset has come, as far as its queue has."""
        for broker in BROKERS:
            for (group, topic), offsets in self.source.offsets[broker].items():
                there = self.target.offsets[broker].get((group, topic), {})
                for queue_id, offset in offsets.items():
                    queue = MessageQueue(topic, broker, queue_id)
                    if queue in self.source.queues_of(broker) and queue not in stopped:
                        assert there.get(queue_id, -1) >= min(offset, self.target.end(queue))


async def judged(sites: Sites) -> None:
    """Let everything happen, then compare what each mirror found with what the documents name."""
    await sites.play()
    for mirror in (*sites.mirrors, sites.mirror()):
        await sites.settle(mirror)
        sites.check_stopped(mirror, is_new=mirror not in sites.mirrors)
        sites.check_offsets(set(mirror.stopped))
    here, there = cast(ClusterCopies, sites.source), cast(ClusterCopies, sites.target)
    found = await compare(here, there, Selection())
    assert not found.tables
    if not mirror.stopped and not any(sites.target.of_others.values()):
        assert not found.offsets


@pytest.mark.parametrize("seed", range(SEEDS))
def test_rounds_copy_or_stop_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_copy, "CHUNK_MESSAGES", 4)
    monkeypatch.setattr(queue_copy, "STEP_CHUNKS", 3)
    with seeded_scheduler(seed):
        trio.run(judged, Sites(seed))
