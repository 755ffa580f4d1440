"""Queue offsets are handed out from applied state plus what is in flight.

How many entries are applied in one go.
"""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dledger.applier import APPLY_AT_ONCE_ENTRIES, Applier
from dledger.commitlog.entry import Run
from dledger.commitlog.queue_unit import UNIT_DTYPE
from dledger.proposals import PendingQueueOffsets
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
