"""Queues that a consumer owns, and what was pulled of each."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from dledger.client.consumer.config import PushConfig
from dledger.client.consumer.offsets import FROM_FIRST
from dledger.client.consumer.owned_queues import Gate, OwnedQueue, OwnedQueues, Reading
from dledger.client.consumer.process_queue import FlowLimits, ProcessQueue
from dledger.client.consumer.push_consumer import PushConsumer
from dledger.client.consumer.subscriptions import SubscriptionExpression
from dledger.client.core.errors import OffsetIllegalError
from dledger.client.core.message_ext import PullResult
from dledger.client.core.route import MessageQueue
from dledger.client.producer.producer import Producer
from dledger.remoting.machine import TrioClock
from dledger.remoting.protocol.codes import RequestCode
from dledger.remoting.protocol.command import RemotingCommand
from tests.unit.client.consumer.consuming import Heard, send, settled
from tests.unit.client.fake_cluster import Broker, World


async def test_owned_queue_does_not_wait_for_a_pull_of_a_silent_broker(
    world: World, heard: Heard
) -> None:
    async with (
        world.client() as one,
        world.client() as two,
        Producer(two, "p") as producer,
        PushConsumer(one, "c", heard, {"T": "*"}, PushConfig(consume_from=FROM_FIRST)) as consumer,
    ):
        await settled(consumer)
        await trio.sleep(1)
        world.group.elect(1)  # the old leader does not answer the pulls it holds
        await send(producer, 4)
        # Another part of this client asks the old leader for anything and is redirected.
        one.leaders.learn("g", world.group.brokers[1].address, world.group.term)
        began = trio.current_time()
        await heard.wait_for(4)
        assert trio.current_time() - began < 2


@pytest.mark.parametrize("next_begin_offset", [0, 99])
async def test_seek_outlasts_a_moved_offset_of_before(next_begin_offset: int) -> None:
    """The answer is there when the seek comes, in the same turn of the loop."""
    owned = OwnedQueue(MessageQueue("T", "b", 0))
    owned.begin(10)

    class Reader:
        asked = 0

        async def pull(self, *_: object, **__: object) -> PullResult:
            self.asked += 1
            if self.asked > 1:
                await trio.sleep_forever()
            owned.begin(50)
            raise OffsetIllegalError(
                "moved", next_begin_offset=next_begin_offset, min_offset=0, max_offset=0
            )

    reading = Reading(
        Reader(),  # type: ignore[arg-type]  # a double
        TrioClock(),
        lambda _: SubscriptionExpression(),
        FlowLimits(),
        Gate(),
        lambda _: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading.read, owned)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert owned.messages is not None
    assert owned.messages.next_offset == 50


async def test_no_queue_has_two_at_work_however_it_is_assigned() -> None:
    """Letting go takes a while; queues are taken away and given back at any moment of it."""
    rng = random.Random(914)
    queues = [MessageQueue("T", "b", number) for number in range(4)]
    at_work: Counter[MessageQueue] = Counter()
    taken: Counter[MessageQueue] = Counter()
    assigned: frozenset[MessageQueue] = frozenset()
    given_back_early = 0

    async def work(owned: OwnedQueue) -> None:
        at_work[owned.queue] += 1
        taken[owned.queue] += 1
        assert at_work[owned.queue] == 1, owned.queue
        await trio.sleep_forever()

    async def let_go(owned: OwnedQueue) -> None:
        await trio.sleep(rng.uniform(0, 3))
        at_work[owned.queue] = 0

    def freed() -> None:
        wakes[-1].set()

    wakes: list[trio.Event] = []
    held = OwnedQueues(work=work, let_go=let_go, freed=freed)
    async with trio.open_nursery() as nursery:
        held.start(nursery)
        for _ in range(500):
            assigned = frozenset(rng.sample(queues, rng.randrange(5)))
            given_back_early += len(assigned & set(held.held()) - held.queues)
            wakes.append(trio.Event())
            await held.apply("T", assigned)
            assert len(held.held()) == len(set(held.held()))
            with trio.move_on_after(rng.uniform(0, 2)):
                while True:  # as a consumer does: what was freed may be owned again
                    await wakes[-1].wait()
                    wakes.append(trio.Event())
                    await held.apply("T", assigned)
        await trio.sleep(5)
        await held.apply("T", assigned)
        assert held.queues == assigned
        nursery.cancel_scope.cancel()
    assert given_back_early > 50
    assert min(taken[queue] for queue in queues) > 50


async def test_given_up_queue_is_not_locked_again_beside_its_unlock(world: World) -> None:
    """A question for locks that waits for the unlock comes before the queue has left."""
    async with world.client() as one, world.client() as two:

        async def unlock(broker: Broker, asked: RemotingCommand) -> RemotingCommand:
            assert first._locks is not None
            first._locks.lock_now()
            await trio.sleep(0.5)
            return broker._unlock(asked)

        world.group.on_each(RequestCode.UNLOCK_BATCH_MQ, unlock)
        first = PushConsumer(one, "c", Heard(), {"T": "*"}, orderly=True)
        async with first:
            await settled(first)
            for _ in range(8):  # which of the two goes on first is drawn by lot
                async with PushConsumer(two, "c", Heard(), {"T": "*"}, orderly=True) as second:
                    await settled(first, second)
                    await trio.sleep(5)
                    assert second._locks is not None
                    held = [q.queue_id for q in second.queues if second._locks.is_held(q)]
                    assert sorted(held) == [2, 3]
                await settled(first)


@dataclass(frozen=True)
class Item:
    queue_offset: int
    size: int = 10


def filled(offsets: list[int], next_offset: int, begin: int = 0) -> ProcessQueue[Item]:
    queue: ProcessQueue[Item] = ProcessQueue(begin)
    queue.put([Item(offset) for offset in offsets], next_offset)
    return queue


def test_acknowledging_twice_counts_once() -> None:
    queue = filled([0, 1], 2)
    (first,) = queue.take(1)
    queue.acknowledge([first, first])
    queue.acknowledge([first])
    assert (len(queue), queue.cached_bytes) == (1, 10)


@pytest.mark.parametrize(
    ("limits", "offsets", "next_offset", "held_back_by"),
    [
        (FlowLimits(max_messages=3), [0, 1, 2], 3, "max_messages"),
        (FlowLimits(max_messages=4), [0, 1, 2], 3, None),
        (FlowLimits(max_bytes=30), [0, 1, 2], 3, "max_bytes"),
        (FlowLimits(max_bytes=31), [0, 1, 2], 3, None),
        (FlowLimits(max_offset_span=5), [4], 11, "max_offset_span"),
        (FlowLimits(max_offset_span=5), [4], 10, None),
        (FlowLimits(max_offset_span=None), [4], 1000, None),
        (FlowLimits(max_offset_span=5), [], 1000, None),
    ],
)
def test_limits_hold_the_reader_back(
    limits: FlowLimits, offsets: list[int], next_offset: int, held_back_by: str | None
) -> None:
    assert filled(offsets, next_offset).held_back_by(limits) == held_back_by


@given(st.data())
def test_a_model_with_sets_commits_the_same(data: st.DataObject) -> None:
    queue: ProcessQueue[Item] = ProcessQueue(0)
    waiting: list[Item] = []
    hand: list[Item] = []
    end = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["put", "take", "acknowledge", "put_back"])):
            case "put":
                skips = data.draw(st.lists(st.integers(1, 3), max_size=4))
                items = []
                for skip in skips:
                    end += skip
                    items.append(Item(end - 1, data.draw(st.integers(1, 9))))
                end += data.draw(st.integers(0, 2))
                queue.put(items, end)
                waiting += items
            case "take":
                count = data.draw(st.integers(1, 5))
                taken = queue.take(count)
                assert taken == waiting[:count]
                waiting = waiting[count:]
                hand += taken
            case "acknowledge" if hand:
                item = data.draw(st.sampled_from(hand))
                queue.acknowledge([item])
                hand.remove(item)
            case "put_back" if hand:
                item = hand.pop()
                queue.put_back([item])
                waiting.insert(0, item)
        left = [*waiting, *hand]
        assert queue.commit_offset == min((item.queue_offset for item in left), default=end)
        assert queue.cached_bytes == sum(item.size for item in left)
        assert (len(queue), queue.waiting, queue.in_hand) == (len(left), len(waiting), len(hand))
