"""Rounds of a mirror: when it waits, what ends it, and what is no difference of two tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from dledger.client.admin.copies import ClusterCopies
from dledger.client.core.errors import BrokerUnreachableError, RequestFailedError
from dledger.client.core.route import MessageQueue
from dledger.commitlog.errors import ConfigError
from dledger.mirror import queue_copy
from dledger.mirror.mirror import FRUITLESS_MAX, PAUSE_S, ROUND_S, Mirror, Round
from dledger.mirror.plan import Selection
from dledger.mirror.verify import compare
from dledger.remoting.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from dledger.testing.doubles import ManualClock
from tests.harness.memory_queues import MemoryQueues

BROKER = "broker-a"
PLAIN = TopicConfig("T", read_queue_nums=1, write_queue_nums=1)
EXPIRING = TopicConfig(
    "T", read_queue_nums=1, write_queue_nums=1, attributes={"message.expires": "true"}
)


class Cluster(MemoryQueues):
    """A cluster of one broker group in memory.

    Attributes:
        keeps: Topics that stay as they are, whatever is put.
        refused: Topics that may not be put.
    """

    def __init__(self, *topics: TopicConfig, groups: Sequence[SubscriptionGroupConfig] = ()):
        super().__init__()
        self.names = [BROKER]
        self.topic_table = {one.topic_name: one for one in topics}
        self.group_table = {one.group_name: one for one in groups}
        self.keeps: set[str] = set()
        self.refused: set[str] = set()
        self.puts = 0
        self.offset_table: dict[tuple[str, str], dict[int, int]] = {}

    async def broker_names(self) -> list[str]:
        return self.names

    async def topics(self, _: str) -> dict[str, TopicConfig]:
        return dict(self.topic_table)

    async def groups(self, _: str) -> dict[str, SubscriptionGroupConfig]:
        return dict(self.group_table)

    async def put_topics(self, _: str, configs: Sequence[TopicConfig]) -> None:
        self.puts += 1
        if self.refused & {one.topic_name for one in configs}:
            raise RequestFailedError("refused", code=1)
        self.topic_table |= {
            one.topic_name: one for one in configs if one.topic_name not in self.keeps
        }

    async def put_groups(self, _: str, configs: Sequence[SubscriptionGroupConfig]) -> None:
        self.puts += 1
        self.group_table |= {one.group_name: one for one in configs}

    async def all_bounds(self, broker: str, config: TopicConfig) -> dict[int, tuple[int, int]]:
        queue = MessageQueue(config.topic_name, broker, 0)
        return {0: (self.begin_of(queue), self.end(queue))}

    async def committed(self, _: str) -> dict[tuple[str, str], dict[int, int]]:
        return self.offset_table

    async def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        self.offset_table.setdefault((group, queue.topic), {})[queue.queue_id] = offset


class EnoughError(Exception):
    """Ends a mirror that runs until it is cancelled."""


def mirror_of(source: Cluster, target: Cluster, clock: ManualClock) -> Mirror:
    here, there = cast(ClusterCopies, source), cast(ClusterCopies, target)
    return Mirror(here, there, clock, Selection())


async def rounds(mirror: Mirror, count: int) -> list[Round]:
    """Let a mirror run for *count* rounds."""
    found: list[Round] = []

    def note(done: Round) -> None:
        found.append(done)
        if len(found) == count:
            raise EnoughError

    with pytest.raises(EnoughError):
        await mirror.run(note)
    return found


async def test_a_table_that_is_kept_otherwise_is_put_in_peace() -> None:
    """A target that does not keep a topic as it is put must not be asked without a pause."""
    source, target, clock = Cluster(PLAIN), Cluster(), ManualClock()
    target.keeps.add("T")
    found = await rounds(mirror_of(source, target, clock), 6)
    assert [done.put_topics for done in found] == [1] * 6
    assert clock.now_s == 5 * ROUND_S


async def test_what_is_done_once_ends_though_tables_are_put() -> None:
    source, target, clock = Cluster(PLAIN, TopicConfig("U")), Cluster(), ManualClock()
    target.keeps.add("T")
    target.refused.add("U")
    done = await mirror_of(source, target, clock).run_once()
    assert list(done.errors) == ["topic U"]
    assert clock.now_s == (FRUITLESS_MAX - 1) * PAUSE_S


async def test_marks_that_a_broker_keeps_are_no_difference() -> None:
    noted = SubscriptionGroupConfig("g", subscription_data_set=[{"topic": "T"}])
    source = Cluster(PLAIN, groups=[noted])
    target = Cluster(EXPIRING, groups=[SubscriptionGroupConfig("g")])
    here, there = cast(ClusterCopies, source), cast(ClusterCopies, target)
    assert (await compare(here, there, Selection())).is_same
    (done,) = await rounds(mirror_of(source, target, ManualClock()), 1)
    assert (done.put_topics, done.put_groups, target.puts) == (0, 0, 0)
    source.topic_table["T"] = TopicConfig("T", read_queue_nums=1, write_queue_nums=1, order=True)
    source.group_table["g"].retry_max_times = 3
    assert (await compare(here, there, Selection())).tables == ["topic T", "consumer group g"]
    (done,) = await rounds(mirror_of(source, target, ManualClock()), 1)
    assert (done.put_topics, done.put_groups) == (1, 1)
    assert target.topic_table["T"].order
    assert target.topic_table["T"].attributes == EXPIRING.attributes
    assert target.group_table["g"].retry_max_times == 3


async def test_a_source_that_expires_marks_the_target() -> None:
    source, target = Cluster(EXPIRING), Cluster(PLAIN)
    (done,) = await rounds(mirror_of(source, target, ManualClock()), 1)
    assert (done.put_topics, target.topic_table["T"]) == (1, EXPIRING)


@pytest.mark.parametrize("is_source", [True, False])
async def test_groups_that_go_away_end_no_running_mirror(is_source: bool) -> None:
    """A NameServer that was just started knows no broker for some seconds."""
    source, target, clock = Cluster(PLAIN), Cluster(), ManualClock()
    queue = MessageQueue("T", BROKER, 0)
    source.produce(queue, b"first")
    mirror = mirror_of(source, target, clock)
    assert (await mirror.round()).copied_messages == 1
    changed = source if is_source else target
    changed.names = []
    source.produce(queue, b"second")
    (done,) = await rounds(mirror, 1)
    assert "clusters" in done.errors
    assert done.copied_messages == 0
    changed.names = [BROKER]
    (done,) = await rounds(mirror, 1)
    assert (done.errors, done.copied_messages) == ({}, 1)


async def test_a_group_is_copied_to_where_it_was_copied_before() -> None:
    """A NameServer that was just started may know another group of the target first."""
    source, target = Cluster(PLAIN), Cluster()
    source.produce(MessageQueue("T", BROKER, 0), b"first")
    target.names = [BROKER, "broker-b"]
    mirror = mirror_of(source, target, ManualClock())
    assert (await mirror.round()).copied_messages == 1
    target.names = ["broker-b"]
    target.topic_table.clear()
    done = await mirror.round()
    assert (list(done.errors), done.put_topics) == (["clusters"], 0)
    assert mirror.pairs == {BROKER: BROKER}


async def test_a_group_that_left_the_source_holds_no_other_up() -> None:
    source, target = Cluster(PLAIN), Cluster()
    source.names = target.names = ["a", "b"]
    mirror = mirror_of(source, target, ManualClock())
    await mirror.round()
    assert mirror.pairs == {"a": "a", "b": "b"}
    source.names = ["b"]
    source.produce(MessageQueue("T", "b", 0), b"first")
    done = await mirror.round()
    assert (done.errors, done.copied_messages) == ({}, 1)


async def test_an_empty_cluster_is_not_the_same() -> None:
    """A copy of nothing, found the same, would let someone delete the source."""
    empty, full = Cluster(), Cluster(PLAIN)
    empty.names = []
    here, there = cast(ClusterCopies, empty), cast(ClusterCopies, full)
    for pair in ((here, there), (there, here), (here, here)):
        with pytest.raises(ConfigError, match=r"no broker group|the target has none"):
            await compare(*pair, Selection())
        with pytest.raises(ConfigError):
            await Mirror(*pair, ManualClock(), Selection()).run_once()


def contradicting_clusters() -> tuple[Cluster, Cluster, MessageQueue]:
    """Return source, target, and a queue that has three other messages there."""
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    queue = MessageQueue("T", BROKER, 0)
    for number in range(3):
        source.produce(queue, b"of the source %d" % number)
        target.produce(queue, b"of the target %d" % number)
    source.produce(queue, b"more")
    source.offset_table["g", "T"] = {0: 3}
    return source, target, queue


async def test_offsets_of_a_stopped_queue_are_not_committed() -> None:
    """What stands there is not what the group consumed: it would skip messages that it has not."""
    source, target, queue = contradicting_clusters()
    mirror = mirror_of(source, target, ManualClock())
    (done,) = await rounds(mirror, 1)
    assert list(mirror.stopped) == [queue]
    assert (done.commits, target.offset_table) == (0, {})
    target.make_again(queue)
    (done,) = await rounds(mirror, 1)
    assert (done.copied_messages, done.commits) == (4, 1)
    assert target.offset_table == {("g", "T"): {0: 3}}


async def test_a_queue_that_ends_early_at_one_side_differs() -> None:
    """A cluster that returns nothing at an offset that it holds has lost what stood there."""
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    queue = MessageQueue("T", BROKER, 0)
    for number in range(3):
        source.produce(queue, b"%d" % number)
        target.produce(queue, b"%d" % number)
    read = target.read

    async def short(
        queue: MessageQueue, offset: int, max_bytes: int, max_messages: int = 4096
    ) -> list[memoryview]:
        return (await read(queue, offset, max_bytes, max_messages))[: max(0, 2 - offset)]

    target.read = short  # type: ignore[method-assign]  # a cluster that lost what it holds
    (found,) = (
        await compare(cast(ClusterCopies, source), cast(ClusterCopies, target), Selection())
    ).queues
    assert (found.compared, found.differs_at, found.verdict) == (2, 2, "differs")


async def test_offsets_wait_until_a_queue_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new mirror whose first comparison gets no answer has not seen what stands there."""
    source, target, queue = contradicting_clusters()
    mirror = mirror_of(source, target, ManualClock())

    async def unreachable(*_: object) -> list[memoryview]:
        raise BrokerUnreachableError("no leader")

    with monkeypatch.context() as first_round:
        first_round.setattr(source, "read", unreachable)
        done = await mirror.round()
    assert (list(done.errors), done.commits, target.offset_table) == ([str(queue)], 0, {})
    assert not (await mirror.round()).commits
    assert list(mirror.stopped) == [queue]


