"""Offsets come out in the order of their times, whole seconds, never before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dledger.services.timer import HOUR_MS, TimerIndex

TIMES = st.lists(st.integers(0, 3 * 3600).map(lambda second: second * 1000), max_size=60)


def filled(times: list[int], first: int = 0) -> TimerIndex:
    index = TimerIndex()
    add(index, times, first)
    return index


def add(index: TimerIndex, times: list[int], first: int) -> None:
    index.add(np.arange(first, first + len(times)), np.array(times, np.int64))


@given(TIMES, TIMES, st.integers(0, 4 * 3600), st.integers(1, 7))
def test_offsets_come_in_order_and_none_before_its_time(
    before: list[int], later: list[int], now_s: int, count: int
) -> None:
    index = filled(before)
    index.take(now_s * 500, 0)  # opens some hours
    add(index, later, len(before))
    due = sorted((time, offset) for offset, time in enumerate([*before, *later]))
    now_ms = now_s * 1000
    taken: list[int] = []
    while part := index.take(now_ms, count):
        assert len(part) <= count
        taken += part
    assert taken == [offset for time, offset in due if time <= now_ms]
    assert len(index) == len(due) - len(taken)
    left = [time for time, _ in due if time > now_ms]
    next_ms = index.next_ms()
    if left:
        assert next_ms is not None
        assert min(left) - HOUR_MS < next_ms <= min(left)
    else:
        assert next_ms is None


def test_what_is_put_back_comes_first() -> None:
    index = filled([1000, 1000, 2000, 3000])
    assert index.take(2500, 3) == [0, 1, 2]
    index.put_back([1, 2], 2500)
    add(index, [2000], 4)
    assert len(index) == 4
    assert index.take(2500, 9) == [1, 2, 4]
    assert index.take(3000, 9) == [3]


def test_it_wakes_for_the_hour_and_then_for_the_second() -> None:
    index = filled([HOUR_MS + 5000])
    assert index.next_ms() == HOUR_MS
    assert index.take(HOUR_MS, 1) == []
    assert index.next_ms() == HOUR_MS + 5000
