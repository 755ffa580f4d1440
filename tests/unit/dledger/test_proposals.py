"""Queue offsets are handed out from applied state plus what is in flight."""

from __future__ import annotations

from commitlog.entry import Run
from dledger.proposals import PendingQueueOffsets
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