async def test_a_level_queue_that_differs_is_stopped() -> None:
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    queue = MessageQueue("T", BROKER, 0)
    source.produce(queue, b"of the source")
    target.produce(queue, b"of the target")
    source.offset_table["g", "T"] = {0: 1}
    mirror = mirror_of(source, target, ManualClock())
    assert not (await mirror.run_once()).commits
    assert "at offset 0 is another one" in mirror.stopped[queue]


async def test_a_topic_made_again_at_the_target_is_not_continued() -> None:
    """It has as many messages as the one before, of a producer there."""
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    queue = MessageQueue("T", BROKER, 0)
    source.produce(queue, b"first")
    mirror = mirror_of(source, target, ManualClock())
    await mirror.round()
    target.make_again(queue)
    target.produce(queue, b"of the target")
    source.produce(queue, b"second")
    await mirror.round()
    assert target.end(queue) == 1
    assert "at offset 0 is another one" in mirror.stopped[queue]


async def test_queues_that_a_topic_has_no_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    lost = MessageQueue("T", BROKER, 1)
    bounds = {0: (0, 0), 1: (5, 9)}

    async def all_bounds(*_: object) -> dict[int, tuple[int, int]]:
        return dict(bounds)

    monkeypatch.setattr(source, "all_bounds", all_bounds)
    mirror = mirror_of(source, target, ManualClock())
    await mirror.round()
    assert lost in mirror.queues
    del bounds[1]
    await mirror.round()
    assert list(mirror.queues) == [MessageQueue("T", BROKER, 0)]


