"""The offset of a group as the log has it: what is appended counts before it is applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.group_api import OffsetCommit
from dledger.proposals import PendingCommits

SLOTS = [("g", "T", 0), ("g", "T", 1), ("h", "T", 0)]


def commit(slot: tuple[str, str, int], offset: int, expected: int | None = None) -> OffsetCommit:
    group, topic, queue_id = slot
    return OffsetCommit(group, topic, queue_id, offset, expected)


class Log:
    """Commits entry by entry, and the tables as some of them are applied."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str, int], int] = {}
        self.entries: list[list[OffsetCommit]] = []
        self.applied = 0
        state: Any = SimpleNamespace(consumer_offset=lambda *slot: self.tables.get(slot))
        self.pending = PendingCommits(state)

    def append(self, *commits: OffsetCommit) -> None:
        self.entries.append(list(commits))
        self.pending.keep(len(self.entries), commits)

    def apply(self) -> None:
        if self.applied < len(self.entries):
            for commit in self.entries[self.applied]:
                self.tables[commit.group, commit.topic, commit.queue_id] = commit.offset
            self.applied += 1
            self.pending.applied(self.applied)

    def offset(self, slot: tuple[str, str, int]) -> int:
        """Return the newest offset over all entries: what no table is needed for."""
        found = -1
        for commits in self.entries:
            for commit in commits:
                if (commit.group, commit.topic, commit.queue_id) == slot:
                    found = commit.offset
        return found


ACTS = st.lists(
    st.one_of(
        st.just(None),
        st.lists(st.tuples(st.sampled_from(SLOTS), st.integers(0, 9)), min_size=1, max_size=3),
    ),
    max_size=30,
)


@given(ACTS)
def test_offset_is_that_of_the_newest_entry(acts: list[Any]) -> None:
    log = Log()
    for act in acts:
        if act is None:
            log.apply()
        else:
            log.append(*(commit(slot, offset) for slot, offset in act))
        for slot in SLOTS:
            here = log.offset(slot)
            assert log.pending.refusal_of([commit(slot, 99, here)]) is None
            error = log.pending.refusal_of([commit(slot, 99, here + 1)])
            assert error is not None
            assert (error.committed, error.queue_id) == (here, slot[2])
    while log.applied < len(log.entries):
        log.apply()
    assert not log.pending._newest
    assert not log.pending._entries


def test_what_expects_nothing_is_never_refused() -> None:
    log = Log()
    log.append(OffsetCommit("g", "T", 0, 5))
    assert log.pending.refusal_of([OffsetCommit("g", "T", 0, 1)]) is None


@pytest.mark.parametrize("expected", [-1, 4])
def test_first_of_several_that_differs_is_named(expected: int) -> None:
    log = Log()
    log.append(OffsetCommit("g", "T", 0, 5))
    error = log.pending.refusal_of(
        [OffsetCommit("h", "T", 0, 9, -1), OffsetCommit("g", "T", 0, 9, expected)]
    )
    assert error is not None
    assert (error.topic, error.queue_id, error.committed) == ("T", 0, 5)
