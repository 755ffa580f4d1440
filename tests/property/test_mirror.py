"""Mirrors over one queue, stopped, repeated and two at a time: the target is the source's copy.

The clusters are in memory; requests are refused and answers lost by chance, retention cuts the
source. What a copy has to keep is compared by the places of the layout, not by the codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from dledger.client.admin.copies import with_ipv4_store_host
from dledger.client.core.errors import ClientError
from dledger.client.core.route import MessageQueue
from dledger.mirror.plan import Level, Step, Stopped
from dledger.mirror.queue_copy import CHUNK_BYTES, QueueCopy
from tests.harness.memory_queues import STORE_HOST_V6, MemoryQueues
from tests.harness.stored_fields import kept_fields

HERE = MessageQueue("T", "source", 3)
THERE = MessageQueue("T", "target", 3)

actions = st.one_of(
    st.tuples(st.just("produce"), st.integers(1, 40)),
    st.tuples(st.just("retain"), st.integers(0, 60)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("both"), st.just(0)),
    st.tuples(st.just("restart"), st.integers(0, 1)),
)


class Mirrored:
    """A source, a target and two mirrors of one queue."""

    def __init__(self, seed: int, fault_rate: float) -> None:
        self.source = MemoryQueues(seed, fault_rate=fault_rate)
        self.target = MemoryQueues(seed + 1, fault_rate=fault_rate)
        self.mirrors = [QueueCopy(HERE, THERE) for _ in range(2)]

    async def step(self, number: int) -> Step | None:
        try:
            return await self.mirrors[number].step(self.source, self.target)
        except ClientError:
            return None

    def produce(self, count: int) -> None:
        for _ in range(count):
            number = self.source.end(HERE)
            host = STORE_HOST_V6 if number % 5 == 0 else b""
            self.source.produce(HERE, b"message %d" % number, store_host=host)

    def check(self) -> None:
        """Every message at the target is the one that the source had at that offset."""
        for offset in range(self.target.first.get(THERE, 0), self.target.end(THERE)):
            theirs = kept_fields(self.target.record(THERE, offset))
            assert theirs == kept_fields(self.source.record(HERE, offset)), f"offset {offset}"


def with_ipv4_hosts(mirrored: Mirrored) -> None:
    """Let the target store as a broker does, behind the SDK's append."""
    append = mirrored.target.append

    async def stored(queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        return await append(queue, offset, [with_ipv4_store_host(one) for one in records])

    mirrored.target.append = stored  # type: ignore[method-assign]  # as a broker stores


@given(st.lists(actions, max_size=25), st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.4]))
def test_target_is_a_copy_whatever_is_interrupted(
    plan: list[tuple[str, int]], seed: int, fault_rate: float
) -> None:
    mirrored = Mirrored(seed, fault_rate)
    with_ipv4_hosts(mirrored)

    async def play() -> None:
        for action, number in plan:
            if action == "produce":
                mirrored.produce(number)
            elif action == "retain":
                mirrored.source.keep_from(HERE, number)
            elif action == "step":
                await mirrored.step(number)
            elif action == "both":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(mirrored.step, 0)
                    nursery.start_soon(mirrored.step, 1)
            else:
                mirrored.mirrors[number] = QueueCopy(HERE, THERE)
            mirrored.check()
        mirrored.source.fault_rate = mirrored.target.fault_rate = 0.0
        last = await QueueCopy(HERE, THERE).step(mirrored.source, mirrored.target)
        mirrored.check()
        begin, end = mirrored.source.begin_of(HERE), mirrored.source.end(HERE)
        if isinstance(last, Stopped):
            assert 0 < mirrored.target.end(THERE) < begin, last.why
            assert "does not keep offsets" in last.why
        else:
            assert isinstance(last, Level)
            assert mirrored.target.end(THERE) == end

    trio.run(play)


def test_topic_made_again_is_not_continued() -> None:
    """The new topic is longer than what was copied of the old one."""
    mirrored = Mirrored(1, 0.0)

    async def play() -> None:
        for fresh in (False, True):
            mirrored.source.make_again(HERE)
            mirrored.target.make_again(THERE)
            for number in range(10):
                mirrored.source.produce(HERE, b"old %d" % number)
            assert await mirrored.step(0) == Level()
            mirrored.source.make_again(HERE)
            for number in range(30):
                mirrored.source.produce(HERE, b"new %d" % number)
            if fresh:
                mirrored.mirrors[0] = QueueCopy(HERE, THERE)
            step = await mirrored.step(0)
            assert isinstance(step, Stopped)
            assert "at offset 9 is another one" in step.why
            assert mirrored.mirrors[0].stopped == step.why
            assert mirrored.target.end(THERE) == 10

    trio.run(play)


def test_producer_between_two_chunks_stops_the_queue() -> None:
    """The refused append is not simply made behind what the producer sent."""
    mirrored = Mirrored(1, 0.0)
    with_ipv4_hosts(mirrored)
    append = mirrored.target.append

    async def overtaken(queue: MessageQueue, offset: int, records: Sequence[Buffer]) -> int:
        if offset == 5:
            mirrored.target.append = append  # type: ignore[method-assign]  # the producer comes once
            mirrored.target.produce(THERE, b"of a producer at the target")
        return await append(queue, offset, records)

    async def play() -> None:
        mirrored.produce(5)
        assert await mirrored.step(0) == Level()
        mirrored.target.append = overtaken  # type: ignore[method-assign]  # what the test is about
        mirrored.produce(5)
        found = await mirrored.step(0)
        assert isinstance(found, Stopped), found
        assert "offset 5 is another one" in found.why
        assert mirrored.target.end(THERE) == 6

    trio.run(play)


def test_stopped_queue_goes_on_once_its_topic_is_made_again() -> None:
    mirrored = Mirrored(1, 0.0)

    async def play() -> None:
        mirrored.produce(5)
        await mirrored.step(0)
        mirrored.produce(20)
        mirrored.source.keep_from(HERE, 15)
        assert isinstance(await mirrored.step(0), Stopped)
        mirrored.target.make_again(THERE)
        mirrored.source.keep_from(HERE, 16)
        assert await mirrored.step(0) == Level()
        assert (mirrored.target.first[THERE], mirrored.target.end(THERE)) == (16, 25)
        assert mirrored.mirrors[0].stopped == ""

    with_ipv4_hosts(mirrored)
    trio.run(play)


def test_long_queue_is_copied_in_chunks_to_its_end_then() -> None:
    mirrored = Mirrored(1, 0.0)

    async def play() -> None:
        for number in range(40):
            mirrored.source.produce(HERE, b"%d" % number + bytes(CHUNK_BYTES // 10))
        assert await mirrored.step(0) == Level()
        assert mirrored.target.appends == 5, "nine fit a chunk"
        mirrored.check()
        assert (mirrored.mirrors[0].copied_messages, mirrored.mirrors[0].lag) == (40, 0)

    trio.run(play)
