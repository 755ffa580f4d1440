"""The table of messages that are out by POP, entry by entry."""

import pytest

from dledger.state.pop import (
    HAS_ROW,
    Out,
    PopChange,
    PopGrant,
    PopKey,
    PopMark,
    PopRow,
    PopRows,
    RequestMode,
    apply_pop,
)
from dledger.state.state_record import ConsumerOffsetsChange, SubscriptionGroupsChange, TopicsChange
from dledger.state.topics import TopicConfig
from tests.harness.fake_group import FakeGroup

KEY: PopKey = ("g", "T", 0)


def grant(*fresh: int, since: int = 0, until: int | None = None, **more: object) -> PopChange:
    end = max(fresh, default=since - 1) + 1 if until is None else until
    again = more.get("again", ())
    assert isinstance(again, tuple)
    committed = more.get("committed")
    assert committed is None or isinstance(committed, int)
    return PopChange(grants=(PopGrant(KEY, 100, since, end, fresh, again, committed),))


def acked(*pairs: tuple[int, int]) -> PopChange:
    return PopChange(acked=tuple(PopMark(KEY, offset, token) for offset, token in pairs))


def table(*changes: tuple[PopChange, int, int], rows: PopRows | None = None) -> PopRows:
    """Apply changes, each with the index and the store time of its entry."""
    rows = {} if rows is None else rows
    for change, index, at_ms in changes:
        apply_pop(rows, change, index, at_ms, lambda _key: None)
    return rows


def test_token_zero_of_a_message_not_out_does_nothing() -> None:
    rows = table((grant(0), 7, 0))
    before = rows[KEY].copied().to_state()
    marks = (PopMark(KEY, 5, 0),)
    table((PopChange(marks, marks, marks), 8, 0), rows=rows)
    assert rows[KEY].copied().to_state() == before


def test_grant_that_no_consumer_saw_is_no_attempt() -> None:
    rows = table((grant(0, 1), 7, 0))
    unseen, seen = PopMark(KEY, 0, 7, 5, True), PopMark(KEY, 1, 7, 5)
    table((PopChange(changed=(unseen, seen)), 8, 10), rows=rows)
    assert [out.attempts for out in rows[KEY].out.values()] == [0, 1]
    table((grant(since=2, until=2, again=((0, 8), (1, 8))), 9, 20), rows=rows)
    assert [out.attempts for out in rows[KEY].out.values()] == [1, 2]
    stale = PopChange(changed=(PopMark(KEY, 0, 7, 5, True),))
    table((stale, 10, 30), rows=rows)
    assert rows[KEY].out[0].attempts == 1


def test_floor_rises_over_a_long_gap_in_few_steps() -> None:
    row = PopRow(0, 1 << 60)
    row.put((1 << 60) - 1, Out(1, 1, 0, 1))
    row.raise_floor()
    assert row.floor == (1 << 60) - 1


@pytest.mark.parametrize(
    ("found", "now"), [(None, 2), (2, None), (2, 1), (HAS_ROW, None), (HAS_ROW, 2)]
)
def test_a_grant_found_another_committed_offset(found: int | None, now: int | None) -> None:
    change = grant(2, 3, since=2, committed=found)
    rows: PopRows = {}
    assert apply_pop(rows, change, 7, 0, lambda _: now) == {}
    assert rows == {}
    same = grant(2, 3, since=2, committed=now)
    assert apply_pop(rows, same, 7, 0, lambda _: now) == {KEY: 2}


def test_passed_over_messages_raise_the_offset() -> None:
    rows: PopRows = {}
    assert apply_pop(rows, grant(since=2, until=9, committed=2), 7, 0, lambda _: 2) == {KEY: 9}
    assert rows == {}


def test_expired_come_in_the_order_of_their_times() -> None:
    row = PopRow(0, 200)
    for offset in range(200):
        row.put(offset, Out(1, 1, 0, 1000 - offset))
    for offset in range(0, 200, 2):
        row.put(offset, Out(2, 2, 0, 5000))
    assert list(row.expired(1000)) == list(range(199, 0, -2))
    assert row.next_expiry_ms() == 801
    for offset in range(1, 200, 2):
        row.remove(offset)
    assert (row.next_expiry_ms(), list(row.expired(4999))) == (5000, [])
    assert sorted(row.expired(5000)) == list(range(0, 200, 2))


def test_one_end_of_many_is_yielded_once() -> None:
    row = PopRow(0, 3)
    for end in (50, 60, 50):
        row.put(0, Out(1, end, 0, end))
    row.put(1, Out(1, 1, 0, 50))
    assert list(row.expired(100)) == [0, 1]
    row.remove(0)
    assert list(row.expired(100)) == [1]


def test_what_is_out_stands_lowest_first() -> None:
    rows = table((grant(2, 0), 7, 1000), (grant(3, since=3, again=((0, 7),)), 9, 1100))
    assert list(rows[KEY].out) == [0, 2, 3]


def test_pop_record_is_applied(group: FakeGroup) -> None:
    group.store(TopicsChange(put=(TopicConfig("T", 1, 1),)))
    change = PopChange(grants=grant(0, 1).grants, modes=(RequestMode("g", "T", "POP", 8),))
    group.store(change)
    assert set(group.state.pops[KEY].out) == {0, 1}
    assert group.state.consumer_offset(*KEY) == 0
    assert group.state.request_modes == {("T", "g"): RequestMode("g", "T", "POP", 8)}


def test_set_offset_ends_the_grants_of_a_queue(group: FakeGroup) -> None:
    group.store(TopicsChange(put=(TopicConfig("T", 1, 1),)))
    group.store(grant(0, 1))
    group.store(ConsumerOffsetsChange.of((("g", "T", 0, 5),)))
    assert (group.state.pops, group.state.consumer_offset(*KEY)) == ({}, 5)
    assert KEY in group.state.pops.changed


def test_deleted_topic_takes_its_grants_and_modes_along(group: FakeGroup) -> None:
    group.store(TopicsChange(put=(TopicConfig("T", 1, 1),)))
    group.store(PopChange(grants=grant(0).grants, modes=(RequestMode("g", "T", "POP"),)))
    group.store(TopicsChange(delete=("T",)))
    assert (group.state.pops, group.state.request_modes) == ({}, {})
    group.store(acked((0, 2)))
    assert group.state.pops == {}


def test_deleted_group_takes_its_modes_along(group: FakeGroup) -> None:
    modes = (
        RequestMode("g", "T", "POP"),
        RequestMode("h", "T", "POP"),
        RequestMode("g", "U", "POP"),
    )
    group.store(PopChange(modes=modes))
    group.store(SubscriptionGroupsChange(delete=("g",)))
    assert group.state.request_modes == {("T", "h"): RequestMode("h", "T", "POP")}
    group.store(SubscriptionGroupsChange(delete=("h",)))
    assert group.state.request_modes == {}
