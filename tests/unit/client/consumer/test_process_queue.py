"""What may be committed never skips a message, and limits hold the reader back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.client.consumer.process_queue import FlowLimits, ProcessQueue


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


def test_the_limits_are_rocketmqs() -> None:
    assert FlowLimits() == FlowLimits(1000, 100 * 1024 * 1024, 2000)


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
