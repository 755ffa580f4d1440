"""Queue offsets are handed out from applied state plus what is in flight.

How many entries are applied in one go.
"""

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.applier import APPLY_AT_ONCE_ENTRIES, Applier
from dledger.commitlog.entry import Run
from dledger.commitlog.queue_unit import UNIT_DTYPE
from dledger.group_api import OffsetCommit
from dledger.proposals import PendingCommits, PendingQueueOffsets
from dledger.remoting.protocol.topic_names import STATE_TOPIC
from dledger.state.apply import Applied, QueueUnits
from dledger.state.tables import QueueBounds
from tests.harness.fake_group import empty_tables


def assigned(offsets: PendingQueueOffsets, runs: list[Run]) -> list[int]:
    first_offsets, following = offsets.plan(runs)
    offsets.keep(following)
    return first_offsets


def test_runs_continue_each_other_and_the_applied_queue() -> None:
    tables = empty_tables()
    tables.queues["T", 0] = QueueBounds(0, 10)
    offsets = PendingQueueOffsets(tables)
    assert assigned(offsets, [Run("T", 0, 3), Run("T", 1, 2), Run("T", 0, 1)]) == [10, 0, 13]
    assert assigned(offsets, [Run("T", 0, 1)]) == [14]


def test_a_deleted_topic_begins_at_zero_again() -> None:
    tables = empty_tables()
    tables.queues["T", 0] = QueueBounds(0, 10)
    offsets = PendingQueueOffsets(tables)
    assigned(offsets, [Run("T", 0, 3), Run("U", 0, 2)])
    del tables.queues["T", 0]
    offsets.forget_topics(("T",))
    assert assigned(offsets, [Run("T", 0, 1), Run("U", 0, 1)]) == [0, 2]


def test_a_plan_that_is_not_kept_counts_for_nothing() -> None:
    offsets = PendingQueueOffsets(empty_tables())
    assert offsets.plan([Run("T", 0, 3)])[0] == [0]
    assert assigned(offsets, [Run("T", 0, 3)]) == [0]
    offsets.clear()
    assert assigned(offsets, [Run("T", 0, 3)]) == [0]


COMMITTED = 200


class Store:
    """A store whose entries are all of one kind."""

    installing = False

    def __init__(self, queues: int, records: int, topic: str, topics_changed: bool) -> None:
        self.derived_index = 0
        units = np.ones(records, UNIT_DTYPE)
        self._units = [QueueUnits(topic, 0, 0, units)] * queues
        self._topics_changed = topics_changed

    def applicable(self, commit_index: int) -> int:
        return commit_index

    def apply_next(self, _: int) -> Applied:
        self.derived_index += 1
        changed = self._topics_changed
        return Applied(
            self.derived_index, self._units, [], topics_changed=changed, deleted_topics=()
        )


@pytest.mark.parametrize(
    ("queues", "records", "topic", "topics_changed", "at_once"),
    [
        (1, 1, "T", False, APPLY_AT_ONCE_ENTRIES),
        (32, 0, "T", False, 10),
        (1, 1_000, "T", False, 2),
        (0, 0, "T", True, 19),
        (1, 10_000, STATE_TOPIC, False, 1),
    ],
)
def test_applier_applies_fewer_entries_that_cost_more(
    queues: int, records: int, topic: str, topics_changed: bool, at_once: int
) -> None:
    store: Any = Store(queues, records, topic, topics_changed)
    node: Any = SimpleNamespace(commit_index=COMMITTED)
    proposals: Any = SimpleNamespace(resolve=lambda _: None, call=lambda *_: None)
    clock: Any = None
    applier = Applier(store, node, proposals, lambda _: False, clock)
    applier.apply()
    assert store.derived_index == at_once
    applier.apply()
    assert store.derived_index == 2 * at_once
    applier.apply(inf)
    assert store.derived_index == 2 * at_once + APPLY_AT_ONCE_ENTRIES, "a read waits for all"


# -- the offset of a group as the log has it: what is appended counts before it is applied


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