async def test_a_target_group_that_is_away_holds_no_other_up() -> None:
    source, target = Cluster(PLAIN), Cluster()
    source.names = ["a", "b", "c"]
    target.names = ["a", "b", "c", "d"]
    mirror = mirror_of(source, target, ManualClock())
    await mirror.round()
    target.names = ["b", "d"]
    source.names = ["a", "b", "c", "e"]
    source.produce(MessageQueue("T", "b", 0), b"first")
    done = await mirror.round()
    assert (sorted(done.errors), done.copied_messages) == (["a", "c"], 1)
    assert mirror.pairs == {"a": "a", "b": "b", "c": "c"}, "no new pair meanwhile"


async def test_a_queue_that_is_far_behind_leaves_others_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_copy, "CHUNK_MESSAGES", 2)
    monkeypatch.setattr(queue_copy, "STEP_CHUNKS", 3)
    source, target = Cluster(PLAIN), Cluster(PLAIN)
    queue = MessageQueue("T", BROKER, 0)
    for number in range(15):
        source.produce(queue, b"%d" % number)
    source.offset_table["g", "T"] = {0: 15}
    mirror = mirror_of(source, target, ManualClock())
    assert [done.copied_messages for done in await rounds(mirror, 3)] == [6, 6, 3]
    assert target.offset_table == {("g", "T"): {0: 15}}
