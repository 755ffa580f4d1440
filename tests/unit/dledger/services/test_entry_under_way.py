"""The one entry under way: what each answer means, before and after it is applied."""

from __future__ import annotations

import pytest

from dledger.commitlog.errors import Outcome
from dledger.group_api import Proposed
from dledger.services.entry_under_way import EntryUnderWay, Fate
from dledger.services.pop_lines import PopAsk

STORED = Proposed("stored", index=7)


@pytest.mark.parametrize(
    ("proposed", "applied_index", "is_current", "fate"),
    [
        (STORED, 7, True, Fate.APPLIED),
        (STORED, 7, False, Fate.APPLIED),
        (STORED, 6, True, Fate.STORED),
        (STORED, 6, False, Fate.OUT_OF_SIGHT),
        (Proposed("unknown"), 9, True, Fate.UNKNOWN),
        (Proposed("unknown"), 9, False, Fate.UNKNOWN),
        (Proposed("not_stored"), 9, True, Fate.NOT_STORED),
    ],
)
def test_entry_fate_follows_from_its_answer(
    proposed: Proposed, applied_index: int, is_current: bool, fate: Fate
) -> None:
    entry = EntryUnderWay[PopAsk, str]([], "decision", 3)
    assert entry.answered(proposed, applied_index, is_current=is_current) is fate
    assert entry.is_uncertain == (is_current and fate is Fate.UNKNOWN)


def test_entry_without_an_answer_has_not_arrived() -> None:
    assert not EntryUnderWay[PopAsk, str]([], "decision", 3).has_arrived(99, 99)


@pytest.mark.parametrize(("applied_index", "arrived"), [(6, False), (7, True), (8, True)])
def test_stored_entry_arrives_when_it_is_applied(applied_index: int, arrived: bool) -> None:
    entry = EntryUnderWay[PopAsk, str]([], "decision", 3)
    entry.answered(STORED, 5, is_current=True)
    assert entry.waits_for_apply
    assert entry.has_arrived(applied_index, newest=99) == arrived


@pytest.mark.parametrize(("outcome", "arrived"), [("unknown", True), ("not_stored", False)])
def test_uncertain_entry_ends_with_the_next_change(outcome: Outcome, arrived: bool) -> None:
    entry = EntryUnderWay[PopAsk, str]([], "decision", 3)
    entry.answered(Proposed(outcome), 5, is_current=True)
    assert not entry.waits_for_apply
    assert not entry.has_arrived(99, newest=3)
    assert entry.has_arrived(99, newest=4) == arrived
