"""How many entries are applied in one go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commitlog.queue_unit import UNIT_DTYPE
from dledger.applier import (
    APPLY_AT_ONCE_ENTRIES,
    APPLY_AT_ONCE_QUEUES,
    QUEUES_PER_TOPICS,
    Applier,
)
from dledger.state.apply import Applied, QueueUnits

COMMITTED = 200
EMPTY = np.empty(0, UNIT_DTYPE)


class Store:
    """A store whose entries are all of one kind."""

    installing = False

    def __init__(self, *, units: int, topics_changed: bool) -> None:
        self.derived_index = 0
        self._units = units
        self._topics_changed = topics_changed

    def applicable(self, commit_index: int) -> int:
        return commit_index

    def apply_next(self, _: int) -> Applied:
        self.derived_index += 1
        units = [QueueUnits("T", 0, 0, EMPTY)] * self._units
        return Applied(
            self.derived_index, units, [], topics_changed=self._topics_changed, deleted_topics=()
        )


@pytest.mark.parametrize(
    ("units", "topics_changed", "at_once"),
    [
        (1, False, APPLY_AT_ONCE_ENTRIES),
        (32, False, APPLY_AT_ONCE_QUEUES // 32),
        (0, True, APPLY_AT_ONCE_QUEUES // QUEUES_PER_TOPICS),
        (16, True, APPLY_AT_ONCE_QUEUES // (QUEUES_PER_TOPICS + 16)),
    ],
)
def test_applier_applies_fewer_entries_that_cost_more(
    units: int, topics_changed: bool, at_once: int
) -> None:
    store: Any = Store(units=units, topics_changed=topics_changed)
    node: Any = SimpleNamespace(commit_index=COMMITTED)
    proposals: Any = SimpleNamespace(resolve=lambda _: None, call=lambda *_: None)
    clock: Any = None
    applier = Applier(store, node, proposals, lambda _: False, clock)
    applier.apply(APPLY_AT_ONCE_ENTRIES)
    assert store.derived_index == at_once
    applier.apply(APPLY_AT_ONCE_ENTRIES)
    assert store.derived_index == 2 * at_once
