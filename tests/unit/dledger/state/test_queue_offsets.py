"""Queue offsets are handed out from applied state plus what is in flight."""

from __future__ import annotations

from commitlog.entry import Run
from dledger.state.queue_offsets import PendingQueueOffsets
from dledger.state.tables import QueueBounds
from tests.harness.fake_group import empty_tables


def test_runs_continue_each_other_and_the_applied_queue() -> None:
    tables = empty_tables()
    tables.queues["T", 0] = QueueBounds(0, 10)
    offsets = PendingQueueOffsets(tables)
    assert offsets.assign([Run("T", 0, 3), Run("T", 1, 2), Run("T", 0, 1)]) == [10, 0, 13]
    assert offsets.assign([Run("T", 0, 1)]) == [14]


def test_a_deleted_topic_begins_at_zero_again() -> None:
    tables = empty_tables()
    tables.queues["T", 0] = QueueBounds(0, 10)
    offsets = PendingQueueOffsets(tables)
    offsets.assign([Run("T", 0, 3), Run("U", 0, 2)])
    del tables.queues["T", 0]
    offsets.forget_topics(["T"])
    assert offsets.assign([Run("T", 0, 1), Run("U", 0, 1)]) == [0, 2]
